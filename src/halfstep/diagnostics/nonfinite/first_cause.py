"""Finds the first operation that made a NaN or an infinity, and the module in which it ran.

A NaN shows in the loss, far from its cause. Inside :func:`trace_nonfinite` every operation of
forward and backward is checked, functional ones too, which waits for the device. One
that makes NaN or infinities of finite numbers, or reads them from outside (data, weights, literals,
memory that nothing has written), is only a suspect, since a mask, ``torch.where``, ``nan_to_num``
or a softmax may take them out again. Such elements carry the number of their suspect along::

    all came of one suspect       the outputs descend from it
    they came of several, or are  the operation runs again on copies: of finite numbers alone, what
      a part of the outputs       is not finite was made here; of one suspect's alone, it reaches it
    the loss, a leaf's gradient   the first suspect that they descend from is the cause
      or a weight is not finite
    no backward runs at all       what the last operation made takes their place

Intended infinities have no suspect: -inf as an input (a mask) or a literal, +inf as the literal of
a fill or in a buffer. A NaN made from them has.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from halfstep.diagnostics.module_calls import Caller, ModuleCalls, caller, makes_first_gradient
from halfstep.diagnostics.nonfinite.cause import Cause, Operand, Role, cause_class
from halfstep.diagnostics.nonfinite.operations import (
    FILLS,
    FIRST_MEANT,
    MEANT,
    NEWS,
    OUTSIDE,
    READS_MASKS,
    UNWRITTEN,
    Call,
    Flow,
    Input,
    Kind,
    Operation,
    bad_elements,
    divides_by_zero,
    first_of,
    floating,
    inputs,
    kind_of,
    not_finite,
    operation,
    overflows_a_mask,
    stored,
)
from halfstep.errors import NonFiniteError
from halfstep.precision.border import require_model
from halfstep.precision.casting.op_table import drop_casts
from halfstep.precision.checks import no_loss
from halfstep.precision.masters.accumulation import graph_leaves
from halfstep.precision.masters.local_part import dense, storage_key
from halfstep.precision.scaling.gradients import is_finite
from halfstep.precision.step import Precision

_ENGINE: Any = torch.autograd.Variable._execution_engine
_TRACING: Any = torch._C._TorchDispatchModeKey.PROXY  # a graph is being traced
_FEW = 8  # more rows than these are no accident of some samples


def _branch(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


class trace_nonfinite(TorchDispatchMode):
    """Watches every operation of forward and backward for the first NaN or infinity.

    It is slow, since it waits for the device after every operation, but does not change a bit of
    losses, gradients and random numbers. Enter it around forward and backward, outside or inside
    of ``precision.autocast()``.

    Args:
        model: The model whose modules the report names. It has hooks until the context is left.

    Example:
        >>> model = nn.Sequential(nn.Identity(), nn.ReLU())
        >>> with trace_nonfinite(model) as trace:
        ...     y = model(torch.tensor([300.0]).half()) * 300
        >>> print(trace.first_cause)  # doctest: +ELLIPSIS
        overflow: aten.mul.Tensor in fp16, outside the model's modules
          output: 1 inf and 0 NaN of 1 elements (100 %)
          input self: fp16 up to 300 (0.458 % of 65504)
          input other: 300 (0.458 % of 65504)
          at ...
          to do: clamp the operand, or compute this operation in fp32: x.float(); ...
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = require_model(model, "trace_nonfinite(model)")
        self._modules = ModuleCalls(model)
        self._eager = ExitStack()
        self._thread = 0
        self._names: dict[int, tuple[str, bool]] = {}  # by storage; True: parameter
        self._cause: Cause | None = None
        self._causes: dict[int, Cause] = {}  # suspects from 1, and infinities that are meant
        self._flow = Flow()
        self._last = MEANT  # the first suspect of what the last operation made
        self._tasks: set[int] = set()  # the backwards that have begun; -1 once one was asked for
        self._leaves: list[weakref.ref[Tensor]] = []  # of the newest loss
        # by the number of an autograd node: where the forward called, and whether it is a suspect
        self._lines: dict[int, str] = {}
        self._forwards: dict[int, int] = {}
        self._made = -1

    @property
    def first_cause(self) -> Cause | None:
        """The first operation from which a loss or gradient that is not finite descends, if any.

        Before any backward, what the last operation made takes the place of the loss.
        """
        if self._cause is None and self._causes:
            number = self._last  # before the checks, which are operations too
            ends = [p.grad for p in self._model.parameters() if p.grad is not None]
            self._end([*ends, *self._model.parameters()])
            if self._cause is None and not self._tasks:
                self._last = number
                return self._causes.get(number) if number > MEANT else None
        return self._cause

    def _end(self, tensors: Iterable[Tensor]) -> None:
        """Take the suspect of what should be finite for the cause, or else a meant infinity."""
        with torch.no_grad():
            broken = [t for t in floating([*tensors]) if not is_finite(stored(t))]
            known = [(label, t) for t in broken if (label := self._flow.of(t)) is not None]
            found = [label[not_finite(t)].cpu() for label, t in known]
        if self._cause is None and found:
            self._cause = self._causes.get(first_of(torch.cat(found)))

    def _backward_has_ended(self) -> None:
        leaves = [leaf for reference in self._leaves if (leaf := reference()) is not None]
        self._end([leaf.grad for leaf in leaves if leaf.grad is not None])

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        named = [*self._model.named_buffers(), *self._model.named_parameters()]
        for name, tensor in named:
            if not nn.parameter.is_lazy(tensor):
                self._names[storage_key(tensor)] = name, isinstance(tensor, nn.Parameter)
        self._modules.hook()
        # Under a dispatch mode torch.compile skips code, and then its cache fills wrongly.
        self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        self._eager.callback(setattr, torch, "cond", torch.cond)
        torch.cond = _branch  # which cannot run backward where it does not compile its branches
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._cause = self.first_cause
        self._modules.unhook()
        self._eager.close()
        self._names, self._flow, self._causes, self._lines = {}, Flow(), {}, {}
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_TRACING) is not None:  # there are no values
            return func(*args, **kwargs)
        known = operation(func)
        task = torch._C._current_graph_task_id()
        if self._cause is None and task not in self._tasks and task != -1:
            self._tasks.add(task)
            _ENGINE.queue_callback(self._backward_has_ended)
        if known.base == "ones_like" and makes_first_gradient():
            self._tasks.add(-1)
            self._leaves = [weakref.ref(leaf) for leaf in graph_leaves(args[0])]
            if self._cause is None and self._flow.of(args[0]) is None:
                self._look(Call(func, known, args, kwargs, {}, ()), args[0])  # none has made it
            self._end(args)
        if self._cause is not None or known.view:
            return func(*args, **kwargs)
        written: list[Tensor] = []
        if known.writes:
            by_name = {**dict(zip(known.names, args, strict=False)), **kwargs}
            written = list(floating([by_name.get(name) for name in known.writes]))
        keep = known.reads_what_it_writes and not known.allocates
        before = {id(t): t.detach().clone() for t in written} if keep else {}
        result = func(*args, **kwargs)
        self._made = torch._C._autograd._get_sequence_nr() - 1  # its own node's, if it is new
        if self._made in self._lines or not torch.is_grad_enabled():
            self._made = -1
        elif threading.get_ident() == self._thread:
            self._lines[self._made] = caller(self._thread).source
        else:  # another thread numbers its own nodes, so that numbers no longer tell
            self._made, self._lines, self._forwards = -1, {}, {}
        self._look(Call(func, known, args, kwargs, before, written), result)
        return result

    def _look(self, call: Call, result: Any) -> None:
        """Label what an operation has made, if it is not finite."""
        known, outputs = call.known, call.outputs(result, call.written)
        if known.first_counts:
            self._flow.write(MEANT, *[t for t in floating(result) if t is not outputs[0]])
        if known.collective:  # what other ranks made, which they trace themselves
            every = [*outputs, *floating(call.args)]
            self._flow.write(MEANT, *[t for t in every if self._flow.of(t) is None])
        elif known.allocates:
            self._flow.write(UNWRITTEN, *outputs)
        elif outputs:
            self._last = MEANT
            with torch.no_grad():
                if not all(is_finite(stored(output)) for output in outputs):
                    self._judge(call, outputs)

    def _judge(self, call: Call, outputs: list[Tensor]) -> None:
        """Label what an operation made that is not finite; it may be a new suspect."""
        bad = bad_elements(outputs)
        given = inputs(call.known, call.args, call.kwargs, call.before)
        nan = torch.cat([dense(t).isnan().reshape(-1).to(bad.device) for t in outputs])
        numbers = [i.counts for i in given if not isinstance(i.value, Tensor)]
        meant = any(c.inf for c in numbers)
        kept = call.known.base in FILLS or bool(nan.any())
        sources: list[tuple[int | None, Tensor]] = [(NEWS, bad)]
        if not any(c.nan or (c.plus_inf and not kept) for c in numbers):
            labels = {
                id(i.original): self._label(i, i.original, call.known)
                for i in given
                if isinstance(i.original, Tensor) and (i.counts.nan or i.counts.inf)
            }
            sources = call.sources(bad, labels, given)
        found = torch.zeros_like(bad, dtype=torch.int32)
        suspect = partial(self._suspect, call, given, outputs, nan)
        for label, mask in sources:
            found[mask] = label or MEANT
            if label == NEWS:
                found[mask] = suspect(mask, "not finite in the input data")
            elif label is None and not meant:
                found[mask] = suspect(mask)
            elif label is None or (label <= MEANT and label != UNWRITTEN):
                found[mask & nan] = suspect(mask & nan, meant=True)
                if label not in self._causes:
                    rest = mask & ~nan
                    found[rest] = suspect(rest, "infinity that is meant", number=label)
        self._last = first_of(found)
        parts = torch.split(found, [dense(t).numel() for t in outputs])
        for tensor, part in zip(outputs, parts, strict=True):
            if bool(not_finite(tensor).any()):
                self._flow.write(part.view_as(dense(tensor)), tensor)

    def _suspect(
        self,
        call: Call,
        given: list[Input],
        outputs: list[Tensor],
        nan: Tensor,
        mask: Tensor,
        kind: Kind | None = None,
        *,
        meant: bool = False,
        number: int | None = None,
    ) -> int:
        """The label of the suspect that has made these elements of the outputs, or a new one."""
        size, called = int(mask.sum()), caller(self._thread)
        if not size:
            return MEANT if number is None else number
        made = int((nan & mask).sum())
        kind = kind or kind_of(call.known, given, outputs, nan=made > 0, meant=meant)
        node = torch._C._current_autograd_node()
        forward = None if node is None else self._forwards.get(node._sequence_nr())
        if forward and kind in ("0 / 0 or invalid", "x / 0 or log 0"):
            return forward  # the backward of a pole
        counts = {"nan": made, "inf": size - made, "elements": len(mask)}
        if kind == "infinity that is meant":
            number = FIRST_MEANT - len(self._causes) if number is None else number
        else:
            number = self._forwards[self._made] = 1 + len(self._causes)
        self._causes[number] = self._cause_of(kind, call.known, given, outputs, called, counts)
        return number

    def _label(self, given: Input, tensor: Tensor, known: Operation) -> Tensor:
        """Where the elements of an input that are not finite come from."""
        counts = given.counts
        unnamed = "", isinstance(tensor, nn.Parameter)
        name, is_parameter = self._names.get(storage_key(tensor), unnamed)
        is_buffer = bool(name) and not is_parameter
        mask = not (is_parameter or counts.nan or (counts.plus_inf and not is_buffer))
        outside = NEWS if not mask else MEANT if is_buffer else OUTSIDE
        labels = self._flow.of(tensor)
        if labels is None:
            labels = torch.full_like(dense(tensor), outside, dtype=torch.int32)
        if given.argument not in known.writes:
            labels = torch.where(labels == UNWRITTEN, outside, labels)
        masks = known.softmax or known.base in READS_MASKS or known.allocates
        return labels if masks else torch.where(labels == OUTSIDE, NEWS, labels)

    def _cause_of(
        self,
        kind: Kind,
        known: Operation,
        given: list[Input],
        outputs: list[Tensor],
        called: Caller,
        counts: dict[str, Any],
    ) -> Cause:
        """Describe an operation that made NaN or infinities for no fault of its inputs."""
        simulated, dtype, low = called.simulated, outputs[0].dtype, None
        if simulated is not None:
            low = dtype = simulated["self"].dtype
            if operation(simulated["func"]) != known:  # func is its final conversion
                known = operation(simulated["func"])
                given = inputs(known, simulated["args"], simulated["kwargs"], {})
        place = self._modules.place(self._names)
        operands = tuple(self._operand(i, low) for i in given)
        backward, source = place.direction == "backward", called.source
        zero = divides_by_zero(known, given)
        name = cause_class(kind, known, operands, backward=backward, zero_divisor=zero)
        if backward and called.own and kind != "not finite in the input data":
            name = "own autograd.Function"
        elif kind == "overflow" and not backward and overflows_a_mask(outputs, given):
            name = "overflow of a mask"
        node = torch._C._current_autograd_node()
        if backward and not called.own:
            source = "" if node is None else self._lines.get(node._sequence_nr(), "")
        return Cause(
            kind=kind,
            op=known.name,
            dtype=dtype,
            inputs=operands,
            source=source,
            cause_class=name,
            **counts,
            **place._asdict(),
        )

    def _operand(self, given: Input, low: torch.dtype | None) -> Operand:
        name, dtype, counts = given.name, None, given.counts
        role: Role = "number"
        if isinstance(given.original, Tensor):
            key, dtype, role = storage_key(given.original), low or given.original.dtype, ""
            if key in self._names:
                known, is_parameter = self._names[key]
                name, role = f"{name} = {known}", "parameter" if is_parameter else "buffer"
            elif isinstance(given.original._base, nn.Parameter):  # of another model
                role = "parameter"
            label = self._flow.of(given.original)
            if counts.nan and label is not None and bool((label == UNWRITTEN).all()):
                role = "unwritten"
        return Operand(name, dtype, counts.largest, counts.nan, counts.inf, role)


