"""Finds the first operation that made a NaN or an infinity, and the module in which it ran.

A NaN shows in the loss, far from its cause. Inside :func:`trace_nonfinite` every operation of
forward and backward is checked, functional ones too::

    outputs are finite                               continue: one sum on the device, one host sync
    a non-finite input came from no operation seen   data or weights are the cause: report that
    NaN that the inputs do not explain               this operation is the cause: report it
    infinity that the inputs do not explain          it is a suspect: see below
    otherwise                                        it passes on values that were allowed

Intended infinities are allowed: -inf as an input (a mask) or a literal, and +inf as the literal of
a fill. A NaN made from them is reported. Storages with allowed values are remembered by weak
references, so that reading them again is not reported. Views, and operations that only allocate,
are never reported.

An infinity need not be a fault: T5 takes ``log(0)`` of distances that it does not use, a softmax
makes 0 of ``-inf``, a clamp makes a number of ``inf``. So the operation that makes one is a suspect
at first, and so is everything that the infinity passes through::

    NaN is made of it                  the suspect is the cause
    it becomes finite                  the suspect is cleared, unless NaN is made of it elsewhere
    nothing has made it finite         the suspect is the cause of what is still infinite

Where several are the cause, the first is reported.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from halfstep.diagnostics.module_calls import ModuleCalls
from halfstep.diagnostics.nonfinite.cause import (
    Cause,
    Facts,
    Kind,
    Operand,
    Role,
    cause_class,
)
from halfstep.diagnostics.nonfinite.operations import (
    Counts,
    Input,
    Operation,
    Suspects,
    count,
    floating,
    inputs,
    kind_of,
    look_finite,
    operation,
    overflows_a_mask,
    storage_key,
    stored,
)
from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.precision.agreement import ranks_of_this_process
from halfstep.precision.border import require, require_model
from halfstep.precision.casting import autocast, op_casts
from halfstep.precision.checks import no_loss
from halfstep.precision.masters.accumulation import graph_leaves
from halfstep.precision.recovery import FIND_IT
from halfstep.precision.scaling import gradients
from halfstep.precision.scaling.gradients import OneRank
from halfstep.precision.step import Precision

_TORCH = str(Path(torch.__file__).parent)
_HALFSTEP = str(Path(__file__).parents[2])
_OURS = (str(Path(__file__).parent),)
_NOT_THE_CALLER = (_TORCH, *_OURS, autocast.__file__, op_casts.__file__)
# Code that looks for overflows, so that it is never the cause.
_CHECKS = gradients.__file__


def trace_nonfinite(model: nn.Module) -> NonFiniteTrace:
    """Watch every operation of forward and backward for the first NaN or infinity.

    It is slow, since it waits for the device after every operation, but does not change a bit of
    losses, gradients and random numbers. Enter it around forward and backward, outside or inside
    of ``precision.autocast()``.

    Args:
        model: The model whose modules the report names. It has hooks until the context is left.

    Returns:
        A context manager that returns itself on entry; read its ``first_cause``.

    Raises:
        PrecisionError: If ``model`` is not a module.
        RuntimeError: When it is entered inside another one.

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
          to do: overflow in the loss: compute the loss in fp32, ...
    """
    return NonFiniteTrace(model)


class NonFiniteTrace(TorchDispatchMode):
    """The context manager that :func:`trace_nonfinite` returns."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cause: Cause | None = None
        self._suspects = Suspects()
        self._model = require_model(model, "trace_nonfinite(model)")
        self._modules = ModuleCalls(model)
        self._thread = 0
        self._names: dict[int, tuple[str, bool]] = {}  # by storage; True: parameter
        self._allowed: dict[int, tuple[StorageWeakRef, bool]] = {}  # True: unwritten
        self._prune_at = 1024

    @property
    def first_cause(self) -> Cause | None:
        """The first cause so far; None as long as all values are finite, intended or unused."""
        return self._cause or self._suspects.open

    def __enter__(self) -> NonFiniteTrace:
        if any(isinstance(mode, NonFiniteTrace) for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("trace_nonfinite within trace_nonfinite; leave the outer one first")
        self._thread = threading.get_ident()
        named = [*self._model.named_buffers(), *self._model.named_parameters()]
        for name, tensor in named:
            if not nn.parameter.is_lazy(tensor):
                self._names[storage_key(tensor)] = name, isinstance(tensor, nn.Parameter)
        self._modules.hook()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._modules.unhook()
        self._names, self._allowed = {}, {}
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
        if self._cause is not None or known.view:
            return func(*args, **kwargs)
        written: list[Tensor] = []
        if known.writes:
            by_name = {**dict(zip(known.names, args, strict=False)), **kwargs}
            written = list(floating([by_name.get(name) for name in known.writes]))
        keep = known.reads_what_it_writes and not known.allocates
        before = {id(t): t.detach().clone() for t in written} if keep else {}
        result = func(*args, **kwargs)
        outputs = list({id(t): t for t in (*floating(result), *written)}.values())
        if known.first_counts:
            self._allow_values(outputs[1:])
            outputs = outputs[:1]
        if known.collective:  # what other ranks made, which they trace themselves
            self._allow_values([*outputs, *floating(args)])
        elif known.allocates:
            self._allow_values(outputs, unwritten=True)
        elif not look_finite(outputs):
            with torch.no_grad():
                self._judge(func, known, args, kwargs, before, outputs)
        elif self._suspects and not known.looks(result):
            self._suspects.clear(self._read(known, args, kwargs))
        return result

    def _read(self, known: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """The suspects whose infinities an operation may have read."""
        by_name = [*zip(known.names, args, strict=False), *kwargs.items()]
        overwritten = () if known.reads_what_it_writes else known.writes
        given = [value for name, value in by_name if name not in overwritten]
        return self._suspects.of(floating(given if known.names else args))

    def _judge(
        self,
        func: Any,
        known: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: dict[int, Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Record an operation as the first cause, or its outputs as allowed."""
        counts = [(t, c) for t in outputs if (c := count(t)).nan or c.inf]
        if not counts:
            return  # only their sum overflowed
        outputs = [t for t, _ in counts]
        made = Counts(*(sum(numbers) for numbers in zip(*(c for _, c in counts), strict=True)))
        given = inputs(known, args, kwargs, before)
        if any(self._is_news(i, known) for i in given):
            kind: Kind | None = "not finite in the input data"
        else:
            kind = kind_of(func, known, given, outputs, made)
        from_suspects = self._read(known, args, kwargs) if self._suspects else []
        if from_suspects and made.nan and kind is not None:
            self._cause = self._suspects.first(from_suspects)
            return
        self._suspects.pass_on(from_suspects, outputs)
        if kind is None:
            self._allow_values(outputs)
            return
        caller = self._caller()
        if caller.source.startswith(_CHECKS):
            self._allow_values(outputs)
            return
        cause = self._cause_of(kind, known, given, outputs, made, caller)
        if made.nan or kind == "not finite in the input data":
            forward = self._suspects.forward_of(cause.node, cause.module)
            self._cause = self._suspects.open or forward or cause
        else:
            self._suspects.add(cause, outputs)
            self._allow_values(outputs)

    def _cause_of(
        self,
        kind: Kind,
        known: Operation,
        given: list[Input],
        outputs: list[Tensor],
        made: Counts,
        caller: Caller,
    ) -> Cause:
        """Describe an operation that made NaN or infinities for no fault of its inputs."""
        simulated, dtype, low = caller.simulated, outputs[0].dtype, None
        if simulated is not None:
            low = dtype = simulated["self"].dtype
            if operation(simulated["func"]) != known:  # func is its final conversion
                known = operation(simulated["func"])
                given = inputs(known, simulated["args"], simulated["kwargs"], {})
        place, gain = self._modules.place(self._names), median_gain(self._model)
        operands = tuple(self._operand(i, low) for i in given)
        forward = place.direction == "forward"
        facts = Facts(
            kind=kind,
            base=known.base,
            product=known.product,
            attention=known.attention,
            node=None if forward else place.node,
            own=caller.own,
            module=place.module,
            class_name=place.class_name,
            called_by=caller.function,
            dims=outputs[0].dim(),
            roles=[o.role for o in operands if o.nan or o.inf],
            tensors=sum(isinstance(i.original, Tensor) for i in given),
            mask=kind == "overflow" and forward and overflows_a_mask(made, given),
            gain=gain,
            after=self._modules.any_ended,
        )
        return Cause(
            kind=kind,
            op=known.name,
            dtype=dtype,
            nan=made.nan,
            inf=made.inf,
            elements=made.elements,
            inputs=operands,
            source=caller.source if caller.own or forward else "",
            cause_class=cause_class(facts),
            gain=gain,
            **place._asdict(),
        )

    def _allow_values(self, tensors: Iterable[Tensor], *, unwritten: bool = False) -> None:
        """Remember that these tensors may hold NaN or infinities from now on."""
        for tensor in tensors:
            storage = stored(tensor).untyped_storage()
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._allowed[ref.cdata] = ref, unwritten
        if len(self._allowed) > self._prune_at:
            # A weak reference keeps the key of freed memory from being reused: drop expired ones.
            for key in [k for k, (ref, _) in self._allowed.items() if ref.expired()]:  # type: ignore[no-untyped-call]
                del self._allowed[key]
            self._prune_at = 1024 + 2 * len(self._allowed)

    def _is_news(self, given: Input, known: Operation) -> bool:
        """Whether an input is not finite, is not a mask, and was made by no operation seen here."""
        if not isinstance(given.original, Tensor):
            return False
        counts, key = given.counts, storage_key(given.original)
        written = given.name.split("[")[0] in known.writes
        if key in self._allowed and (written or not self._unwritten(key)):
            return False
        name, is_parameter = self._names.get(key, ("", False))
        is_buffer = bool(name) and not is_parameter
        plus, minus = counts.plus_inf and not is_buffer, counts.minus_inf and is_parameter
        return bool(counts.nan or plus or minus)

    def _unwritten(self, key: int) -> bool:
        return key in self._allowed and self._allowed[key][1]

    def _operand(self, given: Input, low: torch.dtype | None) -> Operand:
        name, dtype, counts = given.name, None, given.counts
        role: Role = "number"
        if isinstance(given.original, Tensor):
            key, dtype, role = storage_key(given.original), low or given.original.dtype, ""
            if key in self._names:
                known, is_parameter = self._names[key]
                name, role = f"{name} = {known}", "parameter" if is_parameter else "buffer"
            if counts.nan and self._unwritten(key):
                name = f"{name} (of torch.empty, written by nothing that torch sees)"
                role = "unwritten"
        return Operand(name, dtype, counts.largest, counts.nan, counts.inf, role)

    def _caller(self) -> Caller:
        """The user's code that runs the operation, and a 16-bit simulation that is running.

        The simulation may be above this mode in the stack. Then this mode sees only the parts of
        an operation, and the operation itself is known from the simulation's frame.
        """
        simulated = None
        frame: FrameType | None = sys._current_frames().get(self._thread)
        while frame is not None:
            code = frame.f_code
            if code is autocast.SimulatedProducts.run.__code__:
                if simulated is None and "wide" in frame.f_locals:
                    simulated = frame.f_locals  # its operands are converted to fp32
            elif not code.co_filename.startswith(_NOT_THE_CALLER):
                first = code.co_varnames[:1]
                own = first == ("ctx",) and code.co_name in ("forward", "backward")
                own = own and not code.co_filename.startswith(_HALFSTEP)
                function = f"{Path(code.co_filename).stem}.{code.co_qualname}"
                return Caller(simulated, f"{code.co_filename}:{frame.f_lineno}", function, own)
            frame = frame.f_back
        return Caller(simulated)


class Caller(NamedTuple):
    """The code that called an operation."""

    simulated: dict[str, Any] | None  # the locals of a 16-bit simulation that runs it
    source: str = ""  # file and line
    function: str = ""  # the file's stem and the function's qualified name
    own: bool = False  # whether that is a user's autograd.Function


def median_gain(model: nn.Module) -> float:
    """The median over the model's matrices of rms * sqrt(fan in); embeddings are left out."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    gains = []
    for parameter in model.parameters():
        codes = not parameter.is_floating_point() and not parameter.is_complex()  # quantised
        lazy = nn.parameter.is_lazy(parameter)
        if codes or lazy or parameter.dim() < 2 or id(parameter) in tables:
            continue
        value = stored(parameter.detach()).double()
        if value.numel() and bool(value.isfinite().all()):
            inner = parameter.numel() / parameter.shape[0]
            gains.append(float(value.square().mean().sqrt()) * inner**0.5)
    return sorted(gains)[len(gains) // 2] if gains else 0.0


# A batch run again under the trace: forward and backward are those of the step that failed.


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
