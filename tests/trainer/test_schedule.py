import math

import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.optimizer import ScheduleConfig, learning_rate


def test_warm_up_is_linear_and_ends_at_the_peak():
    schedule = ScheduleConfig(warmup_steps=4)
    rates = [learning_rate(1.0, schedule, 99, applied, 100) for applied in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_against_its_definition():
    schedule = ScheduleConfig(warmup_steps=10, min_ratio=0.1)
    for applied in range(10, 111):
        share = (applied - 10) / 100
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2
        # one rounding of a product of numbers below 1
        assert learning_rate(2.0, schedule, 0, applied, 110) == pytest.approx(
            2 * expected, rel=1e-15
        )
    assert learning_rate(2.0, schedule, 500, 500, 110) == pytest.approx(0.2, rel=1e-15)


def test_constant_and_own_end():
    assert learning_rate(3.0, ScheduleConfig(warmup_steps=0, decay="constant"), 9, 9, 10) == 3.0
    ended = ScheduleConfig(warmup_steps=0, decay_steps=5, min_ratio=0.0)
    assert learning_rate(3.0, ended, 5, 5, 1000) == 0.0


@pytest.mark.parametrize("bad", [{"warmup_steps": -1}, {"min_ratio": 1.5}, {"decay_steps": -2}])
def test_bad_values_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ScheduleConfig(**bad)


def test_a_skipped_step_holds_the_schedule_or_moves_it_on():
    hold = ScheduleConfig(warmup_steps=10)
    advance = ScheduleConfig(warmup_steps=10, on_skip="advance")
    # eight steps taken, three of them skipped: the next one is the sixth, or the ninth
    assert learning_rate(1.0, hold, 8, 5, 100) == pytest.approx(0.6, rel=1e-15)
    assert learning_rate(1.0, advance, 8, 5, 100) == pytest.approx(0.9, rel=1e-15)
