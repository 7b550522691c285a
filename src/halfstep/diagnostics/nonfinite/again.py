"""Runs a batch again under the trace, to name what made its NaN, and changes nothing else.

The forward and backward are those of the step that failed: the caller gives a function that runs
them. Gradients, buffers and random state come back as they were. Where the rows of the batch can be
run apart, the rows that make the NaN are named too::

    rows of the operation's output     which of its rows are not finite
    otherwise, halves of the batch     go on with the half that fails, until one row is left; where
                                       it cannot run alone, with the half that the rest lacks
    in the end                         without these rows it must not happen, else no row is named
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.diagnostics.nonfinite.cause import Cause
from halfstep.diagnostics.nonfinite.trace import NonFiniteTrace, trace_nonfinite
from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.precision.agreement import ranks_of_this_process
from halfstep.precision.border import require
from halfstep.precision.checks import no_loss
from halfstep.precision.masters.arrivals import graph_leaves
from halfstep.precision.ownership import tensors_in
from halfstep.precision.recovery import FIND_IT, Buffers
from halfstep.precision.scaling.gradients import OneRank
from halfstep.precision.step import Precision

_OF_NO_SAMPLE = ("weights diverged", "weight not finite", "buffer not finite", "literal not finite")


def first_cause(
    precision: Precision | nn.Module,
    loss: Callable[..., Tensor],
    batch: Any = None,
) -> Cause | None:
    """Run forward and backward of a batch again, and name what makes its first NaN or infinity.

    Call it where a step was skipped or has raised, with the batch of that step. Weights, buffers,
    optimizer and random state (torch's, NumPy's and Python's) are left as they are; the model's
    gradients are cleared, those of other tensors stay.

    Args:
        precision: The :class:`halfstep.Precision` that trains, whose autocast, loss scale and
            arithmetic are used; or the model of a loop without one.
        loss: Computes the loss, a scalar, as the loop does; called once without a batch, or
            with ``batch``, and then several times with some of its rows. Where it runs a second
            model in training, buffers of that one move.
        batch: A tensor, or tuples, lists and dicts of tensors whose first dim is the batch's.

    Returns:
        The cause, with the ``samples`` of the batch that make it; None if all values are finite.

    Raises:
        PrecisionError: If ``precision`` is neither, or ``loss`` is not a function that returns a
            scalar with its graph.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> x = torch.ones(4, 2)
        >>> x[3] = 0
        >>> cause = first_cause(model, lambda x: model(x * 0 / x).mean(), x)
        >>> cause.cause_class, cause.op, cause.samples
        ('invalid operation', 'aten.div.Tensor', (3,))
    """
    allowed = "a halfstep.Precision, or a torch.nn.Module"
    require(precision, (Precision, nn.Module), "first_cause(precision)", allowed)
    if not callable(loss):
        raise PrecisionError(
            f"first_cause(loss) is {loss!r:.60}; allowed: a function that computes the loss, as in "
            "first_cause(precision, lambda: loss_of(batch))"
        )
    if isinstance(precision, Precision):
        used, model = precision, precision.model

        context: Callable[[], Any] = used.autocast
        backward, clear = used.backward, used.discard
    else:
        model, context = precision, nullcontext
        backward, clear = Tensor.backward, model.zero_grad
    own = set(model.parameters())

    def run(number: int, rows: Any) -> None:
        with context():
            value = loss() if batch is None else loss(rows)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise no_loss(value)
        with _gradients_kept(leaf for leaf in graph_leaves(value) if leaf not in own):
            backward(value)

    clear()
    cause = search(model, run, [batch], clear=clear)
    return cause and replace(cause, micro_batch=0, micro_batches=0)


def search(
    model: nn.Module,
    run: Callable[[int, Any], object],
    batches: Sequence[Any],
    *,
    clear: Callable[[], object],
    alone: bool = True,
    finish: Callable[[], object] = lambda: None,
) -> Cause | None:
    """Run the micro-batches of a step under the trace, then parts of the one that fails.

    Every run starts from the present buffers and random state, and leaves them as they are.

    Args:
        model: The model whose modules are named.
        run: Runs forward and backward of a micro-batch, given its number, from 0, and the batch or
            some of its rows.
        batches: The micro-batches.
        clear: Drops the gradients.
        alone: Whether no other process takes part; otherwise each runs all micro-batches once, and
            samples are known only from the rows of the operation's output.
        finish: Called after the last micro-batch, under the trace.

    Returns:
        The first cause, or None if every value was finite.
    """
    at, trace = 0, trace_nonfinite(model)
    with undisturbed(model), trace:
        for number, batch in enumerate(batches):
            if trace.first_cause is None:
                at = number
            elif alone:
                break
            run(number, batch)
        finish()
    clear()
    cause = trace.first_cause
    if cause is None:
        return None
    cause = replace(cause, micro_batch=at + 1, micro_batches=len(batches))
    rows = rows_of(batches[at])
    if not rows or cause.cause_class in _OF_NO_SAMPLE:
        return cause
    likely = _likely(cause, rows)
    if not alone:
        return replace(cause, samples=likely)

    def fails(some: Sequence[int]) -> bool | None:
        try:
            rest = take(batches[at], rows, some)
            with undisturbed(model), trace_nonfinite(model) as part:
                run(at, rest)
        except Exception:  # a model that takes no such part of a batch
            return None
        finally:
            clear()
        return _same(part, cause)

    return replace(cause, samples=_responsible(rows, likely, fails))


def over_ranks(cause: Cause | None) -> Cause | None:
    """The earliest of all ranks' causes, the same on every rank; all of them call it together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, cause and replace(cause, rank=rank, ranks=size))
    return min((found for found in every if found is not None), key=_order, default=None)


def _order(cause: Cause) -> tuple[Any, ...]:
    """Sort key: the earlier cause first, by micro-batch, then forward, then the rank."""
    return cause.micro_batch, cause.direction == "backward", cause.rank


def explained(
    error: NonFiniteError,
    model: nn.Module,
    run: Callable[[int, Any], object],
    batches: Sequence[Any] = (None,),
    *,
    clear: Callable[[], object],
) -> NonFiniteError:
    """An error with its first cause, found by :func:`search` where this process is the only one."""
    if not isinstance(ranks_of_this_process(torch.device("cpu")), OneRank):
        return error  # the other ranks do not take part
    cause = None
    try:
        cause = search(model, run, batches, clear=clear)
        told = "" if cause is None else f". First cause: {cause}"
    except Exception as failed:  # a diagnosis must not hide what it is a diagnosis of
        name = type(failed).__name__
        told = f". Looking for the first cause failed: {name}: {failed}"
    finally:
        clear()
    plain = str(error).removesuffix(FIND_IT)
    known = NonFiniteError(f"{plain}{told}", cause=error.cause, parameters=error.parameters)
    known.first_cause = cause
    return known


def _same(trace: NonFiniteTrace, cause: Cause) -> bool:
    found = trace.first_cause
    parts = ("op", "module", "direction", "kind")
    return found is not None and all(getattr(found, p) == getattr(cause, p) for p in parts)


def _likely(cause: Cause, rows: int) -> tuple[int, ...]:
    """The samples to which the rows of the operation's output belong, if it has such rows."""
    length = cause.shape[0] if cause.shape else 0
    if not cause.rows or length % rows or (cause.direction == "backward" and length != rows):
        return ()
    found = tuple(sorted({row * rows // length for row in cause.rows}))
    return found if len(found) < rows or rows == 1 else ()


def _responsible(
    rows: int, likely: tuple[int, ...], fails: Callable[[Sequence[int]], bool | None]
) -> tuple[int, ...]:
    """The samples that make the NaN, and without which it is not made; empty if there are none.

    ``fails`` tells whether some rows make it; None where they cannot be run.
    """

    def others_fail(some: Sequence[int]) -> bool | None:
        return fails([row for row in range(rows) if row not in some])

    def has_it(some: Sequence[int]) -> bool:
        failed = fails(some)
        return others_fail(some) is False if failed is None else failed  # batch norm of one row

    if rows == 1:
        return (0,)
    if likely and not others_fail(likely):
        return likely
    found: Sequence[int] = range(rows)
    while len(found) > 1:
        half = len(found) // 2
        found = next((part for part in (found[:half], found[half:]) if has_it(part)), ())
    return tuple(found) if found and others_fail(found) is False else ()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside the block a model may run; afterwards buffers, gradients and random state are back."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    buffers, of_python, of_numpy = Buffers(model), random.getstate(), np.random.get_state()
    with torch.random.fork_rng([i or 0 for i in devices]), _gradients_kept(model.parameters()):
        try:
            yield
        finally:
            buffers.restore_()
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.clear_autocast_cache()


@contextmanager
def _gradients_kept(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside the block these tensors have no gradients yet; afterwards theirs are back."""
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    try:
        for leaf, _ in gradients:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient


# Rows of a nested batch.


def rows_of(batch: Any) -> int:
    """The number of rows of a batch: the first dim of its first tensor that has one; else 0."""
    return next((t.shape[0] for t in tensors_in(batch) if t.dim()), 0)


def take(batch: Any, rows: int, some: Sequence[int]) -> Any:
    """Some rows of a batch that has ``rows`` of them; what has another first dim stays whole."""
    if isinstance(batch, Tensor):
        if not batch.dim() or batch.shape[0] != rows:
            return batch
        return batch[torch.tensor(some, dtype=torch.int64, device=batch.device)]
    if isinstance(batch, Mapping):
        return {key: take(part, rows, some) for key, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [take(part, rows, some) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
