"""An independent account of dynamic loss scaling, on exponents, by rereading the whole history.

**Source:** the prose of Micikevicius et al. 2018, section 4 ("increase after N iterations without
overflow, decrease on overflow"), torch.amp.GradScaler's documented options, and Megatron-Core's
``hysteresis`` ("number of overflows to tolerate before reducing", refilled by a growth only).
"""

from collections.abc import Sequence


def exponents(
    overflows: Sequence[bool],
    *,
    start: int,
    grow_by: int = 1,
    back_off_by: int = 1,
    interval: int = 2000,
    hysteresis: int = 1,
    floor: int = 0,
    ceiling: int = 24,
) -> list[int]:
    """log2 of the scale after each step of a history of overflow flags."""
    result: list[int] = []
    scale = start
    for i, overflow in enumerate(overflows):
        # Everything since the last growth is an "era"; an era holds ``hysteresis`` tolerances.
        begin = _last_growth(overflows[:i], interval)
        if overflow:
            bad = sum(overflows[begin : i + 1])
            if bad >= hysteresis:
                scale = max(floor, scale - back_off_by)
        elif _last_growth(overflows[: i + 1], interval) == i + 1:
            scale = min(ceiling, scale + grow_by)
        result.append(scale)
    return result


def _last_growth(overflows: Sequence[bool], interval: int) -> int:
    """Number of steps up to and including the latest growth; 0 if there was none."""
    last, clean = 0, 0
    for i, overflow in enumerate(overflows):
        clean = 0 if overflow else clean + 1
        if clean == interval:
            last, clean = i + 1, 0
    return last
