"""What a torch operation reads and writes, and why its output is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from halfstep.precision.masters.local_part import dense

Kind = Literal[
    "overflow",
    "x / 0 or log 0",
    "inf - inf or 0 * inf",
    "0 / 0 or invalid",
    "fully masked row",
    "not finite in the input data",
    "infinity that is meant",
]

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
FILLS = frozenset(
    [
        *("full", "full_like", "new_full", "fill", "scalar_tensor", "masked_fill", "index_fill"),
        *("where", "constant_pad_nd", "scatter"),
    ]
)
# With finite inputs, NaN comes of these only by an inner overflow (inf - inf).
MATMULS = frozenset(
    [
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr"),
        *("linear", "matmul", "einsum", "convolution", "convolution_backward", "_trilinear"),
        *("_grouped_mm", "grouped_mm", "_sparse_addmm", "_sparse_mm", "_scaled_mm", "inner"),
        *("mkldnn_linear", "_convolution", "mkldnn_convolution", "cudnn_convolution"),
    ]
)
SUMS = frozenset(
    [
        *("sum", "nansum", "mean", "cumsum", "embedding_dense_backward", "scatter_add"),
        *("index_add", "index_put", "_index_put_impl", "scatter_reduce", "segment_reduce"),
        *("_embedding_bag", "_embedding_bag_forward_only", "logcumsumexp", "_sparse_sum"),
        *("_fft_r2c", "_fft_c2r", "_fft_c2c"),
    ]
)
_COLLECTIVES = ("c10d.", "_c10d_functional.", "fsdp.")  # namespaces
_POLES = {  # arguments at which a function of one operand is infinite
    **dict.fromkeys(["log", "log2", "log10", "rsqrt", "reciprocal", "pow", "xlogy"], (0.0,)),
    **dict.fromkeys(["lgamma", "digamma", "polygamma"], (0.0, -1.0, -2.0)),
    **dict.fromkeys(["logit", "special_ndtri"], (0.0, 1.0)),
    **dict.fromkeys(["atanh", "erfinv"], (-1.0, 1.0)),
    **dict.fromkeys(["log1p", "special_xlog1py"], (-1.0,)),
}
_DIVISORS = {"div": ("other", "scalar", "scalars"), "addcdiv": ("tensor2", "tensors2")}
# What reads the -inf of a mask, as softmaxes do, or only moves it; to others it is data.
READS_MASKS = frozenset(
    [
        *("add", "sub", "where", "masked_fill", "minimum", "maximum", "max", "min", "amax", "amin"),
        *("logsumexp", "logaddexp", "exp", "sigmoid", "clamp", "nan_to_num", "triu", "tril"),
        *("_to_copy", "to", "copy", "clone", "cat", "stack", "index", "index_select", "gather"),
        *("repeat", "contiguous", "_pin_memory", "constant_pad_nd", "index_put", "scatter", "sort"),
        "topk",
    ]
)
_SCALARS = frozenset(  # names of arguments whose Python numbers are data, not options
    ["self", "other", "value", "scalar", "exponent", "fill_value", "s", "scalars"]
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Facts about an operator, from its schema."""

    name: str  # such as "aten.add.Tensor"
    base: str  # such as "add" of aten._foreach_add_
    names: tuple[str, ...]  # names of its arguments
    writes: tuple[str, ...]  # names of arguments that it writes to
    reads_what_it_writes: bool  # whether their old values matter
    view: bool  # whether its output is a view of its input
    allocates: bool  # whether its output is uninitialised memory
    attention: bool  # whether it is a whole attention, including the softmax
    first_counts: bool  # whether only its first output should be finite
    collective: bool = False  # whether its values come from other ranks

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
    base = (name.split(".")[1] if name.count(".") else name).removeprefix("_foreach_")
    if schema is None:
        flex = name == "flex_attention"
        return Operation(f"higher_order.{name}", base, (), (), True, False, False, flex, flex)
    real = not name.startswith(("prim.", "aten.sym_"))  # what asks for a shape has no kernel
    composite = real and func.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )
    forward = "backward" not in base
    attention = ("scaled_dot_product" in base or "attention_forward" in base) and forward
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return Operation(
        name,
        base.rstrip("_"),
        tuple(a.name for a in schema.arguments),
        tuple(a.name for a in written),
        base not in _OVERWRITES and not any(a.is_out for a in written),
        # a composite such as aten.to may convert; transpose_ and its kin write a shape alone
        (func.is_view and not composite) or torch.Tag.inplace_view in func.tags,
        base in _ALLOCATES,
        attention,
        attention or (base.endswith("ctc_loss") and forward),  # then logarithms of probabilities
        name.startswith(_COLLECTIVES),
    )


