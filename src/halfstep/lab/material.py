"""What experiments train: a small GPT over the bytes of English text that comes with Python.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import DataError
from halfstep.precision.result import StepResult
from halfstep.precision.step import Precision
from halfstep.trainer.models.gpt.gpt import GPT, GPTConfig

Batch = tuple[Tensor, Tensor]
"""Bytes, and the byte that follows each of them: both int64 of shape (B, T)."""
BYTES = 256
LEAST_BYTES = 10_000
"""Of a file: its last tenth must hold many places where a sequence may begin."""


@cache
def text(path: str = "") -> Tensor:
    """The help texts of Python's own manual, or a file, as bytes; the manual has 500,000.

    Raises:
        DataError: If the file cannot be read, or has too little text.
    """
    if not path:
        return _bytes("\n".join(topics.topics.values()).encode())
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give a file of text") from error
    if len(content) < LEAST_BYTES:
        raise DataError(f"{path}: {len(content)} bytes of text; at least {LEAST_BYTES} are needed")
    return _bytes(content)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def batches(
    sequences: int, length: int, seed: int, *, held_out: bool = False, path: str = ""
) -> Iterator[Batch]:
    """Sequences from random places, without end; the last tenth of the text is held out.

    Raises:
        DataError: As :func:`text`.
    """
    source = text(path)
    cut = len(source) * 9 // 10
    source = source[cut:] if held_out else source[:cut]
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(source) - length, (sequences, 1), generator=generator)
        places = starts + torch.arange(length)
        yield source[places].long(), source[places + 1].long()


def gpt(layers: int = 4, width: int = 128, length: int = 64, seed: int = 0) -> GPT:
    """A GPT over bytes, with heads of 32 channels where the width allows it."""
    shape = GPTConfig(
        n_layer=layers,
        n_head=max(1, width // 32),
        n_embd=width,
        block_size=length,
        vocab_size=BYTES,
    )
    return GPT(shape, seed=seed)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a batch, in nats a byte."""
    total, count = model.loss_sum(batch)  # type: ignore[operator]
    loss: Tensor = total / count
    return loss


def train(
    policy: str,
    model: nn.Module,
    optimizer: Optimizer,
    data: Iterator[Batch],
    steps: int,
    *,
    warmup: int = 0,
    max_norm: float | None = 1.0,
    after: Callable[[int, Precision], object] = lambda step, precision: None,
) -> list[StepResult]:
    """Train some steps under a policy; what each did.

    Args:
        policy: A policy's name or fields.
        model: What is trained; with 16-bit weights it is cast.
        optimizer: Over the model's parameters.
        data: Where each step takes its batch from.
        steps: How many.
        warmup: Steps over which the learning rate rises to the optimizer's own.
        max_norm: Clip the gradient to this norm, or None.
        after: Called after each step with its number, from 1, while the model is in the policy.
    """
    results = []
    rates = [group["lr"] for group in optimizer.param_groups]
    with Precision(policy, model, optimizer, on_nonfinite="skip:1000000") as precision:
        for step in range(1, steps + 1):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, step / max(warmup, 1))
            with precision.autocast():
                loss = loss_of(model, next(data))
            results.append(precision.step(loss, max_norm=max_norm))
            after(step, precision)
    return results


@torch.no_grad()
def validation(
    precision: Precision, model: nn.Module, length: int, sequences: int = 64, path: str = ""
) -> float:
    """The loss on the same sequences of the held-out text every time, in the policy's precision."""
    batch = next(batches(sequences, length, seed=0, held_out=True, path=path))
    with precision.autocast():
        return float(loss_of(model, batch))


def running_sum(start: float, term: float, count: int, dtype: torch.dtype) -> list[float]:
    """A sum to which a term is added ``count`` times, each result rounded to the dtype."""
    total, addend = torch.tensor(start, dtype=dtype), torch.tensor(term, dtype=dtype)
    totals = [start]
    for _ in range(count):
        total = total + addend
        totals.append(total.item())
    return totals
