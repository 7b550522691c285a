"""The layout of the state of a step on the device: one buffer of fp64 numbers.

It begins with a head, whose fields are :class:`Head`; then follows one row (:class:`Row`) per group
of tensors that share their options and step number. fp64 holds every counter, every power of two
that a loss scale can be, and the options of a group exactly.
"""

from __future__ import annotations

from enum import IntEnum

from halfstep.precision.scaling.loss_scale import Limits, LossScaleConfig


class Head(IntEnum):
    """Indices in the head: first a ``ScaleState``; from DYNAMIC on, only the host writes."""

    SCALE = 0  # the loss scale of the next ``backward``
    GOOD_STEPS = 1  # good steps since the last overflow or growth
    HYSTERESIS_LEFT = 2  # overflows left before the next back-off
    NORM = 3  # 2-norm of the last step's gradients before clipping
    LOSS = 4  # the last step's loss
    FOUND = 5  # 1 if the last step's loss or gradients were not finite, so that it did nothing
    MULTIPLIER = 6  # clip factor of the last step
    DYNAMIC = 7  # 1 if the scale adapts
    GROWTH_FACTOR = 8  # this and the next five as in ``Limits``
    BACKOFF_FACTOR = 9
    GROWTH_INTERVAL = 10
    MIN_SCALE = 11
    MAX_SCALE = 12
    HYSTERESIS = 13
    SIZE = 16


class Row(IntEnum):
    """Indices in a row."""

    SETTLED = 0  # ``Algorithm.settled`` of the group's options, written by the host: at most 8
    SIGN = 8  # -1 if the group maximises, else 1; written by the host
    STEP = 9  # applied steps of these tensors
    CONSTANTS = 10  # ``Algorithm.constants`` of the last applied step, at most 8
    SIZE = 18


def limits(config: LossScaleConfig) -> list[float]:
    """The numbers of the head from DYNAMIC to HYSTERESIS, for this loss scale."""
    numbers = [float(getattr(config, name)) for name in Limits._fields]
    return [float(config.kind == "dynamic"), *numbers]
