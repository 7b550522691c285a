"""Delayed scaling of fp8: products, histories and counts against explicit lists in NumPy."""

import copy
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import PrecisionError
from reference.blocks import quantize

POLICY = "fp8-delayed,simulate=yes"
INPUTS, OUTPUTS, TOKENS = 64, 32, 16
LENGTH = 3


def made(policy=POLICY, layers=1, **given):
    torch.manual_seed(0)
    sizes = [INPUTS, *([INPUTS] * (layers - 1)), OUTPUTS]
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    precision = halfstep.Precision(policy, model, optimizer, **given)
    if precision.clock.history:
        precision.clock.history.length = LENGTH
    return model, precision


def batch(number, size):
    """Magnitudes rise and fall from step to step, so that some saturate and the window matters."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(TOKENS, size, generator=generator) * size


SIZES = (1.0, 8.0, 0.5, 0.25, 2.0, 0.5, 16.0, 1.0)


class Oracle:
    """The definition: every amax of every applied step in a list, of which the last N count."""

    def __init__(self):
        self.steps = []

    def amax(self, operand, own):
        known = max((step[operand] for step in self.steps[-LENGTH:]), default=0.0)
        return known or own

    def rounded(self, operand, x):
        """The operand in fp64, rounded by NumPy, and how many magnitudes were clipped."""
        most = self.amax(operand, np.abs(x).max())
        element = "e5m2" if operand == "gradients" else "e4m3fn"
        return quantize(x, element, "amax", None, most)[2], int((np.abs(x) > most).sum())


def numbers(tensor):
    return tensor.detach().bfloat16().float().numpy()


def close(found, expected, terms):
    """As of every recipe: two roundings to bf16, one of its output, and those of fp32 sums."""
    return np.abs(found - expected) <= 2.2 * 2.0**-8 * np.abs(expected) + terms * 2.0**-22


@pytest.mark.parametrize("micro", [1, 2])
def test_products_scales_and_counts_are_those_of_the_definition(micro):
    model, precision = made()
    oracle, clipped = Oracle(), 0
    for step, size in enumerate(SIZES):
        counts, amaxes = {}, dict.fromkeys(("inputs", "weights", "gradients"), 0.0)
        weight = numbers(model[0].weight)
        for part in range(micro):
            x = (batch(10 * step + part, INPUTS) / INPUTS * size).requires_grad_()
            g = batch(900 + 10 * step + part, OUTPUTS) * size * 1e-4
            before = 0.0 if part == 0 else model[0].weight.grad.double().numpy().copy()
            with precision.autocast():
                y = model(x)
            precision.backward((y * g).sum())
            values = {"inputs": numbers(x), "weights": weight, "gradients": numbers(g)}
            exact = {}
            for operand, value in values.items():
                exact[operand], count = oracle.rounded(operand, value)
                counts[operand] = counts.get(operand, 0) + count
                amaxes[operand] = max(amaxes[operand], float(np.abs(value).max()))
            forward = exact["inputs"] @ exact["weights"].T
            sizes = {operand: np.abs(value).max() for operand, value in exact.items()}
            terms = sizes["inputs"] * sizes["weights"] * INPUTS
            assert close(y.detach().double().numpy(), forward, terms).all()
            terms = sizes["gradients"] * sizes["weights"] * OUTPUTS
            dx = x.grad.double().numpy()
            assert close(dx, exact["gradients"] @ exact["weights"], terms).all()
            # a second micro-batch is added in fp32
            dw = model[0].weight.grad.double().numpy() - before
            terms = sizes["gradients"] * sizes["inputs"] * TOKENS + 16 * np.abs(before).max()
            assert close(dw, exact["gradients"].T @ exact["inputs"], terms).all()
        result = precision.step()
        oracle.steps.append(amaxes)
        named = {f"0 {operand}": count for operand, count in counts.items() if count}
        assert result.saturated == named, step
        clipped += sum(named.values())
    assert clipped > 50


def take(model, precision, number, size, run=None):
    x = batch(number, INPUTS) / INPUTS * size
    with precision.autocast():
        y = model(x) if run is None else run(model, x.requires_grad_())
        loss = y.float().square().mean()
    return precision.step(loss)


def history(precision):
    return copy.deepcopy(precision.state_dict()["amax_history"])


def test_the_window_forgets_what_is_older():
    model, precision = made()
    seen = []
    for step, size in enumerate(SIZES):
        take(model, precision, step, size)
        x = batch(step, INPUTS) / INPUTS * size
        seen.append(float(x.bfloat16().abs().max()))
        kept = history(precision)["amaxes"]["0 inputs"]
        assert kept[0][1] == max(seen[-LENGTH:])
        assert len(kept) <= LENGTH


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: checkpoint(model, x, use_reentrant=False),
        lambda model, x: checkpoint(model, x, use_reentrant=True),
    ],
    ids=["checkpoint", "reentrant checkpoint"],
)
def test_a_forward_that_runs_again_counts_once(run):
    states = []
    for how in (None, run):
        model, precision = made(layers=2)
        results = [take(model, precision, n, size, how) for n, size in enumerate(SIZES)]
        weights = [p.detach().clone() for p in model.parameters()]
        states.append(([r.saturated for r in results], history(precision), weights))
    plain, again = states
    assert plain[:2] == again[:2]
    assert any(plain[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[2], again[2], strict=True))


def forward_alone(model, precision):
    with precision.autocast():
        model(batch(50, INPUTS))


def evaluation(model, precision):
    model.eval()
    with torch.inference_mode():
        forward_alone(model, precision)
    model.train()


def cleared(model, precision):
    with precision.autocast():
        loss = model(batch(50, INPUTS)).square().mean()
    precision.backward(loss)
    model.zero_grad()


def attack(model, precision):
    x = batch(50, INPUTS).requires_grad_()
    with precision.autocast():
        loss = model(x).square().mean()
    precision.backward(loss, inputs=x)


def failed(model, precision):
    with precision.autocast():
        loss = model(batch(50, INPUTS).requires_grad_()).square().mean()
    handle = model[0].weight.register_hook(lambda _: 1 / 0)  # when the layer's products are made
    with pytest.raises(ZeroDivisionError):
        precision.backward(loss)
    handle.remove()
    model.zero_grad()


def skipped(model, precision):
    with precision.autocast():
        loss = model(batch(50, INPUTS)).square().mean()
    precision.backward(loss)
    model[0].weight.grad[0, 0] = torch.inf
    assert not precision.step().applied


@pytest.mark.filterwarnings("ignore:the step is left out:UserWarning")
@pytest.mark.parametrize("between", [forward_alone, evaluation, attack, cleared, failed, skipped])
def test_what_trains_nothing_leaves_no_trace(between):
    """Magnitudes 64 times as large, between two steps."""
    states = []
    for disturbed in (False, True):
        model, precision = made(on_nonfinite="skip:5")
        take(model, precision, 0, 1.0)
        if disturbed:
            between(model, precision)
        result = take(model, precision, 1, 2.0)
        states.append((history(precision)["amaxes"], result.saturated, model[0].weight.tolist()))
    assert states[0] == states[1]
    assert states[0][1]


@pytest.mark.parametrize("only", [False, True], ids=["two losses", "an attack before"])
def test_each_backward_through_one_forward_counts_its_own_gradients(only):
    model, precision = made()
    x = batch(0, INPUTS).requires_grad_()
    with precision.autocast():
        total = model(x).float().sum()
    precision.backward(total / 8, retain_graph=True, inputs=x if only else None)
    precision.backward(total * 2)
    precision.step()
    assert history(precision)["amaxes"]["0 gradients"] == [[1, 2.0]]


def test_a_roll_back_takes_the_history_along():
    model, precision = made(on_nonfinite="rollback:1")
    for number in range(2):
        before = history(precision)
        take(model, precision, number, 1.0)
    with precision.autocast():
        loss = model(batch(50, INPUTS)).square().mean()
    precision.backward(loss)
    model[0].weight.grad[0, 0] = torch.inf
    with pytest.warns(UserWarning, match="back to a copy"):
        assert precision.step().rolled_back
    assert history(precision) == before


def test_a_layer_that_no_gradient_reaches_is_scaled_by_its_own_magnitudes():
    model, precision = made("bf16-mixed,recipe=fp8-delayed,simulate=yes", layers=2)
    model[0].requires_grad_(False)
    other, current = made("bf16-mixed,rules=0:fp8|1:fp8-delayed,simulate=yes", layers=2)
    other[0].requires_grad_(False)
    for number, size in enumerate(SIZES):
        found = take(model, precision, number, size), take(other, current, number, size)
        assert found[0] == found[1]
        assert not any(name.startswith("0 ") for name in found[0].saturated)


def test_a_state_goes_through_json_and_a_damaged_one_changes_nothing():
    model, precision = made()
    for number, size in enumerate(SIZES):
        take(model, precision, number, size)
    state = precision.state_dict()
    again = json.loads(json.dumps(state))
    other, resumed = made()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(again)
    assert history(resumed) == state["amax_history"]
    first, second = (take(m, p, 99, 3.0) for m, p in ((model, precision), (other, resumed)))
    assert first == second
    rising, later = [[1, 2.0], [2, 3.0]], [[3, 1.0]]
    amaxes = [3, *({"0 inputs": pairs} for pairs in (rising, later, [[1, float("nan")]], 3, [1]))]
    for damaged in ("text", {"steps": 1}, *({"steps": 2, "amaxes": each} for each in amaxes)):
        before = history(resumed)
        with pytest.raises(PrecisionError, match="amax_history"):
            resumed.load_state_dict({**again, "amax_history": damaged})
        assert history(resumed) == before


def test_another_recipe_begins_without_a_history():
    model, precision = made("mxfp8,simulate=yes")
    take(model, precision, 0, 1.0)
    state = precision.state_dict()
    assert "amax_history" not in state
    _, other = made()
    other.load_state_dict(state, weights=model.state_dict())
    assert history(other) == {"steps": 0, "amaxes": {f"0 {o}": [] for o in
                              ("inputs", "weights", "gradients")}}  # fmt: skip


def test_a_closure_takes_one_step_of_the_history():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    precision = halfstep.Precision(POLICY, model, optimizer)

    def closure():
        optimizer.zero_grad()
        with precision.autocast():
            loss = model(batch(0, INPUTS) / INPUTS).square().mean()
        precision.backward(loss)
        return loss

    assert precision.step(closure).applied
    assert history(precision)["steps"] == 1
    assert len(history(precision)["amaxes"]["0 gradients"]) == 1


def test_a_copy_on_another_device_leaves_the_run_its_limits():
    """A model that trains on a GPU may be copied to a CPU to be evaluated there."""
    model, precision = made()
    take(model, precision, 0, 1.0)
    history = precision.clock.history
    of_copy, elsewhere = history.for_copy(), torch.device("meta")
    here = torch.device("cpu")
    for found in (of_copy, history):
        assert found.limit("0 inputs", elsewhere).device == elsewhere
        assert found.limit("0 inputs", here).device == here
