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
    plant: Callable[[Any, dict[str, torch.Tensor]], None]
    told: tuple[str, str, str]
    """Beginning of the operation's name, class, and words of the remedy."""
    module: str | None = None
    """The module; None: not checked."""
    policy: str = "fp16-mixed"
    direction: str = "forward"
    samples: tuple[int, ...] = ()


def filled(values: dict[str, float]) -> Callable[[nn.Module, Any], None]:
    """Fill parameters."""

    @torch.no_grad()
    def plant(model: nn.Module, batch: Any) -> None:
        for path, value in values.items():
            model.get_parameter(path).fill_(value)

    return plant


@torch.no_grad()
def nan_weight(model: nn.Module, batch: Any) -> None:
    model.get_parameter("model.layers.0.self_attn.v_proj.weight").view(-1)[3] = math.nan


def mask_twice(model: Any, batch: Any) -> None:
    """Add the additive mask of the lowest number twice, in every layer; mask all of row 1."""
    batch["attention_mask"][1] = 0

    def double(module: nn.Module, args: Any, kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        return args, kwargs if mask is None else {**kwargs, "attention_mask": mask + mask}

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


def own_backward(model: Any, batch: Any) -> None:
    model.classifier.register_forward_pre_hook(lambda m, args: (NoBackward.apply(args[0]),))


ATTENTION = "bert.encoder.layer.0.attention.self"
FAULTS = [
    Fault("gpt-residual", "gpt",
          filled({"layers.0.mlp.down.bias": 4e4, "layers.1.attn.proj.bias": 4e4}),
          ("aten.add", "overflow in a sum", "x.float() + y.float()"), "layers.1", "fp16-master"),
    Fault("bert-scores", "bert",
          filled({f"{ATTENTION}.query.bias": 1e3, f"{ATTENTION}.key.bias": 1e3}),
          ("aten.bmm", "overflow in a matmul", "q = q * head_dim ** -0.5"), ATTENTION),
    Fault("llama-nan-weight", "llama", nan_weight,
          ("aten.", "weight not finite", "go back to a checkpoint"),
          "model.layers.0.self_attn.v_proj", "bf16-mixed"),
    Fault("bert-mask-twice", "bert", mask_twice,
          ("aten.add", "overflow of a mask", "add the mask once"), None, "bf16-mixed",
          samples=(1,)),
    Fault("vit-own-backward", "vit", own_backward,
          ("aten.div", "own autograd.Function", "gradcheck"), "classifier", "bf16-mixed",
          direction="backward"),
]  # fmt: skip
