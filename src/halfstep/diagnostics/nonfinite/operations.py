"""What a torch operation reads and writes, and why its output is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.precision.policy.policy import dtype_name
from halfstep.precision.scaling.gradients import in_fp64

_ALLOCATES = frozenset(
    [
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"),
        *("new_empty_strided", "resize_", "resize_as_", "set_"),
    ]
)
_OVERWRITES = frozenset(  # the old values are not read
    [
        *("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"),
        *("exponential_", "geometric_", "log_normal_", "cauchy_"),
    ]
)
_FILLS = frozenset(
    [
        *("full", "full_like", "new_full", "fill", "scalar_tensor", "masked_fill", "index_fill"),
        *("where", "constant_pad_nd", "scatter"),
    ]
)
# Sums and sums of products: with finite inputs, NaN comes only from an inner overflow (inf - inf).
_SUMS = frozenset(
    [
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr"),
        *("linear", "matmul", "einsum", "convolution", "convolution_backward", "_trilinear"),
        *("sum", "cumsum", "embedding_dense_backward", "scatter_add", "index_add"),
    ]
)
_POLES = frozenset(["log", "log2", "log10", "rsqrt", "reciprocal", "pow", "div"])
_SCALARS = frozenset(  # names of arguments whose Python numbers are data, not options
    ["self", "other", "value", "scalar", "exponent", "fill_value", "s"]
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Facts about an operator, from its schema."""

    name: str  # such as "aten.add.Tensor"
    base: str  # such as "add", without the underscore of an in-place operation
    names: tuple[str, ...]  # names of its arguments
    writes: tuple[str, ...]  # names of arguments that it writes to
    reads_what_it_writes: bool  # whether their old values matter
    view: bool  # whether its output is a view of its input
    allocates: bool  # whether its output is uninitialised memory
    attention: bool  # whether it is a whole attention, including the softmax
    first_counts: bool  # whether only its first output should be finite

    @property
    def softmax(self) -> bool:
        """Whether a row of -inf alone becomes NaN."""
        return self.attention or ("softmax" in self.base and "backward" not in self.base)


@cache
def operation(func: Any) -> Operation:
    """The facts from an operator's schema; a higher-order operator has none but its name."""
    name = str(func)
    schema = getattr(func, "_schema", None)
    base = name.split(".")[1] if name.count(".") else name
    if schema is None:
        flex = name == "flex_attention"
        return Operation(f"higher_order.{name}", base, (), (), True, False, False, flex, flex)
    composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    forward = "backward" not in base
    attention = ("scaled_dot_product" in base or "attention_forward" in base) and forward
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return Operation(
        name,
        base.rstrip("_"),
        tuple(a.name for a in schema.arguments),
        tuple(a.name for a in written),
        base not in _OVERWRITES and not any(a.is_out for a in written),
        func.is_view and not composite,  # a composite such as aten.to may convert
        base in _ALLOCATES,
        attention,
        attention or (base.endswith("ctc_loss") and forward),  # then logarithms of probabilities
    )


def floating(value: Any) -> Iterator[Tensor]:
    """The floating and complex tensors with elements in an argument or a result."""
    if isinstance(value, Tensor):
        real = value.is_floating_point() or value.is_complex()
        if real and value.device.type != "meta" and value.numel():
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floating(item)
    elif isinstance(value, Mapping):
        yield from floating(list(value.values()))


def stored(tensor: Tensor) -> Tensor:
    """The values that a tensor stores on this rank, dense and real."""
    to_local = getattr(tensor, "to_local", None)  # of a distributed tensor
    tensor = tensor if to_local is None else to_local()
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    elif tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.is_nested or tensor.layout != torch.strided:
        tensor = tensor.values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def storage_key(tensor: Tensor) -> int:
    """An id of the storage of a tensor; views share their base's."""
    key: int = stored(tensor).untyped_storage()._cdata
    return key


