"""One optimizer step of a model that gives (loss sum, count), from micro-batches to StepResult."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.distributed.strategy import Strategy
from halfstep.precision.result import StepResult
from halfstep.precision.step import Precision
from halfstep.trainer.data.batches import IGNORED

Batch = Any
"""A micro-batch as a task returns it: tensors, in tuples, lists or dicts."""
LossSum = Callable[[Any], tuple[Tensor, Tensor]]


def count_targets(batch: Batch) -> int:
    """Count the target tokens of (tokens, targets, ...) that enter the loss; on the host."""
    return int((batch[1] != IGNORED).sum())


def train_step(
    loss_sum: LossSum,
    precision: Precision,
    strategy: Strategy,
    batches: Sequence[Batch],
    *,
    learning_rate: Callable[[float], float],
    max_norm: float | None,
    targets: Callable[[Batch], float] = count_targets,
    seeds: Sequence[int] = (),
) -> StepResult:
    """Take one step; the loss is the mean over all targets of all ranks' micro-batches.

    Args:
        loss_sum: Returns the summed loss (fp32 scalar) and the count of one micro-batch.
        precision: Model and optimizer under their policy.
        strategy: How they are distributed over the ranks, all of which call this together.
        batches: This rank's micro-batches, such as (tokens, targets), int64 (B, T); on the host.
        learning_rate: Returns this step's rate, given a parameter group's initial rate.
        max_norm: Clip the global gradient norm to this, or None.
        targets: Returns what a micro-batch adds to the divisor of the loss.
        seeds: Dropout seeds, one per micro-batch, or none.

    Returns:
        The step's result; its loss is in nats per target.

    Raises:
        NonFiniteError: From :meth:`Precision.step`; weights and optimizer are as before.
    """
    # Divide by the total over all micro-batches and ranks, so that unequal sizes give one mean.
    (n,) = strategy.sum([sum(map(targets, batches))])
    for optimizer in precision.optimizers:  # before backward, which may update weights already
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group.setdefault("initial_lr", group["lr"]))
    for number, batch in enumerate(batches):
        with strategy.micro_batch(last=number == len(batches) - 1):
            seed = seeds[number] if seeds else None
            run_micro_batch(loss_sum, precision, batch, n, seed)
    strategy.finish()
    result = precision.step(max_norm=max_norm)
    precision.settle()  # the loop writes down every result, and an error belongs to its own step
    return result


def run_micro_batch(
    loss_sum: LossSum, precision: Precision, batch: Batch, n: float, seed: int | None
) -> None:
    """Run forward and backward of a micro-batch, whose loss is divided by ``n``."""
    if seed is not None:
        seed_dropout(seed)
    with precision.autocast():
        total, _ = loss_sum(to_device(batch, precision.device))
        loss = total / n
    precision.backward(loss)


def seed_dropout(seed: int) -> None:
    """Seed the generators that dropout draws from, on the CPU and on GPUs in use.

    ``torch.manual_seed`` would take longer than the step of a tiny model: for each kind of device
    that is not in use it formats a traceback, for an error that may come when the device is.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the batch to the device; for CUDA asynchronously, from pinned memory."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor) and device.type != "cuda":
        return batch.to(device)
    if isinstance(batch, Tensor):
        return batch.pin_memory().to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [to_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)
