"""Floor, ceiling, hysteresis and skip limit of a loss scaler, and what a saved one may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import PrecisionError
from halfstep.precision.scaling.loss_scale import Limits

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number. **Source:** IEEE 754 binary32; 1/S is infinite in fp32 for every
S up to 2^-128, and torch then turns finite gradients into NaN and applies them."""
LARGEST_SCALE = 2.0**126
"""The largest scale whose reciprocal is a normal fp32 number."""
STRICT_FLOOR, STRICT_CEILING = 1.0, 2.0**24
"""What ``strict`` means. **Source:** as :class:`halfstep.LossScaleConfig` (Megatron-Core, Apex)."""

EXTRA_KEY = "halfstep"
"""Where a state dict keeps what torch's scaler does not know, and ignores."""
_EXTRA = {
    "hysteresis_left": int,
    "skipped_total": int,
    "skipped_in_a_row": int,
    "calibrating": bool,
    "calibrate_next": bool,
    "losses": Mapping,
}


@dataclass(frozen=True, slots=True)
class Guard:
    """Between which bounds a scale moves, and when a run stops."""

    floor: float
    ceiling: float
    hysteresis: int
    max_consecutive_skips: int | None

    def limits(self, growth: float, backoff: float, interval: int) -> Limits:
        """How the scale moves with torch's factors."""
        return Limits(growth, backoff, interval, self.floor, self.ceiling, self.hysteresis)

    def require(self, scale: object, where: str) -> None:
        """Refuse a scale outside the bounds.

        Raises:
            PrecisionError: If it is no number between floor and ceiling.
        """
        if not isinstance(scale, int | float) or not self.floor <= scale <= self.ceiling:
            raise PrecisionError(
                f"{where} is {scale!r}; allowed: numbers from {self.floor:g} (min_scale) to "
                f"{self.ceiling:g} (max_scale). Give another scale, or other bounds"
            )


def make_guard(
    *,
    strict: bool,
    min_scale: float | None,
    max_scale: float | None,
    hysteresis: int,
    max_consecutive_skips: int | None,
    auto: bool,
) -> Guard | None:
    """The bounds that the options describe, or None if none of them is on.

    Raises:
        PrecisionError: For a value that no scaler can run with.
    """
    for name, count in (
        ("hysteresis", hysteresis),
        ("max_consecutive_skips", max_consecutive_skips),
    ):
        optional = name == "max_consecutive_skips" and count is None
        if not optional and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise PrecisionError(f"{name} is {count!r}; allowed: integers >= 1")
    bounds = []
    defaults = (STRICT_FLOOR, STRICT_CEILING) if strict else (SMALLEST_SCALE, LARGEST_SCALE)
    for name, given, default in zip(
        ("min_scale", "max_scale"), (min_scale, max_scale), defaults, strict=True
    ):
        value = default if given is None else given
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not SMALLEST_SCALE <= value <= LARGEST_SCALE:
            raise PrecisionError(
                f"{name} is {value!r}; allowed: numbers from 2^-126 to 2^126, whose reciprocals "
                "are normal fp32 numbers"
            )
        bounds.append(torch.tensor(value, dtype=torch.float32).item())  # as the scale is stored
    if bounds[0] > bounds[1]:
        raise PrecisionError(
            f"min_scale {bounds[0]:g} is above max_scale {bounds[1]:g}; allowed: at most equal"
        )
    options = (min_scale, max_scale, max_consecutive_skips)
    if not strict and not auto and hysteresis == 1 and options == (None, None, None):
        return None
    return Guard(bounds[0], bounds[1], hysteresis, max_consecutive_skips)


def check_factors(growth_factor: float, backoff_factor: float) -> None:
    """Refuse factors that would take the scale out of the numbers.

    Raises:
        PrecisionError: If the growth is not finite or the back-off not above 0.
    """
    if not math.isfinite(growth_factor) or not backoff_factor > 0:
        raise PrecisionError(
            f"growth_factor is {growth_factor!r} and backoff_factor {backoff_factor!r}; allowed "
            "with halfstep's options: a finite growth and a back-off above 0"
        )


def check_state(state: Mapping[str, Any], guard: Guard | None, where: str = "saved scale") -> None:
    """Refuse a state that cannot be continued, before anything is changed.

    Raises:
        PrecisionError: If the scale is out of bounds or the extra entry is damaged.
    """
    if guard is not None and "scale" in state:
        guard.require(state["scale"], where)
    extra = state.get(EXTRA_KEY)
    if extra is None:
        return
    fits = isinstance(extra, Mapping) and set(extra) == set(_EXTRA)
    if not fits or not all(isinstance(extra[key], kind) for key, kind in _EXTRA.items()):
        raise PrecisionError(
            f"the saved scaler state's {EXTRA_KEY!r} entry is damaged: {extra!r}; allowed: what "
            f"state_dict() gives, with {', '.join(_EXTRA)}"
        )
    for name, loss in extra["losses"].items():
        check_state(loss, guard, f"saved scale of loss {name!r}")
