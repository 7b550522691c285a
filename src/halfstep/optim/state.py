"""One parameter's optimizer state in any format, and its way from one format to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.optim.kernel import flat
from halfstep.optim.moments import BLOCK, Moments, decode, encode, moment_dtype, zeros
from halfstep.optim.weights import REMAINDER_DTYPES
from halfstep.precision.policy import Update
from halfstep.precision.rounding import random_bits

REMAINDER = "remainder"
TOPS = "_tops"
_SIGNED = ("exp_avg", "momentum_buffer")


def tops_of(moment: str) -> str:
    """The key of an 8-bit moment's block tops."""
    return moment + TOPS


@dataclass(frozen=True, slots=True)
class Form:
    """How one parameter's state is kept.

    Attributes:
        update: How the weight is kept.
        moments: How the moments are kept.
        seed: Of the random bits.
        stream: Which random bits are this parameter's.
    """

    update: Update
    moments: Moments
    seed: int
    stream: int


def zero_moment(name: str, parameter: Tensor, moments: Moments) -> dict[str, Tensor]:
    """A moment of zeros, with its block tops where it has some."""
    values, tops = zeros(parameter, moments)
    return {name: values, tops_of(name): tops} if moments == "8bit" else {name: values}


@torch.no_grad()
def convert(
    names: Sequence[str], form: Form, data: Tensor, entry: Mapping[str, Any]
) -> dict[str, Any]:
    """A saved state in another format.

    Args:
        names: The moments that the optimizer has; the first is signed.
        form: The wanted format.
        data: The parameter.
        entry: The saved state: moments in any format, ``step`` and perhaps a remainder.

    Raises:
        PrecisionError: If a moment is missing or of another shape.
    """
    state: dict[str, Any] = {}
    if any(name in entry for name in names):
        # torch.optim.SGD saves no step; its momentum is under way all the same.
        state["step"] = torch.tensor(float(entry.get("step", 1)))
        for i, name in enumerate(names):
            values = entry.get(name)
            if values is None or values.shape != data.shape:
                raise PrecisionError(
                    f"the saved state of parameter {form.stream} has no {name} of shape "
                    f"{tuple(data.shape)}: it is of another optimizer or model"
                )
            state |= _moment(name, form, data, entry, int(state["step"]), signed=i == 0)
    held = entry.get(REMAINDER)
    if held is not None and held.dtype == REMAINDER_DTYPES[form.update]:
        if held.shape != data.shape:
            raise PrecisionError(
                f"the saved remainder of parameter {form.stream} has shape {tuple(held.shape)}, "
                f"the parameter {tuple(data.shape)}: it is of another model"
            )
        state[REMAINDER] = _like(flat(held.to(data.device), data), data)
    return state


def _moment(
    name: str, form: Form, data: Tensor, entry: Mapping[str, Any], step: int, *, signed: bool
) -> dict[str, Tensor]:
    codes, tops = entry[name].to(data.device), entry.get(tops_of(name))
    blocks = -(-data.numel() // BLOCK)
    if (codes.dtype == torch.uint8) != (tops is not None) or (
        tops is not None and tops.shape != (blocks,)
    ):
        raise PrecisionError(
            f"the saved {name} of parameter {form.stream} is {codes.dtype} with block tops "
            f"{None if tops is None else tuple(tops.shape)}; 8-bit moments have {blocks}, others "
            "none: the state is damaged"
        )
    kept = codes.dtype == moment_dtype(form.moments)
    if kept and (tops is None or codes.stride() == data.stride()):
        stored, tops = flat(codes, data), tops
    else:
        values = decode(flat(codes, codes), tops, signed=signed).as_strided(
            codes.shape, codes.stride()
        )
        bits = random_bits(
            form.seed, step, data.numel(), stream=2 * form.stream + 1, device=data.device
        )
        stored, tops = encode(flat(values, data), form.moments, bits, signed=signed)
    moment = {name: _like(stored, data)}
    if tops is not None:
        moment[tops_of(name)] = tops.to(data.device, copy=True)
    return moment


def _like(values: Tensor, data: Tensor) -> Tensor:
    """Flat values in the shape and memory order of a parameter, in memory of their own."""
    own = torch.empty_strided(data.shape, data.stride(), dtype=values.dtype, device=data.device)
    flat(own, own).copy_(values)
    return own


def in_dtype(entry: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A saved state with its moments in a floating dtype, as ``torch.optim`` keeps them."""
    state = {}
    for name, value in entry.items():
        if name.endswith(TOPS):
            continue
        if name == "step":
            state[name] = value
        else:
            values = decode(flat(value, value), entry.get(tops_of(name)), signed=name in _SIGNED)
            state[name] = values.as_strided(value.shape, value.stride()).to(dtype)
    return state
