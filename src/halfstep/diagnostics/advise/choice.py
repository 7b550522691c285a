"""Chooses the cheapest formats whose errors stay below a limit together.

Errors of products add up, as those of independent roundings do, and so do times: a knapsack with
several choices for each item. It is solved exactly, by keeping of all partial choices those that no
other beats in both time and error.

The time of a product is its floating-point operations over the rate of its format on the tensor
cores. Rates are peaks, relative to bf16; converting operands is not counted, and neither is
anything that is no linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfstep.errors import PrecisionError

_FP8 = {"fp8": 2.0, "fp8-block": 2.0}
_HOPPER = {"fp32": 0.068, "bf16": 1.0, "fp16": 1.0, **_FP8}
_MX = {"mxfp8": 2.0, "mxfp8-e5m2": 2.0}
_NVFP4 = dict.fromkeys(("nvfp4", "nvfp4-nearest", "nvfp4-unmixed"), 4.0)
RATES: Mapping[str, Mapping[str, float]] = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": {**_HOPPER, "fp32": 0.033, **_MX, **_NVFP4},
}
"""Rates of dense products by device and format, relative to bf16; 1 for those that are not here.

**Source:** NVIDIA's data sheets: H100 and H200 SXM 989 TFLOP/s in bf16, 1,979 in fp8, 67 in fp32;
HGX B200, for each GPU, 2,250 in bf16, 4,500 in fp8, 9,000 in fp4, 75 in fp32.
"""
_KEPT_STATES = 4096
"""How many partial choices are kept; beyond, errors are rounded up to that share of the limit."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run an item: its format, time (in operations at the rate of bf16) and error."""

    format: str
    time: float
    error: float


_State = tuple[float, float, int, Option | None]
"""Time and error so far, which state before it grew from, and by which option."""


def rates_of(device: str) -> Mapping[str, float]:
    """The rates of a device.

    Raises:
        PrecisionError: If it is not in the table.
    """
    if device not in RATES:
        raise PrecisionError(f"device {device!r} has no rates; allowed: {', '.join(RATES)}")
    return RATES[device]


def cheapest(items: Sequence[Sequence[Option]], limit: float) -> list[Option] | None:
    """The choice of one option for each item that takes least time with errors up to a limit.

    Args:
        items: For each item, what may be chosen.
        limit: What the chosen errors may add up to; infinity: anything finite.

    Returns:
        One option for each item, or None where no choice stays below the limit. Of equal times, the
        one with less error.
    """
    states: list[_State] = [(0.0, 0.0, -1, None)]
    columns = [states]
    unit = limit / _KEPT_STATES if 0 < limit < math.inf else 0.0
    for options in items:
        grown: list[_State] = [
            (time + option.time, error + option.error, number, option)
            for number, (time, error, _, _) in enumerate(states)
            for option in options
            if option.error < math.inf and error + option.error <= limit
        ]
        states = _unbeaten(grown)
        if unit and len(states) > _KEPT_STATES:
            states = _unbeaten([(t, math.ceil(e / unit) * unit, n, o) for t, e, n, o in states])
        if not states:
            return None
        columns.append(states)
    at, chosen = 0, []  # the first state takes least time
    for column in reversed(columns[1:]):
        _, _, before, option = column[at]
        assert option is not None
        chosen.append(option)
        at = before
    return chosen[::-1]


def _unbeaten(
    states: list[_State],
) -> list[_State]:
    """The states that no other beats in time and error, the quickest first."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept
