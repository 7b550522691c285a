"""What a torch operation reads and writes, and why its output is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.diagnostics.nonfinite.cause import Cause, Kind
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
_COLLECTIVES = ("c10d.", "_c10d_functional.", "fsdp.")  # namespaces
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
    collective: bool = False  # whether its values come from other ranks

    @property
    def product(self) -> bool:
        """Whether it is a sum, or sums of products."""
        return self.base in _SUMS

    def looks(self, result: Any) -> bool:
        """Whether it only looks at its inputs, or their shape, as ``isinf`` and ``ones_like``."""
        if self.base.endswith("_like") or self.base.startswith("new_"):
            return True
        only = not any(True for _ in floating(result)) and isinstance(result, Tensor)
        return only and self.base not in ("_to_copy", "to")

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
        name.startswith(_COLLECTIVES),
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
    pairs = [*zip(names, args, strict=False), *kwargs.items()]
    averaged = any(n in ("training", "train", "use_input_stats") and v is True for n, v in pairs)
    for name, value in pairs:
        if name in known.writes and not known.reads_what_it_writes:
            continue
        if averaged and name in ("running_mean", "running_var"):
            continue  # they are moved by a batch norm that trains, and do not reach its output
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


_LOWEST = tuple(torch.finfo(t).min for t in (torch.float16, torch.bfloat16, torch.float32))


def overflows_a_mask(made: Counts, given: Sequence[Input]) -> bool:
    """Whether infinities are those of an additive mask that was added twice or cast too narrow.

    Such an operation makes nothing but -inf, and one of its inputs is a mask: it has no values but
    0 and one other, or its lowest value is, to 1 %, the lowest number of a format.
    """
    if made.nan or made.plus_inf:
        return False
    for i in given:
        if not isinstance(i.value, Tensor):
            continue
        values = stored(i.value).double()
        lowest = float(values[values.isfinite()].min()) if bool(values.isfinite().any()) else 0.0
        near = any(abs(lowest / low - 1) < 0.01 for low in _LOWEST)
        two = bool(((values == 0) | (values == lowest) | (values == -math.inf)).all())
        if lowest <= -1e4 and (near or (two and values.numel() > 1)):
            return True
    return False


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
