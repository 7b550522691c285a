"""Faults planted in real architectures: our GPT, and BERT, Llama, T5 and ViT of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from halfstep.trainer.models import GPTConfig
from halfstep.trainer.models.gpt import GPT

ROWS = 4
INF = math.inf


def gpt() -> nn.Module:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64))


def bert(attention: str = "eager") -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, num_labels=3,
            attn_implementation=attention,
        )
    )  # fmt: skip


def llama(attention: str = "eager") -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, intermediate_size=64, max_position_embeddings=16,
            attn_implementation=attention, use_cache=False,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            decoder_start_token_id=0, use_cache=False, attn_implementation="eager",
        )
    )  # fmt: skip


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            image_size=16, patch_size=8, num_labels=3, attn_implementation="eager",
        )
    )  # fmt: skip


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt, "bert": bert, "llama": llama, "t5": t5, "vit": vit
}  # fmt: skip


def batch_for(name: str, rows: int = ROWS, seed: int = 0) -> dict[str, torch.Tensor]:
    """A micro-batch, by the names of the model's arguments."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 64, (rows, 8), generator=g)
    if name == "vit":
        pixels = torch.randn(rows, 3, 16, 16, generator=g)
        return {"pixel_values": pixels, "labels": torch.randint(3, (rows,), generator=g)}
    if name == "bert":
        mask = torch.ones(rows, 8, dtype=torch.long)
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": torch.randint(3, (rows,), generator=g),
        }
    labels = torch.randint(64, (rows, 8), generator=g)
    return {"input_ids": tokens, "labels": labels}


def loss_of(name: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss: a mean over its targets."""
    if name != "gpt":
        return model(**batch).loss
    total, count = model.loss_sum((batch["input_ids"], batch["labels"]))
    return total / count


@dataclass(frozen=True)
class Fault:
    """A fault, and what must be said of it."""

    name: str
    model: str
    """Key of ``MAKERS``."""
    plant: Callable[[nn.Module, dict[str, torch.Tensor]], None]
    cause_class: str
    op: str
    """The beginning of the operation's name."""
    remedy: str
    """Words of the remedy."""
    module: str | None = None
    """The module; None: not checked."""
    policy: str = "fp16-mixed"
    direction: str = "forward"
    samples: tuple[int, ...] = ()


@torch.no_grad()
def fill(parameter: torch.Tensor, value: float) -> None:
    parameter.fill_(value)


def scaled(path: str, factor: float) -> Callable[[nn.Module, Any], None]:
    """Multiply one parameter."""

    @torch.no_grad()
    def plant(model: nn.Module, batch: Any) -> None:
        model.get_parameter(path).mul_(factor)

    return plant


def filled(**values: float) -> Callable[[nn.Module, Any], None]:
    """Fill parameters, whose dots are written as two underscores."""

    def plant(model: nn.Module, batch: Any) -> None:
        for path, value in values.items():
            fill(model.get_parameter(path.replace("__", ".")), value)

    return plant


def both(*plants: Callable[[nn.Module, Any], None]) -> Callable[[nn.Module, Any], None]:
    def plant(model: nn.Module, batch: Any) -> None:
        for each in plants:
            each(model, batch)

    return plant


def nan_in(path: str) -> Callable[[nn.Module, Any], None]:
    @torch.no_grad()
    def plant(model: nn.Module, batch: Any) -> None:
        model.get_parameter(path).view(-1)[3] = math.nan

    return plant


def broken_pixel(row: int, value: float = math.nan) -> Callable[[nn.Module, Any], None]:
    def plant(model: nn.Module, batch: Any) -> None:
        batch["pixel_values"][row, 1, 2, 3] = value

    return plant


def mask_twice(model: nn.Module, batch: Any) -> None:
    """Add the additive mask of the lowest number twice, in every layer; mask all of row 1."""
    batch["attention_mask"][1] = 0

    def double(module: nn.Module, args: Any, kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is None:
            return args, kwargs
        return args, {**kwargs, "attention_mask": mask + mask}

    for layer in model.bert.encoder.layer:
        layer.attention.self.register_forward_pre_hook(double, with_kwargs=True)


class NoBackward(torch.autograd.Function):
    """The identity with a backward that divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 0


def through(function: Any) -> Callable[[nn.Module, Any], None]:
    """Let the classifier's input pass through an autograd function."""

    def plant(model: nn.Module, batch: Any) -> None:
        layer = model.classifier
        layer.register_forward_pre_hook(lambda m, args: (function.apply(args[0]),))

    return plant


PRODUCT = "scale an operand down before the matmul"
SCORES = "q = q * head_dim ** -0.5"
SUM = "x.float() + y.float()"


FAULTS = [
    # overflow in the output of an MLP
    Fault("gpt-mlp", "gpt",
          filled(layers__1__mlp__up__bias=2e4, layers__1__mlp__down__weight=1.0),
          "overflow in a matmul", "aten.", PRODUCT, "layers.1.mlp.down"),
    Fault("bert-mlp", "bert",
          filled(bert__encoder__layer__1__intermediate__dense__bias=2e4,
                 bert__encoder__layer__1__output__dense__weight=1.0),
          "overflow in a matmul", "aten.addmm", PRODUCT, "bert.encoder.layer.1.output.dense"),
    Fault("llama-gate", "llama",
          both(scaled("model.layers.1.mlp.gate_proj.weight", 1e5),
               scaled("model.layers.1.mlp.up_proj.weight", 1e5)),
          "overflow", "aten.mul", "x.float()", "model.layers.1.mlp"),
    # overflow in a residual sum
    Fault("gpt-residual", "gpt",
          filled(layers__0__mlp__down__bias=4e4, layers__1__attn__proj__bias=4e4),
          "overflow in a sum", "aten.add", SUM, "layers.1", "fp16-master"),
    # overflow in attention scores
    Fault("bert-scores", "bert",
          filled(bert__encoder__layer__0__attention__self__query__bias=1e3,
                 bert__encoder__layer__0__attention__self__key__bias=1e3),
          "overflow in a matmul", "aten.bmm", SCORES,
          "bert.encoder.layer.0.attention.self"),
    Fault("gpt-fused-loss", "gpt",
          both(scaled("wte.weight", 50), filled(final_norm__weight=1e4)),
          "overflow in a matmul", "aten.mm", PRODUCT),
    Fault("vit-nan-pixel", "vit", broken_pixel(2), "data not finite", "aten.",
          "torch.nan_to_num(x)", None, "bf16-mixed", samples=(2,)),
    Fault("vit-large-pixel", "vit", broken_pixel(3, 1e6), "overflow in a cast", "aten._to_copy",
          "clamp before the cast", None, samples=(3,)),
    Fault("llama-nan-weight", "llama", nan_in("model.layers.0.self_attn.v_proj.weight"),
          "weight not finite", "aten.", "go back to a checkpoint",
          "model.layers.0.self_attn.v_proj", "bf16-mixed"),
    # masks
    Fault("bert-mask-twice", "bert", mask_twice, "overflow of a mask", "aten.add",
          "add the mask once", None, "bf16-mixed", samples=(1,)),
    # the backward
    Fault("vit-own-backward", "vit", through(NoBackward), "own autograd.Function", "aten.div",
          "gradcheck", "classifier", "bf16-mixed", direction="backward"),
]  # fmt: skip
