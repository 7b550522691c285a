"""Adafactor against its definition in fp64, against torch.optim, and in every rounding mode."""

import numpy as np
import pytest
import torch

from halfstep.errors import PrecisionError
from halfstep.optim import Adafactor
from optim import oracles
from optim.test_optimizers import assert_same, everything, feed, numbers, parameter
from reference.training import through_a_file

SHAPES = [(20, 30), (30, 20), (3, 8, 10), (1, 40), (50,), ()]
OPTIONS = [
    {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0},
    {"lr": 0.3, "beta2_decay": -0.5, "eps": (1e-3, 2.0), "d": 1.5, "weight_decay": 0.1},
]


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_step_is_the_definition_s_in_fp64(shape, options):
    p = parameter(shape)
    optimizer = Adafactor([p], **options)
    state = optimizer.state[p]
    exact = options | {"eps": (options["eps"][0] or 2.0**-23, options["eps"][1])}
    for t in range(1, 12):
        before = p.detach().double().numpy()
        names = ("row_var", "col_var") if len(shape) > 1 else ("variance",)
        held = {name: state[name].double().numpy() if t > 1 else np.zeros(()) for name in names}
        p.grad = numbers(shape, t)
        if t < 3:
            p.grad *= 1e-6  # sums and roots below eps, and some above
        optimizer.step()
        wanted = oracles.adafactor(before, p.grad.double().numpy(), held, t, **exact)
        got = {"weight": p.detach(), **{name: state[name] for name in names}}
        assert wanted.keys() == got.keys()
        for key, (value, bound) in wanted.items():
            assert got[key].shape == value.shape
            error = np.abs(got[key].double().numpy() - value)
            assert (error <= bound).all(), f"step {t}: {key} off by {(error / bound).max()} bounds"
        assert state["step"] == t


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [*OPTIONS, {"maximize": True}, {"foreach": True}])
def test_twenty_steps_stay_close_to_torch_s(shape, options):
    p, q = parameter(shape), parameter(shape)
    ours, theirs = Adafactor([p], **options), torch.optim.Adafactor([q], **options)
    for step in range(20):
        p.grad = numbers(shape, step)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    # The size of a step is a norm of the weights, so that a relative difference grows with the
    # weights: 20 steps of at most 20 roundings, of the largest weight. Measured: 3e-7 of it.
    assert (p - q).abs().max() <= 400 * 2.0**-24 * max(1.0, q.abs().max().item())
    assert not torch.equal(p, parameter(shape))


def test_the_state_of_torch_s_adafactor_goes_on_here_and_back():
    p, q = parameter((30, 20)), parameter((30, 20))
    ours, theirs = Adafactor([p]), torch.optim.Adafactor([q])
    for step in range(6):
        if step == 2:
            ours.load_state_dict(through_a_file(theirs.state_dict()))
            p.data.copy_(q.detach())
        if step == 4:
            theirs.load_state_dict(through_a_file(ours.state_dict()))
        p.grad, q.grad = (numbers((30, 20), step) for _ in range(2))
        ours.step()
        theirs.step()
    assert theirs.state[q]["step"] == ours.state[p]["step"] == 6
    assert (p - q).abs().max() <= 4 * 20 * 2.0**-24 * q.abs().max()


@pytest.mark.parametrize("change", ["less", "shape"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change):
    p = parameter((30, 20))
    optimizer = Adafactor([p])
    feed(optimizer, 0)
    optimizer.step()
    before, state = everything(optimizer), optimizer.state_dict()
    state = {**state, "state": {0: {**state["state"][0], "col_var": torch.zeros(1, 30)}}}
    if change == "less":
        del state["state"][0]["col_var"]
    with pytest.raises(PrecisionError, match=r"\(30, 20\) has no col_var of shape \(1, 20\)"):
        optimizer.load_state_dict(state)
    assert_same(everything(optimizer), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"beta2_decay": 0.1}, "beta2_decay should be <= 0 but is: 0.1"),
        ({"eps": (0.0, 1e-3)}, "epsilon1 should be >= 0, here None or > 0, but is: 0.0"),
        ({"eps": (None, -1.0)}, "epsilon2 should be >= 0"),
        ({"d": 0.5}, "Clipping threshold d should be >= 1 but is: 0.5"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value"),
        ({"moments": "8bit"}, "moments='8bit': Adafactor keeps sums over rows and columns"),
        ({"moments": "bf16"}, "moments='bf16'.*allowed: fp32"),
        ({"update": "exact"}, "update='exact'; allowed: nearest, split"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(PrecisionError, match=message):
        Adafactor([parameter((3, 4))], **options)


def test_a_policy_with_low_moments_is_refused_by_name():
    optimizer = Adafactor([parameter((3, 4))])
    with pytest.raises(PrecisionError, match="moments='8bit': Adafactor keeps sums over rows"):
        optimizer.set_precision("split", "8bit")
    optimizer.set_precision("split", "fp32")
    assert optimizer.param_groups[0]["update"] == "split"
