"""Which of several runs is better, and when nobody can tell."""

import math
import random

import numpy as np
import pytest

from halfstep.report.compare import compare, grouped, least_difference, quantile
from halfstep.report.record import read_run
from report.conftest import line

CONFIG = """task = "{task}"
precision = "{precision}"
[run]
seed = {seed}
output_dir = "{name}"
max_steps = 20
[data]
train = ["{data}"]
"""


@pytest.fixture
def made(folder):
    """A run that ends with a validation loss."""

    def make(precision, seed, loss, *, task="pretrain", data="a.txt", step=20, key="val_loss"):
        name = f"{precision}-{seed}-{task}-{data}-{loss}"
        lines = [line(s) for s in range(1, step)] + [line(step, **{key: loss})]
        path = folder(lines, name)
        text = CONFIG.format(task=task, precision=precision, seed=seed, name=name, data=data)
        (path / "config.toml").write_text(text, encoding="utf-8")
        return read_run(path)

    return make


def said(runs, language="en"):
    return " ".join(compare(runs, language).verdict)


def density(x, freedom):
    """Student's t, as its definition says."""
    log = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    log -= math.log(freedom * math.pi) / 2
    return np.exp(log - (freedom + 1) / 2 * np.log1p(x * x / freedom))


@pytest.mark.parametrize("freedom", [1, 1.5, 2, 3, 4, 9.3, 60])
@pytest.mark.parametrize("p", [0.9, 0.975, 0.9917])
def test_quantiles_leave_that_much_of_the_density(p, freedom):
    """The trapezoid sum up to the quantile, on 200,000 points: its error is below 1e-6."""
    x = np.linspace(0, quantile(p, freedom), 200_001)
    assert 0.5 + np.trapezoid(density(x, freedom), x) == pytest.approx(p, abs=3e-6)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 2), (3, 1), (1, 5)])
def test_equal_configurations_are_seldom_called_different(n, m):
    """At 5 % of 500 pairs; the binomial's standard deviation is 1 %, and Welch's test is
    known to be careful with few values."""
    draw = random.Random(n * 10 + m)
    wrong = 0
    for _ in range(500):
        a = [draw.gauss(3, 0.1) for _ in range(n)]
        b = [draw.gauss(3, 0.1) for _ in range(m)]
        wrong += abs(sum(a) / n - sum(b) / m) > least_difference(a, b, 0.05)
    assert 0.01 < wrong / 500 < 0.08


def test_one_run_each_tells_nothing():
    assert least_difference([3.0], [9.0], 0.05) is None


def test_runs_that_differ_in_their_seed_are_one_group(made):
    runs = [made(p, s, 3 + s / 100) for p in ("fp32", "bf16-mixed") for s in (1, 2, 3)]
    assert [(g.name, len(g.runs)) for g in grouped(runs)] == [("fp32", 3), ("bf16-mixed", 3)]
    one = compare(runs[:3])
    assert "All runs repeat one configuration: 3.0200 ± 0.0100 at step 20" in one.verdict[0]
    assert compare(runs[:1]) is None


def test_noise_is_called_noise(made):
    runs = [made("fp32", s, v) for s, v in ((1, 3.0), (2, 3.2), (3, 3.1))]
    runs += [made("bf16-mixed", s, v) for s, v in ((4, 3.05), (5, 3.22), (6, 3.0))]
    text = said(runs)
    assert "bf16-mixed" in text
    assert "cannot be told from noise" in text
    assert "无法与噪声区分" in said(runs, "zh")


def test_a_difference_above_the_noise_is_named_with_the_better_one(made):
    runs = [made("bf16-pure", s, v) for s, v in ((1, 4.0), (2, 4.01), (3, 4.02))]
    runs += [made("fp32", s, v) for s, v in ((4, 3.0), (5, 3.01), (6, 3.02))]
    found = compare(runs)
    assert [group.name for group in found.groups] == ["fp32", "bf16-pure"]
    assert found.verdict[0].startswith("fp32 (3.0100 ± 0.0100) is better than bf16-pure")
    assert found.differs == {"precision": ["bf16-pure", "fp32"]}
    assert found.order == ["bf16-pure", "fp32"]


def test_equal_seeds_are_compared_seed_by_seed(made):
    """The seeds differ by 0.5, the policies by 0.02 in each: other seeds would not tell."""
    losses = {1: 3.0, 2: 3.5, 3: 4.0}
    runs = [made("fp32", s, v) for s, v in losses.items()]
    same = [made("bf16-mixed", s, v + 0.02 + s / 1000) for s, v in losses.items()]
    other = [made("bf16-mixed", s + 3, v + 0.02 + s / 1000) for s, v in losses.items()]
    assert "fp32 (3.5000 ± 0.5000) is better" in said(runs + same)
    assert "cannot be told from noise" in said(runs + other)


def test_single_runs_ask_for_repetitions(made):
    text = said([made("fp32", 1, 3.0), made("bf16-pure", 1, 4.0)])
    assert "each ran once" in text
    assert "--seed" in text


def test_one_run_against_a_group_borrows_its_spread(made):
    group = [made("fp32", s, v) for s, v in ((1, 3.0), (2, 3.01), (3, 3.02))]
    assert "is better than" in said([*group, made("bf16-pure", 1, 4.0)])
    assert "cannot be told" in said([*group, made("bf16-mixed", 1, 3.03)])


def test_different_tasks_and_data_are_not_ranked(made):
    text = said([made("fp32", 1, 3.0), made("fp32", 1, 0.5, task="classify", data="b.csv")])
    assert "cannot be ranked: they differ in task, data.train" in text


def test_a_seed_that_comes_twice_is_no_repetition(made):
    one = made("fp32", 1, 3.0)
    assert "say nothing of noise" in said([one, one])
    assert "each ran once" in said([one, one, made("bf16-pure", 1, 4.0)])


def test_no_step_in_common(made):
    text = said([made("fp32", 1, 3.0), made("bf16-mixed", 1, 3.0, step=15)])
    assert "no step at which all of them were evaluated" in text


def test_accuracies_are_better_when_higher(made):
    found = compare([made("fp32", s, 0.5 + s / 1000, key="val_accuracy") for s in (1, 2, 3)]
                    + [made("bf16-pure", s, 0.9 + s / 1000, key="val_accuracy") for s in (1, 2, 3)]
                    )  # fmt: skip
    assert found.groups[0].name == "bf16-pure"
    assert found.verdict[0].startswith("bf16-pure (90.20% ± 0.10%) is better")


def test_a_run_that_became_nan_is_named_and_never_the_best(made):
    runs = [made("fp32", s, 3 + s / 100) for s in (1, 2)] + [made("fp16-pure", 1, "nan")]
    found = compare(runs)
    assert "No finite validation result at step 20: fp16-pure-1" in found.verdict[0]
    assert found.groups[0].name == "fp32"
    assert len(found.verdict) == 1