# A batch run again under the trace: forward and backward are those of the step that failed.


def first_cause(
    precision: Precision | nn.Module, loss: Callable[..., Tensor], batch: Any = None
) -> Cause | None:
    """Run forward and backward of a batch again, and name what makes its first NaN or infinity.

    Call it where a step was skipped or has raised, with the batch of that step. Weights, buffers,
    optimizer and random state (torch's, NumPy's and Python's) are left as they are; the model's
    gradients are cleared, those of other tensors stay.

    Args:
        precision: The :class:`halfstep.Precision` that trains, or the model of a loop without one.
        loss: Computes the loss, a scalar, as the loop does; it is given ``batch``, if there is one.
            Where it runs a second model in training, buffers of that one move.
        batch: Tensors, in tuples, lists or dicts, of equally many rows each. Parts of it run, too,
            for ``Cause.samples``.

    Returns:
        The cause; None if the loss and all gradients are finite.

    Raises:
        PrecisionError: If ``loss`` returns no scalar with its graph.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> x = torch.zeros(4, 2)
        >>> cause = first_cause(model, lambda: model(x / x).mean())
        >>> cause.cause_class, cause.op
        ('invalid operation', 'aten.div.Tensor')
    """
    compute = loss if batch is not None else lambda _: loss()
    if not isinstance(precision, Precision):
        return search(precision, partial(_run, compute, precision, precision), [batch])
    model, progress = precision.model, precision.progress
    # a step that was skipped or has raised is counted already
    slower = partial(progress.slower, step=progress.steps + (not progress.skipped_in_a_row))
    wide = partial(_run, compute, model, model) if precision.policy.casts_per_op else None
    run, clear = partial(_run, compute, model, precision), precision.discard
    return search(model, run, [batch], clear=clear, wide=wide, slower=slower)


