"""Runs a batch again under the trace, to name what made its NaN, and changes nothing else.

The forward and backward are those of the step that failed: the caller gives a function that runs
them. Gradients, buffers and random state come back as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.diagnostics.nonfinite.cause import Cause
from halfstep.diagnostics.nonfinite.trace import trace_nonfinite
from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.precision.agreement import ranks_of_this_process
from halfstep.precision.border import require
from halfstep.precision.checks import no_loss
from halfstep.precision.masters.accumulation import graph_leaves
from halfstep.precision.recovery import FIND_IT
from halfstep.precision.scaling.gradients import OneRank
from halfstep.precision.step import Precision


def first_cause(precision: Precision | nn.Module, loss: Callable[[], Tensor]) -> Cause | None:
    """Run forward and backward of a batch again, and name what makes its first NaN or infinity.

    Call it where a step was skipped or has raised, with the batch of that step. Weights, buffers,
    optimizer and random state (torch's, NumPy's and Python's) are left as they are; the model's
    gradients are cleared, those of other tensors stay.

    Args:
        precision: The :class:`halfstep.Precision` that trains, whose autocast, loss scale and
            arithmetic are used; or the model of a loop without one.
        loss: Computes the loss, a scalar, as the loop does. Where it runs a second model in
            training, buffers of that one move.

    Returns:
        The cause; None if all values are finite.

    Raises:
        PrecisionError: If ``precision`` is neither, or ``loss`` is not a function that returns a
            scalar with its graph.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> x = torch.zeros(4, 2)
        >>> cause = first_cause(model, lambda: model(x / x).mean())
        >>> cause.cause_class, cause.op
        ('invalid operation', 'aten.div.Tensor')
    """
    allowed = "a halfstep.Precision, or a torch.nn.Module"
    require(precision, (Precision, nn.Module), "first_cause(precision)", allowed)
    if not callable(loss):
        raise PrecisionError(
            f"first_cause(loss) is {loss!r:.60}; allowed: a function that computes the loss, as in "
            "first_cause(precision, lambda: loss_of(batch))"
        )
    if isinstance(precision, Precision):
        model = precision.model
        context: Callable[[], Any] = precision.autocast
        backward, clear = precision.backward, precision.discard
    else:
        model, context = precision, nullcontext
        backward, clear = Tensor.backward, model.zero_grad
    clear()
    cause = search(model, lambda *_: _run(model, context, loss, backward), [None], clear=clear)
    return cause and replace(cause, micro_batch=0, micro_batches=0)


def _run(
    model: nn.Module,
    context: Callable[[], Any],
    loss: Callable[[], Tensor],
    backward: Callable[[Tensor], object],
) -> None:
    """Run forward and backward; gradients of tensors that are not the model's stay."""
    own = set(model.parameters())
    with context():
        value = loss()
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise no_loss(value)
    with _gradients_kept(leaf for leaf in graph_leaves(value) if leaf not in own):
        backward(value)


def search(
    model: nn.Module,
    run: Callable[[int, Any], object],
    batches: Sequence[Any],
    *,
    clear: Callable[[], object],
    finish: Callable[[], object] = lambda: None,
) -> Cause | None:
    """Run the micro-batches of a step under the trace, up to the one that fails.

    It starts from the present buffers and random state, and leaves them as they are.

    Args:
        model: The model whose modules are named.
        run: Runs forward and backward of a micro-batch, given its number, from 0, and the batch.
        batches: The micro-batches.
        clear: Drops the gradients.
        finish: Called after the last micro-batch, under the trace.

    Returns:
        The first cause, or None if every value was finite.
    """
    at, trace = 0, trace_nonfinite(model)
    with undisturbed(model), trace:
        for number, batch in enumerate(batches):
            if trace.first_cause is not None:
                break
            at = number
            run(number, batch)
        finish()
    clear()
    cause = trace.first_cause
    return cause and replace(cause, micro_batch=at + 1, micro_batches=len(batches))


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


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside the block a model may run; afterwards buffers, gradients and random state are back."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    buffers, of_python, of_numpy = _Buffers(model), random.getstate(), np.random.get_state()
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


class _Buffers:
    """A copy of a model's buffers: their values, and the very tensors, which a forward may replace.

    torch's batch norm writes averages without a new ``_version``, so values are compared.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._named = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def restore_(self) -> None:
        """Restore them bit for bit. What has not changed is not written."""
        for module, name, buffer in self._named:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        for buffer, value in self._values:
            if buffer.layout != torch.strided or not torch.equal(buffer, value):
                buffer.copy_(value)
