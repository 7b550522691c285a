"""What ``h100.py`` times: models with their batches, and a training step by torch or halfstep."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep.optim
from halfstep import Precision
from halfstep.trainer.models.gpt import GPT, GPTConfig


@dataclasses.dataclass(frozen=True)
class Job:
    """A model on the device, whose copies are trained, and its batch; ``model(*batch)`` is a loss.

    ``tokens`` and ``flops`` (model FLOPs, nothing recomputed) are those of a step; 0: not counted.
    """

    name: str
    model: nn.Module
    batch: tuple[Tensor, ...]
    tokens: int = 0
    flops: float = 0.0


class GPTLoss(nn.Module):
    """halfstep's GPT and the mean loss by halfstep's chunked head, a plain one, or Liger's."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt
        self.head: Callable[..., Tensor] | None = None

    def take_head(self, name: str) -> None:
        found = None if name == "plain" else importlib.import_module("liger_kernel.transformers")
        self.head = found.LigerFusedLinearCrossEntropyLoss() if found else plain_head

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.head is None:
            total, count = self.gpt.loss_sum((tokens, targets))
            return total / count
        x = self.gpt.hidden(tokens).flatten(0, 1)
        return self.head(self.gpt.wte.weight, x, targets.flatten())


def plain_head(weight: Tensor, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


class LlamaLoss(nn.Module):
    """The body of transformers' Llama with random weights, a linear head and the mean loss."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.body = importlib.import_module("transformers").LlamaModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        return self.part(hidden, targets)

    def part(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())


class Classifier(nn.Module):
    """A body that gives logits in its last dim, and their mean loss."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        found = self.body(x)
        logits = getattr(found, "logits", found)  # transformers wraps them
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class Bottleneck(nn.Module):
    """A block of ResNet-50. **Source:** He et al. 2016, figure 5; the stride in the 3x3 layer."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(before, width, 1), nn.ReLU(), *convolution(width, width, 3, stride),
            nn.ReLU(), *convolution(width, 4 * width, 1),
        )  # fmt: skip
        self.skip = nn.Sequential()
        if before != 4 * width or stride > 1:
            self.skip.extend(convolution(before, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def convolution(before: int, after: int, edge: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, edge, stride, edge // 2, bias=False)
    return [conv, nn.BatchNorm2d(after)]


class Product(nn.Module):
    """A linear layer whose "loss" is 0, with ``grad`` as the gradient of its output."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor, grad: Tensor) -> Tensor:
        return Given.apply(self.part(x), grad)

    def part(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Given(torch.autograd.Function):
    """A scalar 0 whose backward gives ``grad`` to ``y`` without moving memory."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return y.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class Jobs:
    """Makes the jobs on a device, in the sizes that are measured or in tiny ones."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny

    def _made(self, make: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        with self.device:
            return make()

    def _drawn(self, rows: int, length: int, below: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(below, (rows, length), generator=generator, device=self.device)

    def _predicts(self, name: str, model: nn.Module, drawn: Tensor, flops: float) -> Job:
        batch = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        tokens = batch[0].numel()
        return Job(name, model, batch, tokens, flops * tokens)

    def gpt2(self, rows: int = 16, length: int = 1024) -> Job:
        layers, heads, width, vocabulary = 12, 12, 768, 50304
        if self.tiny:
            rows, length, layers, heads, width, vocabulary = 2, 8, 1, 2, 32, 64
        config = GPTConfig(n_layer=layers, n_head=heads, n_embd=width, block_size=length,
                           vocab_size=vocabulary)  # fmt: skip
        model = self._made(lambda: GPTLoss(GPT(config)))
        positions = model.gpt.wpe.weight.numel()
        flops = flops_per_token(model, positions, layers, width, length)
        return self._predicts("gpt2-124m", model, self._drawn(rows, length + 1, vocabulary), flops)

    def llama(self, rows: int = 4, length: int = 2048, layers: int = 22) -> Job:
        width, wide, heads, pairs, vocabulary = 2048, 5632, 32, 4, 32000
        if self.tiny:
            rows, length = 2, 8
            layers, width, wide, heads, pairs, vocabulary = 1, 32, 64, 2, 1, 64
        config = importlib.import_module("transformers").LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, intermediate_size=wide,
            num_attention_heads=heads, num_key_value_heads=pairs, vocab_size=vocabulary,
        )  # fmt: skip
        model = self._made(lambda: LlamaLoss(config))
        flops = flops_per_token(model, vocabulary * width, layers, width, length)
        return self._predicts("llama-1.1b", model, self._drawn(rows, length + 1, vocabulary), flops)

    def transformer(self) -> Job:
        def make() -> Classifier:
            each = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
                    for _ in range(1 if self.tiny else 12)]  # fmt: skip
            return Classifier(nn.Embedding(512, 64), *each, nn.Linear(64, 512))

        drawn = self._drawn(8, 64, 512)
        return Job("12x64", self._made(make), (drawn, drawn.roll(-1, 1)))

    def bert(self, rows: int = 8) -> Job:
        found = importlib.import_module("transformers")
        config, length = found.BertConfig(), 128
        if self.tiny:
            config = found.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
            rows, length = 2, 8
        model = self._made(lambda: Classifier(found.BertForSequenceClassification(config)))
        batch = self._drawn(rows, length, config.vocab_size), self._drawn(1, rows, 2)[0]
        return Job("bert-base", model, batch)

    def resnet(self) -> Job:
        width, depths = (4, (1, 1)) if self.tiny else (64, (3, 4, 6, 3))

        def make() -> Classifier:
            layers, before = [*convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
            for number, depth in enumerate(depths):
                for place in range(depth):
                    stride = 2 if number and not place else 1
                    layers.append(Bottleneck(before, width * 2**number, stride))
                    before = 4 * width * 2**number
            ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)
            return Classifier(*layers, *ends)

        images = torch.randn(8, 3, 64, 64, device=self.device)
        return Job("resnet50", self._made(make), (images, self._drawn(1, 8, 10)[0]))

    def linear(self, inner: int, outer: int) -> Job:
        rows = 32 if self.tiny else 16384
        x, grad = (torch.randn(rows, n, device=self.device, dtype=torch.bfloat16)
                   for n in (inner, outer))  # fmt: skip
        model = self._made(lambda: Product(inner, outer))
        flops = 6.0 * rows * inner * outer
        return Job(f"{inner}x{outer}", model, (x.requires_grad_(), grad), flops=flops)


def flops_per_token(
    model: nn.Module, looked_up: int, layers: int, width: int, length: int
) -> float:
    """Model FLOPs of forward and backward: 6 a weight that multiplies, 12 L C T of attention.

    **Source:** Chowdhery et al. 2022, "PaLM", appendix B.
    """
    used = sum(p.numel() for p in model.parameters()) - looked_up
    return 6 * used + 12 * layers * width * length


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


class Step:
    """One training step of a hand-written loop or of halfstep; call it without arguments.

    ``name`` says which: ``bare`` and a dtype or ``halfstep`` and a policy, then what is changed:
    ``halfstep bf16-mixed, torch.AdamW, compiled``.
    """

    def __init__(self, job: Job, name: str, backend: str) -> None:
        what, *changes = name.split(", ")
        who, kind = what.split(" ")
        self.batch, self.model = job.batch, copy.deepcopy(job.model)
        self.device = self.batch[0].device
        for change in changes:
            first, _, second = change.partition(" ")
            if second == "head":
                self.model.take_head(first)
            elif first == "torchao":
                self.model = float8(self.model, second, emulate=self.device.type != "cuda")
        own = who == "halfstep" and "torch.AdamW" not in changes
        make = halfstep.optim.AdamW if own else fused
        self.optimizer = make(self.model.parameters(), lr=1e-4)
        self.precision = Precision(kind, self.model, self.optimizer) if who == "halfstep" else None
        self.dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(kind, torch.bfloat16)
        scaled = self.precision is None and self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        self.loss_of: Callable[..., Tensor] = self.model
        if "graphed" in changes:
            mode = "reduce-overhead" if backend == "inductor" else None
            self.loss_of = torch.compile(self.model, backend=backend, mode=mode)
        elif "compiled" in changes:
            self._compile(backend)

    def _compile(self, backend: str) -> None:
        if not hasattr(self.model, "part"):
            self.loss_of = torch.compile(self.model, backend=backend)
            return
        self.model.part = torch.compile(self.model.part, backend=backend)
        if isinstance(self.model, LlamaLoss):  # layer by layer, as torchtitan does
            for layer in self.model.body.layers:
                layer.compile(backend=backend)

    def autocast(self) -> Any:
        if self.precision is not None:
            return self.precision.autocast()
        low = torch.bfloat16 if self.dtype == torch.float32 else self.dtype
        return torch.autocast(self.device.type, low, enabled=self.dtype != torch.float32)

    def backward(self) -> None:
        with self.autocast():
            loss = self.loss_of(*self.batch)
        if self.precision is not None:
            self.precision.backward(loss)
        else:
            self.scaler.scale(loss).backward()

    def tail(self) -> None:
        """Check, clip, update and clear."""
        if self.precision is not None:
            self.precision.step(max_norm=1.0)
            return
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.backward()
        self.tail()


def float8(model: nn.Module, recipe: str, *, emulate: bool) -> nn.Module:
    """Torchao's float8 linear layers in place of all but the head; emulated on a CPU."""
    found = importlib.import_module("torchao.float8")
    config = found.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=emulate)
    kept = {"module_filter_fn": lambda _, name: name != "head"}
    return found.convert_to_float8_training(model, config=config, **kept)