def look_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all values are finite; False may be wrong if a sum overflows fp32. One host sync."""
    total: Tensor | None = None
    for tensor in tensors:
        value = stored(tensor)
        # On a CPU torch's fp32 sum of a 16-bit tensor is 7 times slower than that of an fp32 copy.
        widen = value.device.type == "cpu" or value.element_size() == 1
        part = value.float().sum() if widen else value.sum(dtype=torch.float32)
        total = part if total is None else total + part.to(total.device)
    return total is None or math.isfinite(total.item())


class Counts(NamedTuple):
    """How many elements of a tensor, or number, are NaN, infinite or 0; and the largest value."""

    nan: int
    plus_inf: int
    minus_inf: int
    zero: int
    largest: float
    elements: int

    @property
    def inf(self) -> int:
        """The number of infinities of both signs."""
        return self.plus_inf + self.minus_inf


def count(value: Tensor | float) -> Counts:
    """Count the elements of a tensor or number; synchronises with the host."""
    if not isinstance(value, Tensor):
        finite = abs(value) if math.isfinite(value) else 0.0
        plus, minus = int(value == math.inf), int(value == -math.inf)
        return Counts(int(math.isnan(value)), plus, minus, int(value == 0), finite, 1)
    v = stored(value)
    v = v.float() if v.element_size() == 1 else v
    numbers = [
        v.isnan().sum(),
        (v == math.inf).sum(),
        (v == -math.inf).sum(),
        (v == 0).sum(),
        torch.where(v.isfinite(), v, 0).abs().max(),
    ]
    *whole, largest = torch.stack([in_fp64(n) for n in numbers]).tolist()
    nan, plus, minus, zero = map(int, whole)
    return Counts(nan, plus, minus, zero, largest, v.numel())


@dataclass(frozen=True, slots=True)
class Input:
    """One input of an operation, with its values before the operation."""

    name: str  # name of the argument
    original: Tensor | float  # the argument itself
    value: Tensor | float  # its values before the operation: a copy if it was written to
    counts: Counts  # of ``value``


def inputs(
    known: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], before: Mapping[int, Tensor]
) -> list[Input]:
    """The inputs that an operation read: floating tensors, and numbers that are data.

    ``before`` holds copies of the tensors that it wrote to, by the tensor's id.
    """
    names = known.names or tuple(f"argument {i}" for i in range(len(args)))
    found = []
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if name in known.writes and not known.reads_what_it_writes:
            continue
        tensors = list(floating(value))
        for i, tensor in enumerate(tensors):
            old = before.get(id(tensor), tensor)
            label = f"{name}[{i}]" if isinstance(value, list | tuple) else name
            found.append(Input(label, tensor, old, count(old)))
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and name in _SCALARS:
            found.append(Input(name, float(value), float(value), count(float(value))))
    return found


def kind_of(
    func: Any, known: Operation, given: Sequence[Input], outputs: Sequence[Tensor], made: Counts
) -> Kind | None:
    """Why outputs are not finite, or None if the operation only passes on its inputs.

    Non-finite inputs have been allowed before. ``outputs`` are the outputs that are not finite, and
    ``made`` counts their elements.
    """
    tensors = [i.counts for i in given if isinstance(i.value, Tensor)]
    numbers = [i.counts for i in given if not isinstance(i.value, Tensor)]
    if any(c.nan for c in numbers):
        return "not finite in the input data"
    plus, minus = (any(getattr(i.counts, n) for i in given) for n in ("plus_inf", "minus_inf"))
    if made.nan and not any(c.nan for c in tensors):
        if known.softmax and not plus and _masks_a_row(known, given):
            return "fully masked row"
        if (plus or minus) and not known.attention:
            return "inf - inf or 0 * inf"
        sums = known.attention or known.base in _SUMS
        return "overflow" if sums and tensors else "0 / 0 or invalid"
    if any(c.minus_inf for c in numbers) or (known.base in _FILLS and (plus or minus)):
        return None
    if any(c.inf for c in numbers):
        return "not finite in the input data"
    if known.attention:  # a mask's -inf is no reason for an infinity here
        minus = False
    explained = plus or minus
    if explained and torch.Tag.pointwise in getattr(func, "tags", ()):
        explained = not _new_infinities(given, outputs[0])
    if not made.inf or explained:
        return None
    pole = known.base in _POLES and _at_zero(known, given, outputs[0])
    return "x / 0 or log 0" if pole else "overflow"


def _masks_a_row(known: Operation, given: Sequence[Input]) -> bool:
    """Whether some row of a softmax was wholly masked, given that its output has NaN."""
    if not known.attention:  # there is no other way to NaN from finite scores and -inf
        return known.base == "_masked_softmax" or any(i.counts.minus_inf for i in given)
    rows = [stored(i.value) == -math.inf for i in given if isinstance(i.value, Tensor)]
    return any(bool(row.all(dim=-1).any()) for row in rows)


def _at_zero(known: Operation, given: Sequence[Input], output: Tensor) -> bool:
    """Whether some output element is infinite where the divisor, or the only operand, is 0."""
    name = "other" if known.base == "div" else "self"
    (divisor,) = [i.value for i in given if i.name == name]
    zero = stored(divisor) == 0 if isinstance(divisor, Tensor) else torch.tensor(divisor == 0)
    return bool((stored(output).isinf() & zero.to(output.device)).any())


def _new_infinities(given: Sequence[Input], output: Tensor) -> bool:
    """Whether a pointwise operation's output is infinite where all inputs were finite."""
    came = torch.zeros_like(stored(output), dtype=torch.bool)
    for i in given:
        if isinstance(i.value, Tensor):
            came = came | ~stored(i.value).isfinite()
    return bool((stored(output).isinf() & ~came).any())


