"""The first operation that made a NaN or an infinity, and the module in which it ran.

A NaN loss is seen where it ends up. Between :func:`trace_nonfinite`'s ``with`` and its end, every
operation of forward and backward is looked at, functional ones too::

    outputs finite                                   go on (one sum on the device, one host sync)
    inputs finite, or NaN where none went in         this operation is the PRODUCER: remember it
    an input not finite that no operation here made  it came with data or weights: remember that
    else                                             an operation passes on what was allowed

Intended infinities are allowed: -inf that comes in from outside or as a literal (``masked_fill``,
``where``, ``full``), and +inf as the literal of a fill. What they turn into NaN is reported. The
storages that hold allowed values are remembered by weak references, so that reading them is no
news. Operations that only allocate, and views, are no producers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from halfstep.precision import calibrate, gradients, simulate
from halfstep.precision.policy import dtype_name

Kind = Literal[
    "overflow",
    "x / 0 or log 0",
    "inf - inf or 0 * inf",
    "0 / 0 or invalid",
    "fully masked row",
    "not finite in the input data",
]
_ALLOCATES = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ "
    "resize_as_ set_".split()
)
_OVERWRITES = frozenset(  # the old values are not read
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ "
    "cauchy_".split()
)
_FILLS = frozenset(
    "full full_like new_full fill scalar_tensor masked_fill index_fill where constant_pad_nd "
    "scatter".split()
)
_POLES = frozenset("log log2 log10 rsqrt reciprocal pow div".split())
_NUMBERS = ("other", "value", "exponent", "scalar", "self", "fill_value")
_TORCH = str(Path(torch.__file__).parent)
_UNSEEN = (_TORCH, __file__, simulate.__file__)  # whose frames are not the user's
_TRIALS = (calibrate.__file__, gradients.__file__)  # overflow here is asked for, or dealt with


@dataclass(frozen=True, slots=True)
class Operand:
    """What went into an operation.

    Attributes:
        name: Of the argument, and of the parameter or buffer if it is one.
        dtype: None for a Python number.
        largest: The largest finite absolute value.
        nan: Number of NaN.
        inf: Number of infinities.
    """

    name: str
    dtype: torch.dtype | None
    largest: float
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class Cause:
    """The first operation whose output was not finite, for no fault of its inputs.

    Attributes:
        kind: What happened.
        op: Such as ``"aten.add.Tensor"``.
        module: Qualified name of the innermost module in whose forward the operation ran, or, in
            the backward, in whose forward its autograd node was made; "" for the model itself.
        class_name: The module's class; "" outside of all modules.
        block: Qualified name of the item of a ``ModuleList`` (else of a ``Sequential``) around it.
        direction: ``"forward"`` also for what checkpointing computes again in the backward.
        dtype: Of the output.
        nan: Number of NaN in the output.
        inf: Number of infinities in it.
        elements: Its number of elements.
        inputs: What went in.
        node: The autograd node, in the backward.
        source: File and line that called the operation, in the forward.
    """

    kind: Kind
    op: str
    module: str
    class_name: str
    block: str
    direction: Literal["forward", "backward"]
    dtype: torch.dtype
    nan: int
    inf: int
    elements: int
    inputs: tuple[Operand, ...]
    node: str = ""
    source: str = ""

    @property
    def share(self) -> float:
        """Of the output, the share that is not finite."""
        return (self.nan + self.inf) / self.elements

    def __str__(self) -> str:
        top, of = torch.finfo(self.dtype).max, f"{self.module or 'the model'} ({self.class_name})"
        where = f"{self.direction} of {of if self.class_name else 'what is outside the model'}"
        around = f", block {self.block}" if self.block not in ("", self.module) else ""
        node = f", {self.node}" if self.node else ""
        lines = [f"{self.kind}: {self.op} in {dtype_name(self.dtype)}, {where}{around}{node}"]
        output = f"{self.inf:,} inf and {self.nan:,} NaN of {self.elements:,}"
        lines.append(f"output: {output} ({100 * self.share:.3g} %)")
        for i in self.inputs:
            bad = f", and {i.inf:,} inf, {i.nan:,} NaN" if i.inf or i.nan else ""
            form = f"{dtype_name(i.dtype)} up to " if i.dtype else ""
            part = f"{100 * i.largest / top:.3g} % of {_short(top)}"
            lines.append(f"input {i.name}: {form}{_short(i.largest)} ({part}){bad}")
        sign = {"add": "+", "sub": "+", "mul": "*"}.get(self.op.split(".")[1].rstrip("_"))
        if self.kind == "overflow" and sign and len(self.inputs) == 2:
            a, b = (i.largest for i in self.inputs)
            if (a + b if sign == "+" else a * b) > top:
                lines.append(f"{_short(a)} {sign} {_short(b)} > {_short(top)}")
        return "\n  ".join([*lines, f"at {self.source}"] if self.source else lines)


def trace_nonfinite(model: nn.Module, allow: Sequence[str] = ()) -> NonFiniteTrace:
    """Watch every operation of forward and backward for the first NaN or infinity.

    A diagnosis: it waits for the device after every operation. Numbers, random state and gradients
    stay as they are. Enter it around forward and backward; the order against
    ``precision.autocast()`` does not matter.

    Args:
        model: Whose modules are named. Its hooks go when the context is left.
        allow: Globs of operations (``"aten.log.*"``) and modules (``"*.sampler"``) that may make
            NaN and infinities.

    Returns:
        A context manager that gives itself: read ``first_cause``.

    Example:
        >>> model = nn.Sequential(nn.Identity(), nn.ReLU())
        >>> with trace_nonfinite(model) as trace:
        ...     _ = model(torch.tensor([300.0]).half()) * 300
        >>> print(trace.first_cause)  # doctest: +ELLIPSIS
        overflow: aten.mul.Tensor in fp16, forward of what is outside the model
          output: 1 inf and 0 NaN of 1 (100 %)
          input self: fp16 up to 300 (0.458 % of 65504)
          input other: 300 (0.458 % of 65504)
          300 * 300 > 65504
          at ...
    """
    return NonFiniteTrace(model, allow)


class NonFiniteTrace(TorchDispatchMode):
    """What :func:`trace_nonfinite` gives.

    Attributes:
        first_cause: None as long as everything is finite, or as intended.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, allow: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first_cause: Cause | None = None
        self._model = model
        self._allow = tuple(allow)
        self._handles: list[Any] = []
        self._stack: list[_Call] = []
        self._calls: list[_Call] = []
        self._allowed: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> NonFiniteTrace:
        if any(isinstance(m, NonFiniteTrace) for m in _get_current_dispatch_mode_stack()):
            raise RuntimeError("trace_nonfinite is on already; traces do not nest: leave it first")
        self._thread = get_ident()
        self._names = {id(p): n for n, p in self._model.named_parameters()}
        self._buffers = {id(b): n for n, b in self._model.named_buffers()}
        try:
            for name, module in self._model.named_modules():
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._forget()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._forget()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
