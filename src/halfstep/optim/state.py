"""One parameter's optimizer state: its keys, its memory layout and conversion between formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.optim.moments import BLOCK, BROKEN, DTYPES, Moments, decode, encode, zeros
from halfstep.precision.masters.rounding import REMAINDER, ROUNDING, Update, random_bits

CODES = "_codes"  # not the moment's own name, as ``torch.optim`` would take codes for values
TOPS = "_tops"
FELL_BACK = "moments_fell_back"
"""The key of the step at which a parameter's 8-bit moments became bf16: see :func:`is_due`."""
_SIGNED = ("exp_avg", "momentum_buffer")


def tops_of(moment: str) -> str:
    """The key of an 8-bit moment's block tops."""
    return moment + TOPS


def stored_moment(state: Mapping[str, Any], name: str) -> tuple[Tensor | None, Tensor | None]:
    """A stored moment, as values or 8-bit codes (or None), and the codes' block tops (or None).

    Codes under the moment's own name, as in older versions and checkpoint files, are found too.
    """
    values = state.get(name + CODES)
    return (state.get(name) if values is None else values), state.get(tops_of(name))


def new_step(count: float) -> Tensor:
    """A step counter: a tensor as in ``torch.optim``, but fp64, as fp32 stops at 2^24 steps."""
    return torch.tensor(count, dtype=torch.float64, device="cpu")


def zero_moment(name: str, parameter: Tensor, moments: Moments) -> dict[str, Tensor]:
    """The state entries of a moment of zeros, with block tops if it is 8-bit."""
    values, tops = zeros(parameter, moments)
    return _entries(name, values, tops if moments == "8bit" else None)


def _entries(name: str, values: Tensor, tops: Tensor | None) -> dict[str, Tensor]:
    return {name: values} if tops is None else {name + CODES: values, tops_of(name): tops}


@torch.no_grad()
def convert(
    names: Sequence[str],
    data: Tensor,
    entry: Mapping[str, Any],
    *,
    update: Update,
    moments: Moments,
    seed: int,
    stream: int,
) -> dict[str, Any]:
    """Convert a parameter's saved state to another format.

    Args:
        names: The names of the optimizer's moments; the first is signed.
        data: The parameter.
        entry: The saved state: moments in any format, ``step`` and perhaps a remainder.
        update: The rounding mode to convert to.
        moments: The format of moments to convert to.
        seed: Seed of the random bits.
        stream: This parameter's random stream.
    """
    state: dict[str, Any] = {}
    if entry.get(FELL_BACK) is not None and moments == "8bit":
        moments = "bf16"  # this tensor has fallen back, since 8 bits do not hold its spread
        state[FELL_BACK] = new_step(float(entry[FELL_BACK]))
    if any(stored_moment(entry, name)[0] is not None for name in names):
        # torch.optim.SGD saves no step; 1 says that its momentum has begun.
        state["step"] = new_step(float(entry.get("step", 1)))
        draw = partial(random_bits, seed, int(state["step"]), data.numel(), stream=2 * stream + 1)
        for i, name in enumerate(names):
            values, tops = stored_moment(entry, name)
            where = f"saved {name} of parameter {stream}"
            values = _of_shape(where, values, data)
            _check_tops(where, values, tops)
            kept, tops = _moment(values, tops, moments, data, draw, signed=i == 0)
            state |= _entries(name, kept, tops)
    held = entry.get(REMAINDER)
    if held is not None and held.dtype == ROUNDING[update].remainder_dtype:
        held = _of_shape(f"saved remainder of parameter {stream}", held, data)
        state[REMAINDER] = _like(flat(held, data), data)
    return state


def _of_shape(what: str, saved: Any, data: Tensor) -> Tensor:
    """A saved tensor on the parameter's device, if it has the parameter's shape."""
    if not _is_plain(saved) or saved.shape != data.shape:
        found = f"shape {tuple(saved.shape)}" if _is_plain(saved) else f"no numbers: {saved!r:.60}"
        raise PrecisionError(
            f"the {what} has {found}, the parameter shape {tuple(data.shape)}: it is from another "
            "optimizer or model"
        )
    plain: Tensor = saved if is_dense(saved) else saved.contiguous()
    return plain.to(data.device)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def fits(state: Mapping[str, Any], data: Tensor) -> bool:
    """Whether a step can be taken on the tensors of a parameter's state as they are."""
    if not all(map(_is_plain, state.values())):
        return False
    step, layout = state.get("step"), (data.shape, data.stride())
    if step is not None and (step.dim() or step.dtype != torch.float64):
        return False
    other = ("step", FELL_BACK, *(key for key in state if key.endswith(TOPS)))
    return all((v.shape, v.stride()) == layout for k, v in state.items() if k not in other)


