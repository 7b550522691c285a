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

from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.models.shapes import GPTConfig

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
    loss: Callable[[nn.Module, dict[str, Any]], torch.Tensor] | None = None
    """In place of the model's own."""
    direction: str = "forward"


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


def uneven(path: str) -> Callable[[nn.Module, Any], None]:
    """Fill a bias with 40,000 and 20,000 in turn, so that a norm of it is a norm."""

    @torch.no_grad()
    def plant(model: nn.Module, batch: Any) -> None:
        bias = model.get_parameter(path)
        bias.fill_(4e4)[::2] = 2e4

    return plant


def signs(path: str, size: float) -> Callable[[nn.Module, Any], None]:
    @torch.no_grad()
    def plant(model: nn.Module, batch: Any) -> None:
        model.get_parameter(path).sign_().mul_(size)

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


class Squares(torch.autograd.Function):
    """Overflows in fp16 in its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        h = x.half() + 1000.0
        return (h * h).float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def through(function: Any) -> Callable[[nn.Module, Any], None]:
    """Let the classifier's input pass through an autograd function."""

    def plant(model: nn.Module, batch: Any) -> None:
        layer = model.classifier
        layer.register_forward_pre_hook(lambda m, args: (function.apply(args[0]),))

    return plant


class Unwritten(nn.Module):
    """Adds memory that nobody has written."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        noise = torch.empty(y.shape)
        noise.view(torch.int32).fill_(0x7FC00000)  # NaN, as an allocator may leave it
        return y + noise


def unwritten(model: nn.Module, batch: Any) -> None:
    model.classifier = Unwritten(model.classifier)


def broken_buffer(model: nn.Module, batch: Any) -> None:
    norm = nn.BatchNorm1d(32).eval()
    norm.running_mean[1] = math.nan
    model.classifier = nn.Sequential(norm, model.classifier)


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**{k: v for k, v in batch.items() if k != "labels"}).logits


def log_of_softmax(model: nn.Module, batch: Any) -> torch.Tensor:
    p = (logits_of(model, batch).float() * 1e6).softmax(-1)
    return -p.log().gather(1, batch["labels"][:, None]).mean()


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return (logits_of(model, batch).float() * 1e25).square().mean()


def difference(model: nn.Module, batch: Any) -> torch.Tensor:
    x = logits_of(model, batch).float()
    hidden = x.masked_fill(torch.ones_like(x).bool().tril(), -INF)
    return (hidden - hidden[:, :1]).clamp(-1, 1).mean()


def root_of_zero(model: nn.Module, batch: Any) -> torch.Tensor:
    return (logits_of(model, batch).float() * 0).square().sum(-1).sqrt().mean()


def steep(model: nn.Module, batch: Any) -> torch.Tensor:
    """Finite in the forward; the gradient passes 1e30 * 1e30."""
    x = logits_of(model, batch).float()
    return ((x * 1e-30) * 1e30 * 1e-30 * 1e30).mean() * 1e30 * 1e-10


def root_of_negative(model: nn.Module, batch: Any) -> torch.Tensor:
    return (-1 - logits_of(model, batch).float().square()).sqrt().mean()


def with_literal(model: nn.Module, batch: Any) -> torch.Tensor:
    return (logits_of(model, batch).float() * math.nan).mean()


PRODUCT = "scale the layer's input or weight down"
SCORES = "q = q * head_dim ** -0.5"
RESIDUAL = "residual stream in fp32"
LOSS = "loss_fn(logits.float(), targets)"


def trained_too_fast(model: nn.Module, batch: Any) -> None:
    """Steps of sign descent at a learning rate of 3: finite weights, but huge ones."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(12):
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=g).sign(), alpha=3.0)


