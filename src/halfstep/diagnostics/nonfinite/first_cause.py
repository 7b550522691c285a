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
    no backward runs at all       what nothing has read takes their place

Intended infinities have no suspect: -inf as an input (a mask) or a literal, +inf as the literal of
a fill or in a buffer. A NaN made from them has.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
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
    MEANT,
    NEWS,
    OUTSIDE,
    UNWRITTEN,
    Call,
    Flow,
    Input,
    Kind,
    Operation,
    bad_elements,
    divides_by_zero,
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
from halfstep.precision.scaling import gradients
from halfstep.precision.scaling.gradients import is_finite
from halfstep.precision.step import Precision

_ENGINE: Any = torch.autograd.Variable._execution_engine
# Code that looks for overflows, so that it is never the cause.
_CHECKS = gradients.__file__


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
        self._thread = 0
        self._names: dict[int, tuple[str, bool]] = {}  # by storage; True: parameter
        self._cause: Cause | None = None
        self._suspects: list[Cause] = []
        self._flow = Flow()
        self._tasks: set[int] = set()  # the backwards that have begun; -1 once one was asked for
        self._leaves: list[weakref.ref[Tensor]] = []  # of the newest loss
        # by the number of an autograd node: where the forward called, and whether it is a suspect
        self._lines: dict[int, str] = {}
        self._forwards: dict[int, int] = {}
        self._made = -1

    @property
    def first_cause(self) -> Cause | None:
        """The first operation from which a loss or gradient that is not finite descends, if any.

        Before any backward, what nothing has read takes the place of the loss.
        """
        if self._cause is None and self._suspects:
            ends = [p.grad for p in self._model.parameters() if p.grad is not None]
            self._end([*ends, *self._model.parameters()])
            if self._cause is None and not self._tasks:
                number = self._flow.unread
                return self._suspects[number - 1] if number else None
        return self._cause

    def _end(self, tensors: Iterable[Tensor]) -> None:
        """Take the suspect of what should be finite, where it is not, for the cause."""
        with torch.no_grad():
            found = list(filter(None, map(self._flow.first_in, floating([*tensors]))))
        if self._cause is None and found:
            self._cause = self._suspects[min(found) - 1]

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
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._cause = self.first_cause
        self._modules.unhook()
        self._names, self._flow, self._suspects, self._lines = {}, Flow(), [], {}
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        known = operation(func)
        task = torch._C._current_graph_task_id()
        if self._cause is None and task not in self._tasks and task != -1:
            self._tasks.add(task)
            _ENGINE.queue_callback(self._backward_has_ended)
        if known.base == "ones_like" and makes_first_gradient():
            self._tasks.add(-1)
            self._leaves = [weakref.ref(leaf) for leaf in graph_leaves(args[0])]
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
        else:
            if self._suspects and not known.looks(result):
                self._flow.read(call.read())
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
            elif label in (None, MEANT, OUTSIDE):
                found[mask & nan] = suspect(mask & nan, meant=True)
        parts = torch.split(found, [dense(t).numel() for t in outputs])
        for tensor, part in zip(outputs, parts, strict=True):
            broken = part[not_finite(tensor).reshape(-1).to(part.device)]
            if broken.numel():
                least, most = torch.aminmax(broken)
                shaped = part.view(dense(tensor).shape).to(tensor.device)
                self._flow.write(int(least) if least == most else shaped, tensor)

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
    ) -> int:
        """The number of the suspect that has made these elements of the outputs."""
        number, called = int(mask.sum()), caller(self._thread)
        if not number or called.source.startswith(_CHECKS):
            return MEANT
        made = int((nan & mask).sum())
        kind = kind or kind_of(call.known, given, outputs, nan=made > 0, meant=meant)
        node = torch._C._current_autograd_node()
        forward = None if node is None else self._forwards.get(node._sequence_nr())
        if forward and kind in ("0 / 0 or invalid", "x / 0 or log 0"):
            return forward  # the backward of a pole
        parts = torch.split(mask, [dense(t).numel() for t in outputs])
        elements = sum(len(part) for part in parts if bool(part.any()))
        counts = {"nan": made, "inf": number - made, "elements": elements}
        self._suspects.append(self._cause_of(kind, call.known, given, outputs, called, counts))
        self._forwards[self._made] = len(self._suspects)
        return len(self._suspects)

    def _label(self, given: Input, tensor: Tensor, known: Operation) -> int | Tensor:
        """Where the elements of an input that are not finite come from."""
        counts = given.counts
        unnamed = "", isinstance(tensor, nn.Parameter)
        name, is_parameter = self._names.get(storage_key(tensor), unnamed)
        is_buffer = bool(name) and not is_parameter
        mask = not (is_parameter or counts.nan or (counts.plus_inf and not is_buffer))
        outside = NEWS if not mask else MEANT if is_buffer else OUTSIDE
        labels = self._flow.of(tensor)
        if labels is None:
            labels = outside
        written = given.name.split("[")[0] in known.writes
        swaps = {
            UNWRITTEN: UNWRITTEN if written else outside,
            OUTSIDE: OUTSIDE if known.reads_masks else NEWS,
        }
        if isinstance(labels, int):
            return swaps.get(labels, labels)
        for label, other in swaps.items():
            labels = torch.where(labels == label, other, labels)
        return labels

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
            if counts.nan and isinstance(label, int) and label == UNWRITTEN:
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
    model, slower = precision.model, precision.progress.slower
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

    It starts from the present buffers and random state, and leaves them as they are. ``run`` is
    given a micro-batch's number, from 0, and it or a part of it, ``clear`` drops the gradients,
    ``wide`` runs in fp32 and returns the loss, and ``slower`` says what to do about a loss that has
    left its past; it may be given that loss.
    """
    at, trace, clear = 0, trace_nonfinite(model), clear or model.zero_grad
    clear()
    try:
        with undisturbed(model), trace:
            for number, batch in enumerate(batches):
                if trace.first_cause is not None:
                    break
                at = number
                run(number, batch)
    finally:
        clear()
    cause = trace.first_cause
    if cause is None:
        return None

    def finite(part: Any, run: Callable[[int, Any], Any] = run) -> tuple[Any, ...]:
        """What it returns, in a tuple, if all is finite; else nothing."""
        again = trace_nonfinite(model)
        try:
            with undisturbed(model), again:
                result = run(at, part)
        finally:
            clear()
        return () if again.first_cause else (result,)

    named = cause.cause_class not in _OF_NO_ROW
    samples, fits = _samples(finite, batches[at]) if named else None, ()
    if wide is not None and cause.kind == "overflow" and cause.dtype == torch.float16:
        with suppress(Exception):  # it cannot run in fp32: that proves nothing
            fits = finite(batches[at], wide)
    # a loss in fp32 may be that of a single sample, unless these were tried
    told = "" if slower is None else slower(*(() if samples is None else fits))
    cause = replace(cause, micro_batch=at + 1, micro_batches=len(batches))
    return replace(cause, samples=samples or (), fits_fp32=bool(fits), slower=told)


_OF_NO_ROW = ("weight not finite", "buffer not finite", "literal not finite", "unwritten memory")
_FEW = 8  # more rows than these are no accident of some samples


def _samples(finite: Callable[[Any], Any], batch: Any) -> tuple[int, ...] | None:
    """The rows that are not finite alone, without which the rest is, or (); None: not tried."""
    tables = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if len({len(table) for table in tables}) != 1:
        return None
    rows = list(range(len(tables[0])))

    def part(numbers: list[int]) -> Any:
        return tree_map_only(Tensor, lambda leaf: leaf[numbers] if leaf.dim() else leaf, batch)

    def of(numbers: list[int]) -> Iterator[int]:
        # one row runs twice, since a batch norm refuses one
        if finite(part(numbers if len(numbers) > 1 else numbers * 2)):
            return
        if len(numbers) == 1:
            yield from numbers
            return
        yield from of(numbers[: len(numbers) // 2])
        yield from of(numbers[len(numbers) // 2 :])

    try:
        found = list(islice(of(rows), _FEW + 1))
        rest = [row for row in rows if row not in found]
        proved = 0 < len(found) <= _FEW and rest and finite(part(rest))
    except Exception:  # a part of the batch cannot run: that proves nothing
        return None
    return tuple(found) if proved else ()


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
