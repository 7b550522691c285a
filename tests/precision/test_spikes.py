"""Finite spikes: found before the update, answered like a non-finite step, and never imagined."""

import copy
import math
import random
import statistics
import warnings

import numpy as np
import pytest
import torch

from halfstep import Precision, SpikeError
from halfstep.optim.optimizers import SGD
from halfstep.precision.scaling.spikes import (
    LOSS_LIMIT,
    NORM_LIMIT,
    RECORD_LIMIT,
    WINDOW,
    SpikeDetector,
)
from reference.training import batches, differences, loss_of, mlp, scaled, snapshot

POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split")


def history(length, seed=0, slope=-0.003, noise=0.05, start=3.0):
    """Losses that fall like an exponential, and norms, both with normal noise on the logarithm."""
    draw = random.Random(seed)
    return [
        (start * math.exp(slope * i + draw.gauss(0, noise)), math.exp(draw.gauss(0, 0.2)))
        for i in range(length)
    ]


def detector_after(steps):
    detector = SpikeDetector()
    for step in steps:
        detector.remember(*step)
    return detector


def deviation(values, new, least):
    """How far ``new`` is above where ``values`` lead, by the definition and statistics alone."""
    n, third = len(values), len(values) // 3
    rise = statistics.median(values[-third:]) - statistics.median(values[:third])
    slope = rise / (n - third)
    start = statistics.median(v - slope * i for i, v in enumerate(values))
    residuals = [v - (start + slope * i) for i, v in enumerate(values)]
    expected = max(start + slope * n, statistics.median(values[-16:]))
    noise = max(1.4826 * statistics.median(map(abs, residuals)), least)
    return lambda limit: (new - expected) / max(limit * noise, 3 * max(residuals))


def excess(steps, loss, norm):
    seen = steps[-WINDOW:]
    of_loss = deviation([math.log(a) for a, _ in seen], math.log(loss), 0.02)
    of_norm = deviation([math.log(b) for _, b in seen], math.log(norm), 0.1)
    joint = math.hypot(max(of_loss(LOSS_LIMIT), 0), max(of_norm(NORM_LIMIT), 0))
    if loss > 1.4 * max(a for a, _ in steps):
        joint = max(joint, of_loss(RECORD_LIMIT))
    return joint / (1 + 4 / len(seen))


@pytest.mark.parametrize("length", [20, 21, 60, 127, 128, 300])
def test_the_excess_is_what_its_definition_says(length):
    steps = history(length, seed=length)
    detector = detector_after(steps)
    draw = random.Random(1)
    above = 0
    for _ in range(200):
        loss, norm = steps[-1][0] * draw.uniform(0.5, 3), draw.uniform(0.2, 20)
        found, expected = detector.test(loss, norm), excess(steps, loss, norm)
        assert (found is not None) == (expected > 1)
        if found is not None:
            above += 1
            assert found.excess == pytest.approx(expected, rel=1e-9)  # other order of fp64 sums
    assert 20 < above < 180


def test_losses_below_zero_and_norms_of_zero_are_compared_too():
    draw = random.Random(2)
    steps = [(draw.gauss(-1, 0.3), 0.0 if i % 3 else 1.0) for i in range(128)]
    detector = detector_after(steps)
    assert all(detector.test(*step) is None for step in steps)
    assert detector.test(9.0, 1.0).reason == "loss_spike"
    assert detector_after([(0.0, 0.0)] * 30).test(0.0, 0.0) is None


# Precision.


def make(policy, **options):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if "split" in policy:
        optimizer = SGD(model.parameters(), lr=0.01)
    return model, optimizer, Precision(scaled(policy), model, optimizer, **options)


def step(model, precision, number, times=1.0):
    return precision.step(loss_of(model, precision, batches(40)[number % 40]) * times)


def warmed(policy, steps=30, **options):
    made = make(policy, **options)
    for number in range(steps):
        assert step(made[0], made[2], number).applied
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_off_applies_what_stop_refuses(policy):
    model, _, precision = warmed(policy)
    assert step(model, precision, 30, 200.0).applied
    assert "spikes" not in precision.state_dict()
    model, optimizer, precision = warmed(policy, on_spike="stop")
    before = snapshot(model, optimizer, precision)
    with pytest.raises(SpikeError, match=r"spikes: loss .* the weights are unchanged") as told:
        step(model, precision, 30, 200.0)
    assert told.value.cause in ("loss_spike", "gradient_spike")
    assert differences(before, snapshot(model, optimizer, precision)) == []
    assert precision.path is None  # the host decides