def huge(model: nn.Module, batch: Any) -> None:
    """Weights as after hundreds of such steps."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e4 if p.dim() > 1 else 1.0)


FAULTS = [
    # overflow in the output of an MLP
    Fault("gpt-mlp", "gpt",
          filled(layers__1__mlp__up__bias=2e4, layers__1__mlp__down__weight=1.0),
          "overflow in a product", "aten.", PRODUCT, "layers.1.mlp.down"),
    Fault("bert-mlp", "bert",
          filled(bert__encoder__layer__1__intermediate__dense__bias=2e4,
                 bert__encoder__layer__1__output__dense__weight=1.0),
          "overflow in a product", "aten.addmm", PRODUCT, "bert.encoder.layer.1.output.dense"),
    Fault("llama-mlp", "llama",
          both(scaled("model.layers.0.mlp.gate_proj.weight", 300),
               scaled("model.layers.0.mlp.up_proj.weight", 300),
               scaled("model.layers.0.mlp.down_proj.weight", 3e4)),
          "overflow in a product", "aten.mm", PRODUCT, "model.layers.0.mlp.down_proj"),
    Fault("llama-gate", "llama",
          both(scaled("model.layers.1.mlp.gate_proj.weight", 1e5),
               scaled("model.layers.1.mlp.up_proj.weight", 1e5)),
          "overflow", "aten.mul", "x.float()", "model.layers.1.mlp"),
    Fault("t5-mlp", "t5",
          both(scaled("encoder.block.1.layer.1.DenseReluDense.wi.weight", 1e4),
               scaled("encoder.block.1.layer.1.DenseReluDense.wo.weight", 1e4)),
          "overflow in a product", "aten.mm", PRODUCT,
          "encoder.block.1.layer.1.DenseReluDense.wo"),
    Fault("vit-mlp", "vit",
          filled(vit__layers__0__mlp__fc1__bias=2e4, vit__layers__0__mlp__fc2__weight=1.0),
          "overflow in a product", "aten.addmm", PRODUCT, "vit.layers.0.mlp.fc2"),
    # overflow in a residual sum
    Fault("gpt-residual", "gpt",
          filled(layers__0__mlp__down__bias=4e4, layers__1__attn__proj__bias=4e4),
          "overflow in a residual sum", "aten.add", RESIDUAL, "layers.1", "fp16-master"),
    Fault("bert-residual", "bert",
          filled(bert__encoder__layer__1__attention__output__LayerNorm__bias=4e4,
                 bert__encoder__layer__1__output__dense__bias=4e4),
          "overflow in a residual sum", "aten.add", RESIDUAL, "bert.encoder.layer.1.output",
          "fp16-master"),
    Fault("llama-residual", "llama",
          both(signs("model.embed_tokens.weight", 5e4),
               scaled("model.layers.0.self_attn.v_proj.weight", 100),
               scaled("model.layers.0.self_attn.o_proj.weight", 1e4)),
          "overflow in a residual sum", "aten.add", RESIDUAL, "model.layers.0", "fp16-master"),
    Fault("vit-residual", "vit",
          both(uneven("vit.layers.0.mlp.fc2.bias"), uneven("vit.layers.1.attention.o_proj.bias")),
          "overflow in a residual sum", "aten.add", RESIDUAL, "vit.layers.1", "fp16-master"),
    # overflow in attention scores
    Fault("bert-scores", "bert",
          filled(bert__encoder__layer__0__attention__self__query__bias=1e3,
                 bert__encoder__layer__0__attention__self__key__bias=1e3),
          "overflow in attention scores", "aten.bmm", SCORES,
          "bert.encoder.layer.0.attention.self"),
    Fault("llama-scores", "llama",
          both(scaled("model.layers.1.self_attn.q_proj.weight", 1e4),
               scaled("model.layers.1.self_attn.k_proj.weight", 1e4)),
          "overflow in attention scores", "aten.bmm", SCORES, "model.layers.1.self_attn"),
    Fault("t5-scores", "t5",
          both(scaled("decoder.block.0.layer.1.EncDecAttention.q.weight", 1e4),
               scaled("decoder.block.0.layer.1.EncDecAttention.k.weight", 1e4)),
          "overflow in attention scores", "aten.bmm", SCORES,
          "decoder.block.0.layer.1.EncDecAttention"),
    Fault("vit-scores", "vit",
          filled(vit__layers__1__attention__q_proj__bias=1e3,
                 vit__layers__1__attention__k_proj__bias=1e3),
          "overflow in attention scores", "aten.bmm", SCORES, "vit.layers.1.attention"),
    # the loss
    Fault("gpt-fused-loss", "gpt",
          both(scaled("wte.weight", 50), filled(final_norm__weight=1e4)),
          "overflow in the loss", "aten.", LOSS),
    Fault("vit-squared-loss", "vit", lambda m, b: None, "overflow in the loss", "aten.pow", LOSS,
          "", "bf16-mixed", squared),
    Fault("bert-log-of-0", "bert", lambda m, b: None, "log or division of zero", "aten.log",
          "x.clamp_min(eps).log()", "", "bf16-mixed", log_of_softmax),
    Fault("vit-inf-minus-inf", "vit", lambda m, b: None, "inf - inf", "aten.sub",
          "torch.finfo(dtype).min / 4", "", "bf16-mixed", difference),
    Fault("bert-root", "bert", lambda m, b: None, "invalid operation", "aten.sqrt",
          "x.clamp_min(0).sqrt()", "", "fp32", root_of_negative),
    Fault("bert-literal", "bert", lambda m, b: None, "literal not finite", "aten.mul",
          "replace the literal", "", "fp32", with_literal),
    # data and weights
    Fault("vit-nan-pixel", "vit", broken_pixel(2), "data not finite", "aten.",
          "torch.nan_to_num(x)", None, "bf16-mixed"),
    Fault("vit-large-pixel", "vit", broken_pixel(3, 1e6), "overflow in a cast", "aten._to_copy",
          "clamp before the cast", None),
    Fault("llama-nan-weight", "llama", nan_in("model.layers.0.self_attn.v_proj.weight"),
          "weight not finite", "aten.", "go back to a checkpoint",
          "model.layers.0.self_attn.v_proj", "bf16-mixed"),
    Fault("gpt-nan-embedding", "gpt", nan_in("wpe.weight"), "weight not finite", "aten.",
          "go back to a checkpoint", None, "bf16-master"),
    Fault("bert-nan-buffer", "bert", broken_buffer, "buffer not finite", "aten.",
          "reset the buffer", "classifier.0", "fp32"),
    Fault("bert-unwritten", "bert", unwritten, "unwritten memory", "aten.add", "torch.zeros(...)",
          "classifier", "fp32"),
    # masks
    Fault("bert-mask-twice", "bert", mask_twice, "overflow of a mask", "aten.add",
          "add the mask once", None, "bf16-mixed"),
    # the backward
    Fault("bert-root-of-0", "bert", lambda m, b: None, "log or division of zero", "aten.",
          "(x + eps).sqrt()", "", "fp32", root_of_zero, direction="backward"),
    Fault("bert-steep", "bert", lambda m, b: None, "overflow in the backward", "aten.mul",
          "loss scale", "", "fp32", steep, direction="backward"),
    Fault("vit-own-backward", "vit", through(NoBackward), "own autograd.Function", "aten.div",
          "gradcheck", "classifier", "bf16-mixed", direction="backward"),
    Fault("vit-own-forward", "vit",
          both(through(Squares), lambda m, b: None), "own autograd.Function", "aten.mul",
          "custom_fwd", None, "bf16-mixed"),
    # the learning rate
    Fault("gpt-learning-rate", "gpt", huge, "weights diverged", "aten.", "lower the learning rate"),
    Fault("llama-learning-rate", "llama", huge, "weights diverged", "aten.",
          "lower the learning rate"),
]  # fmt: skip
