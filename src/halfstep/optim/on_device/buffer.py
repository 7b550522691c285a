"""The layout of the state of a step on the device: one buffer of fp64 numbers.

It begins with a head, whose fields are :class:`Head`; then follows one row (:class:`Row`) per group
of tensors that share their options and step number. fp64 holds every counter, every power of two
that a loss scale can be, and the options of a group exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from halfstep.errors import NonFiniteError
from halfstep.precision.result import Reason, StepResult
from halfstep.precision.scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleConfig,
    ScaleState,
    State,
    make_loss_scale,
)


class Head(IntEnum):
    """Indices in the head: first a ``ScaleState``; from CONFIG_KIND on, only the host writes."""

    SCALE = 0  # the loss scale of the next ``backward``
    GOOD_STEPS = 1  # good steps since the last overflow or growth
    HYSTERESIS_LEFT = 2  # overflows left before the next back-off
    STEPS = 3  # applied steps since the scaler was made or loaded
    SKIPPED_TOTAL = 4  # skipped steps so far
    SKIPPED_IN_A_ROW = 5  # skipped steps since the last applied one
    NORM = 6  # 2-norm of the last step's unscaled gradients before clipping
    FOUND_INF = 7  # 1 if the last step's gradients held an infinity
    FOUND_NAN = 8  # 1 if they held a NaN
    MULTIPLIER = 9  # clip factor / scale of the last step
    LAST_SCALE = 10  # the loss scale of the last step's gradients
    LOSS = 11  # sum of the losses scaled since the last step
    LAST_LOSS = 12  # the value of LOSS for the last step
    STOP = 13  # 0, or the first reason why continuing cannot help, as an index into :data:`STOPS`
    CONFIG_KIND = 14  # 0 none, 1 static, 2 dynamic
    GROWTH_FACTOR = 15  # this and the next six as in ``LossScaleConfig``
    BACKOFF_FACTOR = 16
    GROWTH_INTERVAL = 17
    MIN_SCALE = 18
    MAX_SCALE = 19
    HYSTERESIS = 20
    MAX_CONSECUTIVE_SKIPS = 21
    MAX_NORM = 22  # the norm to clip to; infinity for no clipping
    SIZE = 24


class Row(IntEnum):
    """Indices in a row."""

    SETTLED = 0  # ``Algorithm.settled`` of the group's options, written by the host: at most 8
    STEP = 8  # applied steps of these tensors
    CONSTANTS = 9  # ``Algorithm.constants`` of the last applied step, at most 8
    SIZE = 17


KINDS = ("none", "static", "dynamic")
STOPS = ("", "gradients", "loss_scale_floor", "skip_limit")


def head(config: LossScaleConfig, scale: LossScale) -> list[float]:
    """The initial head for a loss scale of this configuration."""
    numbers = [0.0] * Head.SIZE
    numbers[Head.SCALE] = numbers[Head.LAST_SCALE] = scale.value
    if isinstance(scale, DynamicLossScale):
        numbers[: len(scale.state)] = scale.state
    numbers[Head.CONFIG_KIND] = KINDS.index(config.kind)
    for index in list(Head)[Head.GROWTH_FACTOR : Head.MAX_NORM]:
        numbers[index] = getattr(config, index.name.lower())
    numbers[Head.MAX_NORM] = float("inf")
    return numbers


def loss_scale_state(config: LossScaleConfig, numbers: Sequence[float]) -> State:
    """The ``state_dict`` of the loss scale that the head describes."""
    scale = make_loss_scale(config)
    if isinstance(scale, DynamicLossScale):
        value, good_steps, left = numbers[: len(scale.state)]
        scale.take(ScaleState(value, int(good_steps), int(left)))
    return scale.state_dict()


def read_result(numbers: Sequence[float], flags: Sequence[int], names: Sequence[str]) -> StepResult:
    """The result of the last step; raises the error that ``Precision.step`` would have raised.

    A tensor's flag is 1 if its gradient held an infinity, plus 2 if it held a NaN.
    """
    has_inf, has_nan = numbers[Head.FOUND_INF] > 0, numbers[Head.FOUND_NAN] > 0
    named = list(zip(names, flags, strict=False))
    broken = [name for name, flag in named if flag & 2]
    broken += [name for name, flag in named if flag == 1]
    if numbers[Head.STOP]:
        raise _stop_error(numbers, tuple(broken))
    reason: Reason | None = None
    if has_inf or has_nan:
        reason = "overflow" if has_inf else "nan_gradients"
    return StepResult(
        applied=reason is None,
        reason=reason,
        loss=numbers[Head.LAST_LOSS],
        grad_norm=numbers[Head.NORM],
        loss_scale=numbers[Head.LAST_SCALE],
        next_loss_scale=numbers[Head.SCALE],
        skipped_total=int(numbers[Head.SKIPPED_TOTAL]),
        skipped_in_a_row=int(numbers[Head.SKIPPED_IN_A_ROW]),
        calibrating=KINDS[int(numbers[Head.CONFIG_KIND])] == "dynamic" and not numbers[Head.STEPS],
        nonfinite_parameters=tuple(broken),
    )


def _stop_error(numbers: Sequence[float], names: tuple[str, ...]) -> NonFiniteError:
    cause = STOPS[int(numbers[Head.STOP])]
    why = {
        "gradients": "there is no loss scale to lower",
        "loss_scale_floor": f"the loss scale was at its floor {numbers[Head.MIN_SCALE]:g}",
        "skip_limit": (
            f"{numbers[Head.MAX_CONSECUTIVE_SKIPS]:g} steps in a row were skipped, the limit "
            "(max_consecutive_skips)"
        ),
    }[cause]
    where = f" (in the last step: {', '.join(names[:3])})" if names else ""
    return NonFiniteError(
        f"gradients were not finite and {why}: a bug in a backward pass, or values beyond the "
        f"format{where}. Such steps were skipped, the others were applied",
        cause=cause,
        parameters=names,
    )