def _run(
    loss: Callable[[Any], Tensor],
    model: nn.Module,
    precision: Precision | nn.Module,
    _: int,
    batch: Any,
) -> float:
    """Run forward and backward, by a Precision or as the model is; returns the loss."""
    context: Any = nullcontext()
    backward: Callable[[Tensor], object] = Tensor.backward
    if isinstance(precision, Precision):
        context, backward = precision.autocast(), precision.backward
    with context:
        value = loss(batch)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise no_loss(value)
    own = set(model.parameters())
    with _gradients_kept(leaf for leaf in graph_leaves(value) if leaf not in own):
        backward(value)
    return value.item()


def search(
    model: nn.Module,
    run: Callable[[int, Any], Any],
    batches: Sequence[Any],
    *,
    clear: Callable[[], object] | None = None,
    wide: Callable[[int, Any], Any] | None = None,
    slower: Callable[..., str] | None = None,
) -> Cause | None:
    """Run the micro-batches of a step under the trace, up to the one that fails.

    It leaves buffers and random state as they are. ``run`` is given a micro-batch's number, from 0,
    and it or a part of it, ``clear`` drops the gradients, ``wide`` runs in fp32 and returns the
    loss, and ``slower``, given that loss or not, says what to do about one that has left its past.
    """
    at, trace, clear = 0, trace_nonfinite(model), clear or model.zero_grad
    clear()
    try:
        with undisturbed(model), trace:
            for number, batch in enumerate(batches):
                if trace.first_cause is None:
                    at = number
                    run(number, batch)
    finally:
        clear()
    if (cause := trace.first_cause) is None:
        return None

    def again(part: Any, run: Callable[[int, Any], Any] = run) -> tuple[Cause | None, Any]:
        """The cause of a part, and what it returns."""
        traced = trace_nonfinite(model)
        try:
            with undisturbed(model), traced:
                result = run(at, part)
        finally:
            clear()
        return traced.first_cause, result

    samples = _samples(again, cause, batches[at])
    fits: tuple[Any, ...] = ()
    if wide is not None and cause.kind == "overflow" and cause.dtype == torch.float16:
        with suppress(Exception):  # it cannot run in fp32: that proves nothing
            unlike, value = again(batches[at], wide)
            fits = () if unlike else (value,)
    told = _past(slower, samples, fits)
    if cause.cause_class == "data not finite" and _all_finite(batches[at]):
        cause = replace(cause, cause_class="not finite outside the batch")
    cause = replace(cause, micro_batch=at + 1, micro_batches=len(batches))
    return replace(cause, samples=samples or (), fits_fp32=bool(fits), slower=told)


