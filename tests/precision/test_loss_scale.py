"""Loss scaling: golden sequences, torch's own scaler as witness, states, refusals, exactness."""

import itertools
import math

import pytest
import torch

from every import every
from halfstep import LossScaleConfig, PrecisionError
from halfstep.precision.scaling.loss_scale import LossScale

FLAGS = [c == "1" for c in "000010001101000000"]


def dynamic(**options) -> LossScale:
    return LossScale(LossScaleConfig(kind="dynamic", **options))


def trajectory(scale: LossScale, flags) -> list[float]:
    result = []
    for flag in flags:
        scale.update(found_nonfinite=flag)
        result.append(scale.value)
    return result


def test_defaults_are_torch_s_own():
    scaler = torch.amp.GradScaler("cpu")
    config = LossScaleConfig(kind="dynamic")
    assert config.init_scale == scaler.get_scale() == 65536.0
    assert config.growth_factor == scaler.get_growth_factor() == 2.0
    assert config.backoff_factor == scaler.get_backoff_factor() == 0.5
    assert config.growth_interval == scaler.get_growth_interval() == 2000
    assert (config.min_scale, config.max_scale) == (1.0, 2.0**24)
    assert config.hysteresis == 1
    assert LossScaleConfig().kind == "none"


def test_no_scale_is_1_for_good():
    scale = LossScale(LossScaleConfig())
    scale.update(found_nonfinite=True)
    assert (scale.value, scale.at_floor, scale.state_dict()) == (1.0, True, {})
    scale.load_state_dict({})
    with pytest.raises(PrecisionError, match="another precision policy"):
        scale.load_state_dict({"value": 8.0})


def test_static_scale_never_moves():
    scale = LossScale(LossScaleConfig(kind="static", init_scale=1024.0))
    assert not scale.at_floor
    for flag in FLAGS:
        scale.update(found_nonfinite=flag)
    assert scale.value == 1024.0
    assert scale.state_dict() == {"value": 1024.0}
    scale.load_state_dict({"value": 1024.0})
    with pytest.raises(PrecisionError, match="another precision policy"):
        scale.load_state_dict({"value": 1024.0, "good_steps": 0, "hysteresis_left": 1})
    with pytest.raises(PrecisionError, match=r"is \{'value': 512.0\}, and this one"):
        scale.load_state_dict({"value": 512.0})
    assert scale.value == 1024.0


# --- state ----------------------------------------------------------------------------------------

OPTIONS = {"init_scale": 256.0, "growth_interval": 3, "hysteresis": 2}


def test_a_state_beyond_the_limits_is_refused_and_changes_nothing():
    scale = dynamic(**OPTIONS)
    trajectory(scale, [False, True])
    before, good = dict(vars(scale)), {"value": 64.0, "good_steps": 0, "hysteresis_left": 1}
    odd = {"value": 2.0**25}, {"value": 0.5}, {"value": math.nan}, {"good_steps": 3}, {"more": 2}
    odd += {"value": 48.0}, {"good_steps": -5}, {"hysteresis_left": 3}, {"good_steps": 1.5}
    for wrong in ({}, *({**good, **one} for one in odd)):
        with pytest.raises(PrecisionError):
            scale.load_state_dict(wrong)
        assert vars(scale) == before


# --- configurations -------------------------------------------------------------------------------

FLOATS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
INTEGERS = ("growth_interval", "hysteresis", "max_consecutive_skips")


def test_what_is_no_power_of_two_or_no_count_is_refused():
    def check(field, value):
        allowed = "powers of two" if field in FLOATS else "integers >= 1"
        with pytest.raises(PrecisionError, match=f"{field} is .*{allowed}"):
            LossScaleConfig(kind="dynamic", **{field: value})

    powers = itertools.product(FLOATS, [0, -2.0, 3.0, 1.5, math.nan, math.inf, 2**2000, True, "2"])
    every([*powers, *itertools.product(INTEGERS, [0, -1, 2.0, math.nan, True, "2"])], check)


def test_contradictions_are_refused():
    def check(options, message):
        with pytest.raises(PrecisionError, match=message):
            LossScaleConfig(**{"kind": "dynamic", **options})

    every(
        [
            ({"growth_factor": 1.0}, "growth_factor > 1"),
            ({"backoff_factor": 1.0}, "> backoff_factor"),
            ({"min_scale": 0.5}, "1 <= min_scale"),
            ({"init_scale": 0.5}, "1 <= min_scale"),
            ({"min_scale": 2.0**17}, "min_scale <= init_scale .* got 131072, 65536, "),
            ({"max_scale": 2.0**15}, "init_scale <= max_scale"),
            ({"max_scale": 2.0**127}, r"max_scale <= 2\^126"),
            ({"kind": "Dynamic"}, "allowed: none, static, dynamic"),
        ],
        check,
    )
