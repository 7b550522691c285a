"""Loss scaling: none, static and dynamic behind one interface.

A 16-bit gradient below 2^-24 (fp16) is 0. Multiplying the loss by S multiplies every gradient by S
on its way through the 16-bit operations; dividing the finished fp32 gradient by S restores it. S is
always a power of two here, so both are exact.

Algorithm (dynamic)::

    overflow:  tracker <- tracker - 1 ; good <- 0
               if tracker <= 0: scale <- max(scale * backoff_factor, min_scale)
    good step: good <- good + 1
               if good == growth_interval: good <- 0 ; tracker <- hysteresis
                                           scale <- min(scale * growth_factor, max_scale)

**Source:** Micikevicius et al., "Mixed Precision Training", ICLR 2018 (arXiv 1710.03740), section
3.2 and 4; start, factors and interval as ``torch.amp.GradScaler`` (2^16, 2, 1/2, 2000); floor and
hysteresis (refilled on growth only) as Megatron-Core's ``DynamicGradScaler``; the ceiling of 2^24
as NVIDIA Apex's ``LossScaler``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from torch import Tensor

from halfstep.errors import PrecisionError

Kind = Literal["none", "static", "dynamic"]
State = dict[str, float | int]


def _is_power_of_two(value: float) -> bool:
    try:
        return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5
    except OverflowError:  # an integer beyond every float
        return False


def _is_number(value: object, kind: type[int] | type[float]) -> bool:
    """Whether a value is a plain number: bool is no number, an int may stand for a float."""
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """How the loss is scaled; every number is checked when the value is made."""

    kind: Kind = "none"
    """``"none"``, ``"static"`` (``init_scale`` throughout) or ``"dynamic"``."""
    init_scale: float = 2.0**16
    """The first scale, a power of two."""
    calibrate: bool = False
    """Written ``init_scale=auto``: start instead at the largest scale up to ``max_scale`` whose
    gradients of the first micro-batch are finite, found by back-propagating it a few times."""
    growth_factor: float = 2.0
    """What the scale is multiplied by after ``growth_interval`` good steps in a row."""
    backoff_factor: float = 0.5
    """What the scale is multiplied by on overflow."""
    growth_interval: int = 2000
    """Good optimizer steps in a row before the scale grows."""
    min_scale: float = 1.0
    """The floor. An overflow at the floor stops the run: no smaller scale can help."""
    max_scale: float = 2.0**24
    """The ceiling."""
    hysteresis: int = 1
    """Overflows that are needed for the first back-off after a growth."""
    max_consecutive_skips: int = 50
    """Skipped steps in a row after which the run stops. With kind "none" nothing is skipped: the
    first non-finite gradient stops the run, since no scale can be lowered."""

    def __post_init__(self) -> None:
        """Raise PrecisionError for a value that no loss scaler can run with."""
        if self.kind not in ("none", "static", "dynamic"):
            raise PrecisionError(f"scale is {self.kind!r}; allowed: none, static, dynamic")
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if not _is_number(value, float):
                raise PrecisionError(f"{name} is {value!r}; allowed: a number")
            if not _is_power_of_two(value):
                raise PrecisionError(
                    f"{name} is {value!r}; allowed: powers of two, so that scaling is exact"
                )
        for name in ("growth_interval", "hysteresis", "max_consecutive_skips"):
            value = getattr(self, name)
            if not _is_number(value, int) or value < 1:
                raise PrecisionError(f"{name} is {value!r}; allowed: integers >= 1")
        if self.calibrate:  # only stands for what will be measured
            placeholder = min(max(self.init_scale, self.min_scale), self.max_scale)
            object.__setattr__(self, "init_scale", placeholder)
        if not 1.0 <= self.min_scale <= self.init_scale <= self.max_scale <= 2.0**126:
            raise PrecisionError(
                f"1 <= min_scale <= init_scale <= max_scale <= 2^126 is required, got "
                f"{self.min_scale:g}, {self.init_scale:g}, {self.max_scale:g}"
            )
        changed = [f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        if self.kind == "none" and changed:
            raise PrecisionError(f"{', '.join(changed)} given, but the loss is not scaled")
        if self.calibrate and self.kind != "dynamic":
            raise PrecisionError("init_scale=auto needs scale=dynamic: a calibrated scale may move")
        if self.growth_factor <= 1 or self.backoff_factor >= 1:
            raise PrecisionError(
                f"growth_factor > 1 > backoff_factor is required, got {self.growth_factor:g} and "
                f"{self.backoff_factor:g}"
            )


class LossScale(Protocol):
    """What the training step needs of a loss scale; :class:`NoLossScale` is the null object."""

    @property
    def value(self) -> float:
        """The present scale, a power of two."""

    @property
    def at_floor(self) -> bool:
        """Whether the next overflow can no longer be answered by a smaller scale."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the present scale, same shape; call ``backward`` on it."""

    def start_at(self, value: float) -> None:
        """Take a calibrated scale before the first step."""

    def update(self, found_nonfinite: bool) -> None:
        """Adapt after a step; ``found_nonfinite`` tells whether it had to be skipped."""

    def state_dict(self) -> State:
        """Everything that changes, as plain numbers."""

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`; all or nothing."""


class NoLossScale:
    """No scaling: every method does nothing and ``value`` is 1."""

    value = 1.0
    at_floor = True

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as it is, in its own dtype."""
        return loss

    def start_at(self, value: float) -> None:
        """Do nothing: there is no scale to start."""

    def update(self, found_nonfinite: bool) -> None:
        """Do nothing: there is no scale to adapt."""

    def state_dict(self) -> State:
        """An empty state: nothing here ever changes."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Accept only the empty state, so that a scaled run is not resumed unscaled in silence."""
        _check_keys(state, set(), "no loss scale")


class StaticLossScale:
    """The same scale in every step, whatever overflows."""

    at_floor = False

    def __init__(self, config: LossScaleConfig) -> None:
        self.value = float(config.init_scale)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the constant scale, in fp32 where the loss is of lower precision."""
        return loss.float() * self.value

    def start_at(self, value: float) -> None:
        """Do nothing: the scale is constant."""

    def update(self, found_nonfinite: bool) -> None:
        """Do nothing: the scale is constant."""

    def state_dict(self) -> State:
        """The scale, so that a resume can check it."""
        return {"value": self.value}

    def load_state_dict(self, state: State) -> None:
        """Accept only the same scale."""
        _check_keys(state, {"value"}, "static loss scale")
        value = state["value"]
        if not _is_number(value, float) or value != self.value:
            raise PrecisionError(
                f"static loss scale is {self.value:g}, the saved state has {value!r}; resume with "
                "the same init_scale"
            )


class DynamicLossScale:
    """The scale grows while steps are good and backs off on overflow; see the module's algorithm.

    Attributes:
        value: The present scale.
        good_steps: Good steps since the last overflow or growth.
        tracker: Overflows left before the next back-off.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.value = float(config.init_scale)
        self.good_steps = 0
        self.tracker = config.hysteresis

    @property
    def at_floor(self) -> bool:
        """Whether the scale is at its floor and hysteresis is used up."""
        return self.value <= self.config.min_scale and self.tracker <= 1

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the present scale, in fp32 where the loss is of lower precision."""
        return loss.float() * self.value

    def start_at(self, value: float) -> None:
        """Start at this power of two between floor and ceiling."""
        self.value = value

    def update(self, found_nonfinite: bool) -> None:
        """Back off, hold or grow."""
        config = self.config
        if found_nonfinite:
            self.good_steps = 0
            self.tracker -= 1
            if self.tracker <= 0:
                self.value = max(self.value * config.backoff_factor, config.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == config.growth_interval:
            self.good_steps = 0
            self.tracker = config.hysteresis
            self.value = min(self.value * config.growth_factor, config.max_scale)

    def state_dict(self) -> State:
        """The scale and both counters."""
        return {"value": self.value, "good_steps": self.good_steps, "tracker": self.tracker}

    def load_state_dict(self, state: State) -> None:
        """Continue from the saved scale and counters.

        Raises:
            PrecisionError: If a key is missing or unknown, or a number cannot be a state of this
                configuration; nothing is changed then.
        """
        _check_keys(state, {"value", "good_steps", "tracker"}, "dynamic loss scale")
        value, good, tracker = state["value"], state["good_steps"], state["tracker"]
        if not (_is_number(value, float) and _is_number(good, int) and _is_number(tracker, int)):
            raise PrecisionError(
                f"saved loss-scale state {state!r} holds something that is not a number"
            )
        low, high = self.config.min_scale, self.config.max_scale
        if not (_is_power_of_two(value) and low <= value <= high):
            raise PrecisionError(
                f"saved loss scale {value!r} is not a power of two between {low:g} and {high:g}"
            )
        if not 0 <= good < self.config.growth_interval or tracker > self.config.hysteresis:
            raise PrecisionError(
                f"saved loss-scale counters good_steps={good}, tracker={tracker} do not fit "
                f"growth_interval={self.config.growth_interval} and "
                f"hysteresis={self.config.hysteresis}"
            )
        self.value, self.good_steps, self.tracker = float(value), int(good), int(tracker)


def make_loss_scale(config: LossScaleConfig) -> LossScale:
    """The loss scale that a configuration describes."""
    if config.kind == "dynamic":
        return DynamicLossScale(config)
    if config.kind == "static":
        return StaticLossScale(config)
    return NoLossScale()


def _check_keys(state: State, expected: set[str], what: str) -> None:
    if set(state) != expected:
        raise PrecisionError(
            f"{what}: the saved state has keys {sorted(state)}, expected {sorted(expected)}; it "
            "was saved by a run with another precision policy"
        )


LOSS_SCALE_FIELDS = tuple(
    field.name for field in fields(LossScaleConfig) if field.name not in ("kind", "calibrate")
)