def floating(value: Any) -> Iterator[Tensor]:
    """The floating and complex tensors with elements in memory in an argument or a result."""
    if isinstance(value, Tensor):
        real = value.is_floating_point() or value.is_complex()
        if real and value.numel() and not _without_memory(value):
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floating(item)
    elif isinstance(value, Mapping):
        yield from floating(list(value.values()))


def _is_whole(value: Any) -> bool:
    """Whether it is a tensor of integers or truth values, as a count that divides."""
    whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return whole and bool(value.numel()) and not _without_memory(value)


def _without_memory(tensor: Tensor) -> bool:
    """Whether it has only a shape, or stands for zeros or for another tensor."""
    return (
        tensor.device.type == "meta"
        or tensor._is_zerotensor()  # its address is 0
        or isinstance(tensor, FakeTensor)
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def stored(tensor: Tensor) -> Tensor:
    """The values that a tensor stores on this rank, dense and real."""
    value = dense(tensor)
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def not_finite(tensor: Tensor) -> Tensor:
    """Which elements of a tensor are NaN or infinite."""
    value = dense(tensor)
    return ~(value.float() if value.element_size() == 1 else value).isfinite()


class Counts(NamedTuple):
    """How many elements of a tensor, or number, are NaN, infinite or 0; and the largest value."""

    nan: int
    plus_inf: int
    minus_inf: int
    zero: int
    largest: float

    @property
    def inf(self) -> int:
        """The number of infinities of both signs."""
        return self.plus_inf + self.minus_inf


def count(value: Tensor | float) -> Counts:
    """Count the elements of a tensor or number; synchronises with the host."""
    v = stored(value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64))
    v = v.float() if v.element_size() == 1 else v
    numbers = [
        v.isnan().sum(),
        (v == math.inf).sum(),
        (v == -math.inf).sum(),
        (v == 0).sum(),
        torch.where(v.isfinite(), v, 0).abs().max(),
    ]
    *whole, largest = torch.stack([n.double() for n in numbers]).tolist()
    nan, plus, minus, zero = map(int, whole)
    return Counts(nan, plus, minus, zero, largest)


@dataclass(frozen=True, slots=True)
class Input:
    """One input of an operation, with its values before the operation."""

    name: str  # name of the argument
    original: Tensor | float  # the argument itself
    value: Tensor | float  # its values before the operation: a copy if it was written to
    counts: Counts  # of ``value``

    @property
    def argument(self) -> str:
        """The name without the number in a list."""
        return self.name.split("[")[0]


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
        if name in _SCALARS and _is_whole(value):
            found.append(Input(name, value, value.float(), count(value.float())))
        for number in value if isinstance(value, list | tuple) else [value]:
            real = isinstance(number, int | float) and not isinstance(number, bool)
            if real and name in _SCALARS:
                found.append(Input(name, float(number), float(number), count(float(number))))
    return found


