"""The lab's experiment ``small-updates`` against sums that are rounded by lookup."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.figures import made, require_figures
from reference import floats

TABLES = {"fp16": floats.FP16, "bf16": floats.BF16}


def nearest(value: float, form: str) -> float:
    return float(floats.nearest(np.array([value]), TABLES[form], math.inf)[0])


@pytest.mark.parametrize("update", [1e-3, 4e-3])
def test_each_sum_is_rounded_and_what_keeps_more_arrives(update, tmp_path):
    steps, seeds = 100, 64
    one = made("small-updates", update=update, steps=steps, seeds=seeds)
    curves = one.data["curves"]
    for form in ("fp16", "bf16"):
        weight, added = 1.0, nearest(update, form)
        for step in range(1, steps + 1):
            weight = nearest(weight + added, form)
            assert curves[form][step] == weight
    exact = np.float32(1)
    for _ in range(steps):
        exact = exact + np.float32(update)
    assert curves["fp32"][-1] == curves["bf16-split"][-1] == exact
    # A residual of 16 bits below a weight of gap 2^-7 leaves 2^-16 of the sum at each step.
    assert curves["bf16-kahan"][-1] == pytest.approx(float(exact), abs=steps * 2.0**-17)
    # A step goes up one gap of 2^-7 with probability update / 2^-7: a binomial of 100 draws, of
    # whose mean over seeds four standard errors are allowed.
    p = update * 2**7
    deviation = 2.0**-7 * math.sqrt(steps * p * (1 - p))
    mean = np.mean([run[-1] for run in one.data["stochastic"]])
    assert mean == pytest.approx(1 + steps * update, abs=4 * deviation / math.sqrt(seeds))
    require_figures(one, tmp_path)


def test_the_claim_bf16_stands_still_and_fp16_drifts_by_whole_gaps():
    said = made("small-updates", seeds=64).verdict("en")
    assert "bf16 covered 0%" in said
    assert "fp16 97.7%" in said  # 100 gaps of 2^-10 of the way of 0.1
    assert "bf16-split 100.00%" in said
    assert "bf16 covered 195%" in made("small-updates", update=0.004, seeds=2).verdict("en")
