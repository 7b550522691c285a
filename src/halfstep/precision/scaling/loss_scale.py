"""Loss scaling: none, static and dynamic.

The smallest positive fp16 number is 2^-24, so smaller gradients underflow to 0. Multiplying the
loss by S multiplies every gradient by S on its way through the 16-bit operations; dividing the
finished fp32 gradient by S restores it. S is always a power of two here, so both are exact.

:meth:`LossScaleConfig.after` is the algorithm of a dynamic scale: from a state, and whether the
step overflowed, it computes the next state.

**Source:** Micikevicius et al., "Mixed Precision Training", ICLR 2018 (arXiv 1710.03740), section
3.2 and 4; start, factors and interval as in ``torch.amp.GradScaler`` (2^16, 2, 1/2, 2000); floor
and hysteresis (reset by growth only) as in Megatron-Core's ``DynamicGradScaler``; the ceiling of
2^24 as in NVIDIA Apex's ``LossScaler``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from halfstep.errors import PrecisionError

Kind = Literal["none", "static", "dynamic"]
State = dict[str, float | int]


def _is_power_of_two(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5
    except OverflowError:  # an integer beyond the range of float
        return False


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class ScaleState(NamedTuple):
    """The changing state of a dynamic loss scale."""

    value: float  # the scale of the next backward
    good_steps: int  # since the last overflow or growth
    hysteresis_left: int  # overflows left before the next back-off


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """How the loss is scaled; every field is checked when the object is made."""

    kind: Kind = "none"
    """``"none"``, ``"static"`` (``init_scale`` throughout) or ``"dynamic"``."""
    init_scale: float = 2.0**16
    """The first scale, a power of two."""
    growth_factor: float = 2.0
    """The factor of the scale after ``growth_interval`` good steps in a row."""
    backoff_factor: float = 0.5
    """The factor of the scale on overflow."""
    growth_interval: int = 2000
    """Good optimizer steps in a row before the scale grows."""
    min_scale: float = 1.0
    """The smallest scale. An overflow there stops the run, since no smaller scale can help."""
    max_scale: float = 2.0**24
    """The largest scale."""
    hysteresis: int = 1
    """Number of overflows before the first back-off after a growth."""
    max_consecutive_skips: int = 50
    """Number of skipped steps in a row at which the run stops. With kind "none" nothing is skipped:
    the first non-finite gradient stops the run, since no scale can be lowered."""

    def __post_init__(self) -> None:
        if self.kind not in ("none", "static", "dynamic"):
            raise PrecisionError(f"scale is {self.kind!r}; allowed: none, static, dynamic")
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if not _is_power_of_two(value):
                raise PrecisionError(
                    f"{name} is {value!r}; allowed: powers of two, so that scaling is exact"
                )
        for name in ("growth_interval", "hysteresis", "max_consecutive_skips"):
            value = getattr(self, name)
            if not _is_count(value) or value < 1:
                raise PrecisionError(f"{name} is {value!r}; allowed: integers >= 1")
        if not 1.0 <= self.min_scale <= self.init_scale <= self.max_scale <= 2.0**126:
            raise PrecisionError(
                "1 <= min_scale <= init_scale <= max_scale <= 2^126 is required, got "
                f"{self.min_scale:g}, {self.init_scale:g}, {self.max_scale:g}"
            )
        changed = [f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        if self.kind == "none" and changed:
            raise PrecisionError(f"{', '.join(changed)} given, but the loss is not scaled")
        if self.growth_factor <= 1 or self.backoff_factor >= 1:
            raise PrecisionError(
                f"growth_factor > 1 > backoff_factor is required, got {self.growth_factor:g} and "
                f"{self.backoff_factor:g}"
            )

    def after(self, state: ScaleState, found_nonfinite: bool) -> ScaleState:
        """The next state: the scale backs off, holds or grows."""
        value, good, left = state
        if found_nonfinite:
            left -= 1
            smaller = max(value * self.backoff_factor, self.min_scale)
            return ScaleState(smaller if left <= 0 else value, 0, left)
        if good + 1 != self.growth_interval:
            return ScaleState(value, good + 1, left)
        return ScaleState(min(value * self.growth_factor, self.max_scale), 0, self.hysteresis)

    def at_floor(self, state: ScaleState) -> bool:
        """Whether the next overflow can no longer be answered by a smaller scale."""
        return state.value <= self.min_scale and state.hysteresis_left <= 1


class LossScale:
    """A loss scale in use: constant, or adapted after every step."""

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        first = 1.0 if config.kind == "none" else float(config.init_scale)
        self._take(ScaleState(first, 0, config.hysteresis))

    def _take(self, state: ScaleState) -> None:
        kind = self._config.kind
        self.state, self.value = state, state.value
        self.at_floor = kind == "none" or (kind == "dynamic" and self._config.at_floor(state))
        """Whether the next overflow can no longer be answered by a smaller scale."""

    def update(self, found_nonfinite: bool) -> None:
        """Adapt after a step; ``found_nonfinite`` says whether it had to be skipped."""
        if self._config.kind == "dynamic":
            self._take(self._config.after(self.state, found_nonfinite))

    def state_dict(self) -> State:
        """What changes, as plain numbers; of a static scale its value, so that a resume checks."""
        state = self.state._asdict()
        kept = {"none": (), "static": ("value",), "dynamic": ScaleState._fields}[self._config.kind]
        return {name: state[name] for name in kept}

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`; a scale that never moves must be the saved one."""
        own, moves = self.state_dict(), self._config.kind == "dynamic"
        if set(state) != set(own) or not (moves or state == own):
            raise PrecisionError(
                f"the saved loss scale is {state}, and this one {own}; it was saved by a run with "
                "another precision policy"
            )
        if not moves:
            return
        value, good, left = (state[name] for name in ScaleState._fields)
        limits = self._config
        if not (
            (_is_power_of_two(value) and limits.min_scale <= value <= limits.max_scale)
            and (_is_count(good) and 0 <= good < limits.growth_interval)
            and (_is_count(left) and left <= limits.hysteresis)
        ):
            raise PrecisionError(f"the saved loss scale {state} does not fit {limits}")
        self._take(ScaleState(float(value), int(good), int(left)))


LOSS_SCALE_FIELDS = tuple(field.name for field in fields(LossScaleConfig)[1:])