def kind_of(
    known: Operation,
    given: Sequence[Input],
    outputs: Sequence[Tensor],
    *,
    nan: bool,
    meant: bool = False,
) -> Kind:
    """What makes outputs not finite that no suspect explains.

    ``nan``: it makes NaN, and not infinities alone; ``meant``: of infinities that were meant.
    """
    if not nan:
        return "x / 0 or log 0" if _at_pole(known, given, outputs) else "overflow"
    minus = any(i.counts.minus_inf for i in given)
    masks = known.softmax and not any(i.counts.plus_inf for i in given)
    rows = [stored(i.value) == -math.inf for i in given if isinstance(i.value, Tensor)]
    # but for an attention there is no other way to NaN from finite scores and -inf
    row = minus and (not known.attention or any(bool(row.all(dim=-1).any()) for row in rows))
    if masks and (known.base == "_masked_softmax" or row):
        return "fully masked row"
    if meant and not known.attention:
        return "inf - inf or 0 * inf"
    # a complex product is a sum of four, and a norm sums squares
    product = known.base in ("mul", "pow") and outputs[0].is_complex()
    most = torch.finfo(outputs[0].dtype).max ** 0.5
    product |= "norm" in known.base and any(i.counts.largest > most for i in given)
    sums = product or known.attention or known.base in (MATMULS | SUMS) - {"mean"}
    read = any(isinstance(i.value, Tensor) for i in given)
    return "overflow" if sums and read else "0 / 0 or invalid"


def _at_pole(known: Operation, given: Sequence[Input], outputs: Sequence[Tensor]) -> bool:
    """Whether some output is infinite where the divisor is 0, or the operand at a pole."""
    if known.base in ("_linalg_slogdet", "_ctc_loss"):  # the logarithm of 0
        return True
    if known.base in _DIVISORS:
        return divides_by_zero(known, given)
    poles = _POLES.get(known.base, ())
    name = "other" if "xlog" in known.base else "self"
    for operand, output in zip((i for i in given if i.argument == name), outputs, strict=False):
        at = sum(torch.as_tensor(operand.value) == pole for pole in poles)
        infinite = dense(output).isinf()
        if bool((infinite & torch.as_tensor(at, device=infinite.device).bool()).any()):
            return True
    return False


def divides_by_zero(known: Operation, given: Sequence[Input]) -> bool:
    """Whether the operation divides, and a divisor is 0."""
    return any(i.counts.zero for i in given if i.argument in _DIVISORS.get(known.base, ()))


