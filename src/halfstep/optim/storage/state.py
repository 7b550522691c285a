"""One parameter's optimizer state: its keys, its memory layout and conversion between formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.errors import PrecisionError
from halfstep.optim.storage.moments import BLOCK, Moments, decode, encode, moment_dtype, zeros
from halfstep.precision.masters.rounding import Update, random_bits, rounding_mode

REMAINDER = "remainder"
CODES = "_codes"
TOPS = "_tops"
FELL_BACK = "moments_fell_back"
"""The key of the step at which a parameter's 8-bit moments became bf16; see fallback.py."""
_SIGNED = ("exp_avg", "momentum_buffer")


def codes_of(moment: str) -> str:
    """The key of an 8-bit moment's codes.

    It is not the moment's own name, because ``torch.optim`` would take codes for values.
    """
    return moment + CODES


def tops_of(moment: str) -> str:
    """The key of an 8-bit moment's block tops."""
    return moment + TOPS


def stored_moment(state: Mapping[str, Any], name: str) -> tuple[Tensor | None, Tensor | None]:
    """A stored moment, as values or 8-bit codes (or None), and the codes' block tops (or None).

    Codes under the moment's own name, as in older versions and checkpoint files, are found too.
    """
    values = state.get(codes_of(name))
    return (state.get(name) if values is None else values), state.get(tops_of(name))


def new_step(count: float) -> Tensor:
    """A step counter: a tensor as in ``torch.optim``, but fp64, as fp32 stops at 2^24 steps."""
    return torch.tensor(count, dtype=torch.float64, device="cpu")


def zero_moment(name: str, parameter: Tensor, moments: Moments) -> dict[str, Tensor]:
    """The state entries of a moment of zeros, with block tops if it is 8-bit."""
    values, tops = zeros(parameter, moments)
    return _entries(name, values, tops if moments == "8bit" else None)


def _entries(name: str, values: Tensor, tops: Tensor | None) -> dict[str, Tensor]:
    return {name: values} if tops is None else {codes_of(name): values, tops_of(name): tops}


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

    Raises:
        PrecisionError: If a moment is missing or of another shape.
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
            if values is None or values.shape != data.shape:
                raise PrecisionError(
                    f"the saved state of parameter {stream} has no {name} of shape "
                    f"{tuple(data.shape)}: it is from another optimizer or model"
                )
            _check_tops(f"{name} of parameter {stream}", values, tops)
            kept, tops = _moment(values.to(data.device), tops, moments, data, draw, signed=i == 0)
            state |= _entries(name, kept, tops)
    held = entry.get(REMAINDER)
    if held is not None and held.dtype == rounding_mode(update).remainder_dtype:
        if held.shape != data.shape:
            raise PrecisionError(
                f"the saved remainder of parameter {stream} has shape {tuple(held.shape)}, "
                f"the parameter {tuple(data.shape)}: it is from another model"
            )
        state[REMAINDER] = _like(flat(held.to(data.device), data), data)
    return state


def _check_tops(what: str, codes: Tensor, tops: Tensor | None) -> None:
    blocks = -(-codes.numel() // BLOCK) if codes.dtype == torch.uint8 else None
    found = None if tops is None else tuple(tops.shape)
    if found != (None if blocks is None else (blocks,)):
        raise PrecisionError(
            f"the saved {what} is {codes.dtype} with block tops {found}; 8-bit moments have "
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
    if codes.dtype == moment_dtype(moments) and (tops is None or codes.stride() == data.stride()):
        kept = _like(flat(codes, data), data)
        return kept, None if tops is None else tops.to(data.device, copy=True)
    values = decode(flat(codes, codes), tops, signed=signed).as_strided(codes.shape, codes.stride())
    bits = None if moments == "fp32" else draw(device=data.device)
    encoded, fresh = encode(flat(values, data), moments, bits, signed=signed)
    return _like(encoded, data), fresh


def _like(values: Tensor, data: Tensor) -> Tensor:
    """Flat values in the shape and memory order of a parameter, in new memory."""
    own = torch.empty_strided(data.shape, data.stride(), dtype=values.dtype, device=data.device)
    flat(own, own).copy_(values)
    return own


def in_dtype(entry: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A saved state with its moments in a floating dtype, as ``torch.optim`` keeps them."""
    state = {}
    for key, value in entry.items():
        if key.endswith(TOPS) or key == FELL_BACK:
            continue
        if key == "step":
            state[key] = value.to(torch.float32)
        else:
            name = key.removesuffix(CODES)
            values = decode(flat(value, value), entry.get(tops_of(name)), signed=name in _SIGNED)
            state[name] = values.as_strided(value.shape, value.stride()).to(dtype)
    return state


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
    native: Any = None  # the addresses of the others in the form of the compiled kernel

    @property
    def flat_gradient(self) -> Tensor:
        """The gradient in shape (n,)."""
        return self.gradient.detach().as_strided((self.gradient.numel(),), (1,))


def mark_written(tasks: Iterable[StepTask]) -> None:
    """Tell autograd that a kernel has written these tasks' tensors behind torch's back.

    Without it, a step between a forward and its backward would silently give wrong gradients,
    where torch's own optimizers raise "modified by an inplace operation".
    """
    written: list[Tensor] = []
    for task in tasks:
        written += (task.weight, *task.moments, *task.tops)
        if task.remainder is not None:
            written.append(task.remainder)
    increment_version(written)


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