@pytest.mark.parametrize("policy", POLICIES)
def test_skip_leaves_all_as_it_was_k_times_in_a_row(policy):
    model, optimizer, precision = warmed(policy, on_spike="skip:2")
    before = snapshot(model, optimizer, precision)
    spikes, scale = precision.state_dict()["spikes"], precision.loss_scale.state_dict()
    with pytest.warns(UserWarning, match=r"on_spike=skip:2 allows.*Said once"):
        first = step(model, precision, 30, 200.0)
    assert not first.applied
    assert first.reason in ("loss_spike", "gradient_spike")
    assert math.isfinite(first.loss)
    assert first.nonfinite_parameters == ()
    assert step(model, precision, 31, 200.0).skipped_in_a_row == 2
    assert differences(before, snapshot(model, optimizer, precision)) == []
    assert precision.state_dict()["spikes"] == spikes
    assert precision.loss_scale.state_dict() == scale
    with pytest.raises(SpikeError):
        step(model, precision, 32, 200.0)
    assert step(model, precision, 33).applied


@pytest.mark.filterwarnings("ignore:the step is left out")
def test_each_option_answers_its_own_trouble():
    model, _, precision = warmed("fp32", on_spike="skip:1", on_nonfinite="skip:1")
    assert step(model, precision, 31, 200.0).reason in ("loss_spike", "gradient_spike")
    assert step(model, precision, 32, math.nan).reason == "nonfinite_loss"
    with pytest.raises(SpikeError):
        step(model, precision, 33, 200.0)
    model, _, precision = warmed("fp32", on_spike="stop", on_nonfinite="skip:1")
    assert step(model, precision, 31, math.nan).reason == "nonfinite_loss"
    with pytest.raises(SpikeError):
        step(model, precision, 32, 200.0)


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-split"])
def test_a_resumed_run_decides_the_same(policy):
    model, optimizer, precision = warmed(policy, on_spike="skip:9")
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), precision.state_dict()))
    other, of_other, resumed = make(policy, on_spike="skip:9")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(30, 60):
            times = 200.0 if number % 7 == 5 else 1.0 + 0.04 * (number % 11)
            if number == 30:
                other.load_state_dict(saved[0])
                of_other.load_state_dict(saved[1])
                resumed.load_state_dict(saved[2], weights=saved[0])
            one, two = step(model, precision, number, times), step(other, resumed, number, times)
            assert one == two
    assert precision.progress.skipped_total > 2


def test_a_state_without_a_window_begins_a_new_one():
    _, _, precision = warmed("fp32")
    state = copy.deepcopy(precision.state_dict())
    _, _, guarded = warmed("fp32", on_spike="stop")
    guarded.load_state_dict(state)
    assert guarded.state_dict()["spikes"]["window"] == []
    precision.load_state_dict({**state, "spikes": guarded.state_dict()["spikes"]})  # not needed


def mixed(kind, steps, seed):
    """Losses and norms of healthy programs of a kind, by their distributions."""
    draw = np.random.default_rng(seed)
    losses = 2 * np.exp(-np.arange(steps) / 200) + 1
    if kind == "t(3)":  # squared errors of heavy-tailed targets, in batches of 32
        noise = (draw.standard_t(3, (steps, 32)) ** 2).mean(1) / 3
    elif kind == "one sequence":  # of 2 to 40 tokens
        noise = np.exp(draw.normal(0, 0.8 / np.sqrt(draw.integers(2, 40, steps))))
    elif kind == "weighted":  # a rare class counts 20 times
        noise = (1 + 2 * draw.binomial(32, 0.01, steps)) * np.exp(draw.normal(0, 0.1, steps))
    else:
        noise = np.exp(draw.normal(0, 0.03, steps))
    if kind == "every 40th":
        noise[39::40] *= 6
    if kind == "curriculum":
        noise[150:] *= 9
    return zip((losses * noise).tolist(), (noise**0.5 + 0.1).tolist(), strict=True)


@pytest.mark.parametrize(
    ("kind", "most"),
    [("t(3)", 1), ("one sequence", 0), ("weighted", 0), ("plain", 0), ("every 40th", 1),
     ("curriculum", 1)],
)  # fmt: skip
def test_what_repeats_is_data(kind, most):
    detector, spikes = SpikeDetector(), []
    for number, (loss, norm) in enumerate(mixed(kind, 2000, 3)):
        if detector.test(loss, norm) is None:
            detector.remember(loss, norm)
        else:
            spikes.append(number)
            detector.leave_out(loss, norm)
    assert len(spikes) <= most, spikes
    assert kind != "every 40th" or spikes == [39]
    assert detector.test(1e6, 1e6) is not None  # which is none of them


def test_a_repeated_spike_is_applied_and_said_once_and_a_huge_one_never():
    model, _, precision = warmed("fp32", on_spike="skip:1")
    with pytest.warns(UserWarning, match="the step is left out"):
        assert not step(model, precision, 30, 8.0).applied
    assert step(model, precision, 31).applied
    with pytest.warns(UserWarning, match="what repeats is data"):
        assert step(model, precision, 32, 8.0).applied
    assert step(model, precision, 33).applied
    assert not step(model, precision, 34, 200.0).applied
    with pytest.raises(SpikeError):
        step(model, precision, 35, 200.0)