def _check_tops(what: str, codes: Tensor, tops: Tensor | None) -> None:
    blocks = -(-codes.numel() // BLOCK) if codes.dtype == torch.uint8 else None
    found = None if tops is None else tuple(tops.shape)
    if found != (None if blocks is None else (blocks,)):
        raise PrecisionError(
            f"the {what} is {codes.dtype} with block tops {found}; 8-bit moments have "
            f"{-(-codes.numel() // BLOCK)}, others none: the state is damaged"
        )


def _moment(
    codes: Tensor,
    tops: Tensor | None,
    moments: Moments,
    data: Tensor,
    draw: Callable[..., Tensor],
    *,
    signed: bool,
) -> tuple[Tensor, Tensor | None]:
    """A stored moment converted to another format, and its block tops if it has some."""
    if codes.dtype == DTYPES[moments] and (tops is None or codes.stride() == data.stride()):
        kept = _like(flat(codes, data), data)
        return kept, None if tops is None else tops.to(data.device, copy=True)
    values = decode(flat(codes, codes), tops, signed=signed).as_strided(codes.shape, codes.stride())
    bits = None if moments == "fp32" else draw(device=data.device)
    encoded, fresh = encode(flat(values, data), moments, bits, signed=signed, again=True)
    return _like(encoded, data), fresh


def _like(values: Tensor, data: Tensor) -> Tensor:
    """Flat values in the shape and memory order of a parameter, in new memory."""
    own = torch.empty_strided(data.shape, data.stride(), dtype=values.dtype, device=data.device)
    flat(own, own).copy_(values)
    return own


def as_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose 8-bit moments are bf16 values, which hold them exactly, by torch's names."""
    state = {}
    for key, value in entry.items():
        name = key.removesuffix(CODES)
        if (tops := entry.get(tops_of(name))) is not None:
            values = decode(flat(value, value), tops, signed=name in _SIGNED)
            state[name] = values.as_strided(value.shape, value.stride()).to(torch.bfloat16)
        elif not key.endswith(TOPS):
            state[key] = value
    return state


def in_dtype(entry: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A copy of a state as torch.optim has it, whose moments are of a dtype."""
    kept = {key: value for key, value in as_values(entry).items() if key != FELL_BACK}
    return {key: v.to(torch.float32 if key == "step" else dtype) for key, v in kept.items()}


# The memory layout of state, and how it is passed to kernels.


@dataclass(slots=True)
class StepTask:
    """One tensor's part of a step; every tensor is on one device, and but the gradient flat."""

    weight: Tensor  # fp32 or bf16, shape (n,); updated in place, as are the next three
    remainder: Tensor | None  # the bits that the weight cannot hold, shape (n,), or None
    moments: tuple[Tensor, ...]  # codes, shape (n,) each, in the order of ``Algorithm.moments``
    # the 8-bit moments' block tops, uint8 of shape (ceil(n / 128),); 0 elements otherwise
    tops: tuple[Tensor, ...]
    gradient: Tensor  # fp32, bf16 or fp16, n elements in the order of the weight's; read only
    stream: int  # number of this tensor's random streams

    @property
    def flat_gradient(self) -> Tensor:
        """The gradient in shape (n,)."""
        return self.gradient.detach().as_strided((self.gradient.numel(),), (1,))


@dataclass(slots=True)
class Batch:
    """The tasks of one kernel call, which share their dtypes and every plan that they get."""

    tasks: list[StepTask]
    native: Any = None  # the addresses of all but the gradients, in the form that a kernel keeps
    # What a kernel writes behind torch's back; it calls ``increment_version`` of this afterwards.
    # Otherwise a step between a forward and its backward would silently give wrong gradients, where
    # torch's own optimizers raise "modified by an inplace operation".
    written: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        parts = ((t.weight, t.remainder, *t.moments, *t.tops) for t in self.tasks)
        self.written = [tensor for part in parts for tensor in part if tensor is not None]


def parts_of(tensor: Tensor, size: int) -> Iterator[slice]:
    """Slices of ``size`` elements, which a CPU's caches hold; elsewhere of 4 million."""
    size = size if tensor.device.type == "cpu" else 1 << 22
    return (slice(start, start + size) for start in range(0, tensor.numel(), size))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected and tensor.numel():
            return False
        expected *= size
    return True


def dense(parameter: Tensor) -> Tensor:
    """The parameter's data, or a dense copy if it is part of a larger tensor."""
    data = parameter.detach()
    return data if data.is_contiguous() or is_dense(data) else data.clone()


def flat(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor flattened in the memory order of ``like``; a view if their strides agree.

    Args:
        tensor: A tensor of the same shape as ``like``.
        like: A dense tensor (:func:`is_dense`), in any order of dimensions.
    """
    if tensor.stride() != like.stride():
        moved = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = moved.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def write_back(parameter: Tensor, data: Tensor) -> None:
    """Copy stepped weights back to the parameter if they were stepped in a dense copy."""
    if data.data_ptr() != parameter.data_ptr():
        layout = dense(parameter)
        parameter.copy_(data.as_strided(layout.shape, layout.stride()))


# From 8 bits to bf16, where 8 bits do not hold a second moment's spread.
#
# A block of 128 elements shares a window of 32 binades below its largest second moment: a range of
# gradients down to 2^-16 of the block's largest. A smaller second moment is stored as the window's
# lowest number, which is too large, so the element's updates, divided by its root, are too small,
# by any factor (measured: 240 at a spread of 10^6). First moments have no such floor; they are
# right on average. So each tensor is checked in its steps 8, 16, 32, 64, 96, ...: an element is
# counted if its gradient is not 0 and its second moment is at the floor. If at least one element in
# 16,384 is, or a single one in a smaller tensor, both moments of the tensor become bf16 for good.
# Why this threshold, and whole tensors: docs/decisions/0012-moments-that-fall-back.md.
#
# All of it reads stored codes, which have the same bits in every kernel, by torch's own operations
# on elements, so the decision and its result are the same everywhere.

FIRST, EVERY = 8, 32
"""A tensor is first checked after FIRST steps, then at each doubling, then every EVERY steps.

Before that, an element whose first gradients are small by chance would be counted.
"""
SHARE = 2.0**-14
"""The share of elements below their windows at which a tensor falls back to bf16."""
_CHECKED = 512 * BLOCK  # elements per chunk: temporaries of less than 1 MB
_FLOOR = 1  # the lowest code that is not 0


def is_due(step: int) -> bool:
    """Whether a tensor is checked after this step of its own, counted from 1."""
    doubled = FIRST <= step < EVERY and step & (step - 1) == 0
    return doubled or (step > 0 and step % EVERY == 0)


def elements_below(batch: Batch) -> Tensor:
    """For each task, after its step, how many elements that have a gradient are at the floor.

    An int32 tensor on the tasks' device, for which the host need not wait.
    """
    counts = torch.zeros(len(batch.tasks), dtype=torch.int32, device=batch.tasks[0].weight.device)
    for count, task in zip(counts, batch.tasks, strict=True):
        for part in parts_of(task.weight, _CHECKED):
            below = _below(task, part)
            if below is not None:
                count += below.sum()
    return counts


def wide_moments(
    task: StepTask, multiplier: float | Tensor, correction: float
) -> tuple[Tensor, Tensor]:
    """Both moments of a task in bf16, which holds every 8-bit number exactly.

    A second moment at the floor restarts from the current gradient: its true value is lost, and
    the floor would take thousands of steps to decay.

    Args:
        task: A task with 8-bit moments, after its step.
        multiplier: The factor of the gradient.
        correction: ``1 - beta2**step``: the second moment after ``step`` steps with a constant
            gradient, divided by that gradient's square.

    Returns:
        bf16, of shape (n,) each.
    """
    first, second = (torch.empty_like(codes, dtype=torch.bfloat16) for codes in task.moments)
    smallest = torch.finfo(torch.bfloat16).tiny  # not 0: the update divides by the root
    for part in parts_of(task.weight, _CHECKED):
        blocks = slice(part.start // BLOCK, part.stop // BLOCK)
        m, v = (
            decode(codes[part], tops[blocks], signed=i == 0)
            for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True))
        )
        g = task.flat_gradient[part].float() * multiplier
        anew = ((g * correction) * g).clamp_(min=smallest)
        first[part].copy_(m)
        below = _below(task, part)
        second[part].copy_(v if below is None else torch.where(below, torch.minimum(v, anew), v))
    return first, second


def _below(task: StepTask, part: slice) -> Tensor | None:
    """A mask of the part's elements that are below their windows; None if there are none."""
    codes = task.moments[1][part]
    # Usually there are none. On a CPU a minimum of bytes, in which 0 - 1 wraps to 255, finds that
    # out ten times as fast as a comparison.
    if codes.device.type == "cpu" and int((codes - _FLOOR).amin()) > 0:
        return None
    below = (codes == _FLOOR) & (task.flat_gradient[part] != 0)
    # In a block with a NaN all elements are lost, and the codes are meaningless.
    whole = task.tops[1][part.start // BLOCK : part.stop // BLOCK] != BROKEN
    return below & whole.repeat_interleave(BLOCK)[: below.numel()]
