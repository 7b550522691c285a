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

import sys
import threading
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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
    block_of,
    cause_class,
)
from halfstep.diagnostics.nonfinite.operations import (
    Counts,
    Input,
    Operation,
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
from halfstep.precision.border import as_texts, require_model
from halfstep.precision.casting import op_casts, simulate
from halfstep.precision.scaling import gradients

_TORCH = str(Path(torch.__file__).parent)
_HALFSTEP = str(Path(__file__).parents[2])
_OURS = (str(Path(__file__).parent),)
_NOT_THE_CALLER = (_TORCH, *_OURS, simulate.__file__, op_casts.__file__)
# Code that looks for overflows, so that it is never the cause.
_CHECKS = gradients.__file__


def trace_nonfinite(model: nn.Module, allow: str | Sequence[str] = ()) -> NonFiniteTrace:
    """Watch every operation of forward and backward for the first NaN or infinity.

    It is slow, since it waits for the device after every operation, but does not change a bit of
    losses, gradients and random numbers. Enter it around forward and backward, outside or inside
    of ``precision.autocast()``.

    Args:
        model: The model whose modules the report names. It has hooks until the context is left.
        allow: Globs of operations (``"aten.log.*"``) and of modules (``"*.sampler"``) that may
            make NaN and infinities.

    Returns:
        A context manager that returns itself on entry; read its ``first_cause``.

    Raises:
        PrecisionError: If ``model`` is not a module, or ``allow`` is not a glob or several.
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
          300 * 300 > 65504
          at ...
          to do: overflow in the loss: compute the loss in fp32, ...
    """
    return NonFiniteTrace(model, allow)


class NonFiniteTrace(TorchDispatchMode):
    """The context manager that :func:`trace_nonfinite` returns."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, allow: str | Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cause: Cause | None = None
        self._suspects = Suspects()
        self._model = require_model(model, "trace_nonfinite(model)")
        self._modules = ModuleCalls(model)
        self._allow = as_texts(allow, "trace_nonfinite(allow)", "globs of operations and modules")
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
        simulated, dtype, low = caller.simulated, outputs[0].dtype, None
        if simulated is not None:
            low = dtype = simulated["self"].dtype
            if operation(simulated["func"]) != known:  # func is its final conversion
                known = operation(simulated["func"])
                given = inputs(known, simulated["args"], simulated["kwargs"], {})
        place = self._modules.place(self._names)
        module = place.module
        allowed = any(fnmatchcase(known.name, g) or fnmatchcase(module, g) for g in self._allow)
        if allowed or caller.source.startswith(_CHECKS):
            self._allow_values(outputs)
            return
        operands = tuple(self._operand(i, low) for i in given)
        gain = median_gain(self._model)
        facts = Facts(
            kind=kind,
            base=known.base,
            product=known.product,
            attention=known.attention,
            node=place.node if place.direction == "backward" else None,
            own=caller.own,
            module=module,
            class_name=place.class_name,
            called_by=caller.function,
            dims=outputs[0].dim(),
            roles=[o.role for o in operands if o.nan or o.inf],
            tensors=sum(isinstance(i.original, Tensor) for i in given),
            mask=(kind, place.direction) == ("overflow", "forward")
            and overflows_a_mask(made, given),
            gain=gain,
            after=self._modules.any_ended,
        )
        cause = Cause(
            kind=kind,
            op=known.name,
            block=block_of(self._model, module),
            dtype=dtype,
            nan=made.nan,
            inf=made.inf,
            elements=made.elements,
            inputs=operands,
            source=caller.source if caller.own or place.direction == "forward" else "",
            cause_class=cause_class(facts),
            gain=gain,
            **place._asdict(),
        )
        if made.nan or kind == "not finite in the input data":
            forward = self._suspects.forward_of(cause.node, cause.module)
            self._cause = self._suspects.open or forward or cause
        else:
            self._suspects.add(cause, outputs)
            self._allow_values(outputs)

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
            if code is simulate.SimulatedProducts.run.__code__:
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


class _Suspect:
    """A cause of infinities, and the storages that hold them."""

    def __init__(self, cause: Cause) -> None:
        self.cause = cause
        self.storages: dict[int, StorageWeakRef] = {}  # weak references keep keys from reuse
        self.cleared = False


class Suspects:
    """The operations that have made infinities, in order."""

    def __init__(self) -> None:
        self._suspects: list[_Suspect] = []

    def __bool__(self) -> bool:
        """Whether there are any, cleared ones included."""
        return bool(self._suspects)

    def add(self, cause: Cause, made: Iterable[Tensor]) -> None:
        """Remember an operation that made infinities of finite numbers."""
        suspect = _Suspect(cause)
        self._suspects.append(suspect)
        _hold(suspect, made)

    def of(self, given: Iterable[Tensor]) -> list[int]:
        """The numbers of the suspects whose infinities may be in these tensors."""
        keys = {storage_key(tensor) for tensor in given}
        return [n for n, s in enumerate(self._suspects) if keys & s.storages.keys()]

    def pass_on(self, numbers: Iterable[int], made: Iterable[Tensor]) -> None:
        """Infinities of these suspects have passed into what an operation made."""
        tensors = [*made]
        for number in numbers:
            _hold(self._suspects[number], tensors)

    def clear(self, numbers: Iterable[int]) -> None:
        """An operation has made finite numbers of the infinities of these suspects."""
        for number in numbers:
            self._suspects[number].cleared = True

    def first(self, numbers: Iterable[int]) -> Cause:
        """The first of these and of all that are not cleared."""
        known = {*numbers}
        return next(s.cause for n, s in enumerate(self._suspects) if n in known or not s.cleared)

    def forward_of(self, node: str, module: str) -> Cause | None:
        """The suspect whose backward this autograd node is, such as ``log`` of ``LogBackward0``."""
        for suspect in self._suspects:
            base = suspect.cause.op.split(".")[1].strip("_").replace("_", "")
            forward = suspect.cause.direction == "forward" and suspect.cause.module == module
            if forward and node.partition("Backward")[0].lower() == base:
                return suspect.cause
        return None

    @property
    def open(self) -> Cause | None:
        """The first suspect whose infinities nothing has made finite."""
        return next((s.cause for s in self._suspects if not s.cleared), None)


def _hold(suspect: _Suspect, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        reference = StorageWeakRef(stored(tensor).untyped_storage())  # type: ignore[no-untyped-call]
        suspect.storages[reference.cdata] = reference
