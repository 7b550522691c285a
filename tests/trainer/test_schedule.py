import math

import pytest

from halfstep.trainer.config.run import ScheduleConfig
from halfstep.trainer.step import learning_rate


def test_cosine_against_its_definition():
    schedule = ScheduleConfig(warmup_steps=10, min_ratio=0.1)
    for applied in range(10, 111):
        share = (applied - 10) / 100
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2
        # one rounding of a product of numbers below 1
        assert learning_rate(2.0, schedule, applied, 110) == pytest.approx(2 * expected, rel=1e-15)
    assert learning_rate(2.0, schedule, 500, 110) == pytest.approx(0.2, rel=1e-15)


def test_schedules_from_their_formulas():
    def rates(**fields):
        schedule = ScheduleConfig(warmup_steps=2, **fields)
        return [learning_rate(1.0, schedule, n, 12) for n in range(12)]

    assert rates(decay="constant") == [0.5, *[1.0] * 11]
    linear = rates(decay="linear", min_ratio=0.0)
    assert linear == pytest.approx([0.5, 1.0] + [1 - n / 10 for n in range(10)])