def overflows_a_mask(outputs: Sequence[Tensor], given: Sequence[Input]) -> bool:
    """Whether infinities are those of an additive mask that was added twice or cast too narrow.

    They are -inf alone, and the largest value of an input is a format's largest, to 1 %.
    """
    most = [torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    near = any(abs(i.counts.largest / m - 1) < 0.01 for i in given for m in most)
    return near and not any(bool((stored(output) == math.inf).any()) for output in outputs)


# Labels of values that are not finite, besides the numbers of suspects, from 1.
MEANT = 0
OUTSIDE = -1  # -inf that came from outside, which may be a mask
UNWRITTEN = -2  # memory that nothing has written
NEWS = -3  # from outside, and no mask: a suspect that is not numbered yet
FIRST_MEANT = -4  # from here downward: infinities that were meant, by the place that wrote them


@dataclass(frozen=True, slots=True)
class Call:
    """One run of an operation."""

    func: Any
    known: Operation
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    before: Mapping[int, Tensor]  # copies of what it has written, as it was, by the tensor's id
    written: Sequence[Tensor]

    def outputs(self, result: Any, written: Sequence[Tensor]) -> list[Tensor]:
        """What should be finite of what it returned and wrote."""
        every = list({id(t): t for t in (*floating(result), *written)}.values())
        return every[:1] if self.known.first_counts else every

    def sources(
        self, bad: Tensor, labels: Mapping[int, Tensor], given: Sequence[Input]
    ) -> list[tuple[int | None, Tensor]]:
        """Where elements that are not finite come from: labels, or None for the operation itself.

        ``bad`` are those of all outputs, one after the other, and ``labels`` those of the inputs,
        by the tensor's id. Later sources hold where several are given for an element.
        """
        present: set[int] = set()
        for i in given:
            if id(i.original) in labels and isinstance(i.value, Tensor):
                present.update(labels[id(i.original)][not_finite(i.value)].tolist())
        # an early suspect explains an element better than a late one
        order = sorted(present, key=lambda label: (label > 0, label == NEWS, -label))
        if len(order) == 1 and bool(bad.all()):
            return [(order[0], bad)]
        made = self._again(bad, labels, None) if order else bad
        if made is None:
            return [(order[-1], bad)]
        found = [(None, made), *((label, bad & ~made) for label in order[-1:])]
        for label in order if len(order) > 1 or bool(made.any()) else ():
            reached = self._again(bad, labels, label)
            found += [] if reached is None else [(label, reached)]
        return found

    def _again(self, bad: Tensor, labels: Mapping[int, Tensor], keep: int | None) -> Tensor | None:
        """What is not finite of finite inputs, or what one label's elements reach.

        All that is not finite is replaced, or all but the elements of that label: by 0, and then by
        0.5, of which a logarithm and a division are finite. None: it cannot run on copies.
        """
        tags = getattr(self.func, "tags", ())
        if not self.known.name.startswith("aten.") or torch.Tag.nondeterministic_seeded in tags:
            return None
        for fill in (0.0, 0.5):
            copies: dict[int, Tensor] = {}

            def copied(leaf: Any, fill: float = fill, copies: dict[int, Tensor] = copies) -> Any:
                if not isinstance(leaf, Tensor) or not any(True for _ in floating(leaf)):
                    return leaf
                value = self.before.get(id(leaf), leaf)
                kept = not_finite(value)
                label = labels.get(id(leaf), kept * MEANT)
                kept = ~kept if keep is None else kept & (label == keep)
                return copies.setdefault(id(leaf), torch.where(kept, value, fill))

            try:
                args, kwargs = tree_map(copied, (self.args, dict(self.kwargs)))
                written = [copies[id(tensor)] for tensor in self.written]
                bad = bad & bad_elements(self.outputs(self.func(*args, **kwargs), written))
            except (RuntimeError, NotImplementedError, TypeError):  # sparse, quantised, distributed
                return None
        return bad


def bad_elements(tensors: Sequence[Tensor]) -> Tensor:
    """Which elements of tensors, one after the other, are NaN or infinite."""
    masks = [not_finite(tensor).reshape(-1) for tensor in tensors]
    return torch.cat([mask.to(masks[0].device) for mask in masks])


class Flow:
    """Which suspect each value that is not finite descends from: labels of a storage's elements."""

    def __init__(self) -> None:
        # Weak references keep the key of freed memory from being reused.
        self._labels: dict[int, tuple[StorageWeakRef, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """The labels of a tensor's elements; None if nothing seen wrote it."""
        value = stored(tensor)
        labels = self._labels.get(value.untyped_storage()._cdata, (None, None))[1]
        if labels is None:
            return None
        if labels.numel() * value.element_size() != value.untyped_storage().nbytes():
            labels = labels.max().expand(value.shape)  # it is viewed in another dtype
        else:
            place = value.shape, value.stride(), int(value.storage_offset())
            labels = labels.contiguous().as_strided(*place)
        return labels.amax(-1) if tensor.is_complex() else labels

    def write(self, labels: int | Tensor, *tensors: Tensor) -> None:
        """Label what an operation has written; only elements that are not finite matter."""
        for tensor in tensors:
            value = stored(tensor)
            storage = value.untyped_storage()
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            new = torch.as_tensor(labels, dtype=torch.int32, device=value.device)
            table = self._labels.get(ref.cdata, (None, None))[1]
            elements = storage.nbytes() // value.element_size()
            if not new.dim() and (table is None or value.numel() == elements):
                table = new.clone().expand(elements)  # which takes no memory
            else:
                if table is None or table.numel() != elements:
                    table = torch.full((elements,), MEANT, dtype=torch.int32, device=value.device)
                table = table.contiguous()
                view = table.as_strided(value.shape, value.stride(), int(value.storage_offset()))
                view.copy_(new.unsqueeze(-1) if new.dim() and tensor.is_complex() else new)
            self._labels[ref.cdata] = ref, table
        if len(self._labels) % 1024 == 0:
            rows = self._labels.items()
            self._labels = {k: row for k, row in rows if not row[0].expired()}  # type: ignore[no-untyped-call]


def first_of(labels: Tensor) -> int:
    """The first suspect among labels; if there is none, the lowest label, or :data:`MEANT`."""
    suspects = labels[labels > MEANT]
    found = suspects if suspects.numel() else labels
    return int(found.min()) if found.numel() else MEANT