def _all_finite(batch: Any) -> bool:
    leaves = tree_leaves(batch)
    known = all(isinstance(leaf, Tensor | int | str) for leaf in leaves)
    return known and all(is_finite(stored(tensor)) for tensor in floating(leaves))


def _past(
    slower: Callable[..., str] | None, samples: tuple[int, ...] | None, fits: tuple[Any, ...]
) -> str:
    """What to do about a loss that has left its past; empty where a sample is to blame.

    That is one that fp32 does not bear, either. A loss in fp32 may be that of a single sample,
    unless these were tried.
    """
    if slower is None or (samples and not fits):
        return ""
    return slower(*(fits if samples == () else ()))


def _samples(again: Callable[[Any], Any], cause: Cause, batch: Any) -> tuple[int, ...] | None:
    """The rows each of which makes this cause beside all others, which are finite; None: not tried.

    Parts run beside all rows that are known to be finite, since a few rows alone may break for
    another reason: a deviation of one row, or a class without any.
    """
    tables = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    of_no_row = cause.cause_class.startswith(("weight", "buffer", "literal", "unwritten"))
    if of_no_row or len({len(table) for table in tables}) != 1:
        return None
    fine: list[int] = []

    def cause_of(numbers: list[int]) -> Cause | None:
        rows = sorted(fine + numbers)
        rows *= 1 + (len(rows) == 1)  # one row runs twice, since a batch norm refuses one
        part = tree_map_only(Tensor, lambda leaf: leaf[rows] if leaf.dim() else leaf, batch)
        found: Cause | None = again(part)[0]
        return found

    def of(numbers: list[int]) -> Iterator[int]:
        if cause_of(numbers) is None:
            fine.extend(numbers)
        elif len(numbers) == 1:
            yield from numbers
        else:
            yield from of(numbers[: len(numbers) // 2])
            yield from of(numbers[len(numbers) // 2 :])

    try:
        found = list(islice(of([*range(len(tables[0]))]), 2 * _FEW + 1))
        if not fine or len(found) > 2 * _FEW:
            return ()
        found = [row for one in found for row in of([one])]  # now beside rows that are fine
        causes = [cause_of([row]) for row in found[: _FEW + 1]]
    except Exception:  # a part of the batch cannot run: that proves nothing
        return None
    of_one = {(c.op, c.source, c.cause_class) if c else None for c in [cause, *causes]}
    return tuple(found) if len(of_one) == 1 and len(found) <= _FEW else ()


def searched(*args: Any, **kwargs: Any) -> tuple[Cause | None, str]:
    """:func:`search`, and why it failed: a diagnosis must not hide what it is a diagnosis of."""
    try:
        return search(*args, **kwargs), ""
    except Exception as failed:
        text = f"{type(failed).__name__}: {failed}"
        return None, f"; looking for the first cause failed ({text:.120})"


def explain_(error: NonFiniteError, found: tuple[Cause | None, str]) -> NonFiniteError:
    """Add to an error what :func:`searched` has found, for who catches it; returns the error."""
    error.first_cause, failed = found
    error.args = (f"{error.args[0]}{failed}",)
    error.typed = "print(error.first_cause)" if error.first_cause else ""
    return error


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside the block a model may run; afterwards buffers, gradients and random state are back."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with torch.random.fork_rng([i or 0 for i in devices]), _gradients_kept(model.parameters()):
        try:
            yield
        finally:
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer)  # which a forward may have replaced
                # torch's batch norm writes averages without a new version, so values are compared
                if buffer.layout != torch.strided or not torch.equal(buffer, value):
                    with torch.no_grad():
                        buffer.copy_(value)
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            drop_casts()


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