# What :func:`halfstep.trace_nonfinite` reports: one operation in full detail.


Kind = Literal[
    "overflow",
    "x / 0 or log 0",
    "inf - inf or 0 * inf",
    "0 / 0 or invalid",
    "fully masked row",
    "not finite in the input data",
]
_SIGNS = {"add": "+", "sub": "+", "mul": "*"}  # |a - b| is |a| + |b| at most


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of the reported operation.

    Attributes:
        name: The argument's name, and the parameter's or buffer's if it is one.
        dtype: The dtype of a tensor; None for a Python number.
        largest: The largest finite absolute value; 0 if there is none.
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
        kind: What happened: ``"overflow"`` is an infinity from finite inputs that no pole explains;
            ``"not finite in the input data"`` means that the operation is only the first to read
            values from outside: data, weights, a literal, or uninitialised memory.
        op: The operation's name, such as ``"aten.add.Tensor"``.
        module: Qualified name of the innermost module in whose forward the operation ran, or, in
            the backward, in whose forward its autograd node was made; "" for the model itself.
        class_name: The module's class; "" outside of all modules.
        block: Qualified name of the item of a ``ModuleList`` (else of a ``Sequential``) that the
            module is, or is in; "" if there is none.
        direction: ``"forward"`` or ``"backward"``; recomputation by checkpointing is forward.
        dtype: The dtype of the output.
        nan: Number of NaN in the output.
        inf: Number of infinities in the output.
        elements: Number of elements of the output.
        inputs: The operation's inputs.
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
        """The share of the output's elements that are not finite."""
        return (self.nan + self.inf) / self.elements

    def __str__(self) -> str:
        maximum = torch.finfo(self.dtype).max
        where = f"{self.module or 'the model'} ({self.class_name})"
        where = f"{self.direction} of {where}" if self.class_name else "outside the model's modules"
        if self.block not in ("", self.module):
            where += f" in block {self.block}"
        if self.node:
            where += f", {self.node}"
        lines = [
            f"{self.kind}: {self.op} in {dtype_name(self.dtype)}, {where}",
            f"output: {self.inf:,} inf and {self.nan:,} NaN of {self.elements:,} elements "
            f"({100 * self.share:.3g} %)",
        ]
        for operand in self.inputs:
            form = f"{dtype_name(operand.dtype)} up to " if operand.dtype else ""
            part = f"{100 * operand.largest / maximum:.3g} % of {short(maximum)}"
            line = f"input {operand.name}: {form}{short(operand.largest)} ({part})"
            if operand.inf or operand.nan:
                line += f", and {operand.inf:,} inf, {operand.nan:,} NaN"
            lines.append(line)
        lines += self._bound(maximum)
        return "\n  ".join([*lines, f"at {self.source}"] if self.source else lines)

    def _bound(self, maximum: float) -> list[str]:
        """The sum or product that overflows, as text, if the operation is that simple."""
        sign = _SIGNS.get(self.op.split(".")[1].rstrip("_"))
        if self.kind != "overflow" or sign is None or len(self.inputs) != 2:
            return []
        a, b = (operand.largest for operand in self.inputs)
        fits = (a + b if sign == "+" else a * b) <= maximum
        return [] if fits else [f"{short(a)} {sign} {short(b)} > {short(maximum)}"]


def short(value: float) -> str:
    """A number with three digits, as ``4.10e4``; integers below 1000, and 65504, in full."""
    if value == int(value) and abs(value) < 1e5 and (value < 1e3 or value == 65504):
        return str(int(value))
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits}e{int(exponent)}"


def block_of(model: nn.Module, name: str) -> str:
    """The innermost item of a ``ModuleList`` (else ``Sequential``) that is or holds a module.

    Items of a ``Sequential`` without children, as in an MLP, do not count as blocks.
    """
    parts = name.split(".") if name else []
    for container in (nn.ModuleList, nn.Sequential):
        for end in range(len(parts), 0, -1):
            found = ".".join(parts[:end])
            leaf = container is nn.Sequential and not any(model.get_submodule(found).children())
            if not leaf and isinstance(model.get_submodule(".".join(parts[: end - 1])), container):
                return found
    return ""
