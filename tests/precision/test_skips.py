"""Steps that must not happen: nothing changes, the reason is named, and hopeless runs stop.

The grid of injected infinities follows apex tests/L0/run_amp/test_multiple_models_optimizers_losses
(each step x each micro-batch x each parameter).
"""

import contextlib
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from halfstep import NonFiniteError, Precision, PrecisionError
from reference.training import (
    CPU_POLICIES,
    DYNAMIC,
    OPTIMIZERS,
    batches,
    differences,
    mlp,
    mse,
    scaled,
    snapshot,
)

INF, NAN = math.inf, math.nan
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
MICRO = 2


class Loop:
    """A training loop with two micro-batches a step, into which a bad gradient can be injected."""

    def __init__(self, spec: str, optimizer: str = "adamw-loop") -> None:
        self.model = mlp()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.precision = Precision(spec, self.model, self.optimizer)

    @contextlib.contextmanager
    def bad(self, name: str, value: float):
        """While open, the last element of this parameter's gradient is ``value``."""

        def spoil(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[-1] = value
            return gradient

        handle = self.model.get_parameter(name).register_hook(spoil)
        yield
        handle.remove()

    def step(self, data, inject=None, **options):
        """One step over two micro-batches; ``inject`` is (micro-batch, [(name, value), ...])."""
        for i, (x, y) in enumerate(data):
            with self.precision.autocast():
                loss = mse(self.model(x), y) / MICRO
            with contextlib.ExitStack() as stack:
                for name, value in inject[1] if inject and inject[0] == i else ():
                    stack.enter_context(self.bad(name, value))
                self.precision.backward(loss)
        return self.precision.step(**options)

    def state(self):
        return snapshot(self.model, self.optimizer, self.precision)


STEPS = [batches(MICRO, seed=s) for s in range(3)]
EVERYWHERE = list(itertools.product(range(MICRO), NAMES, (INF, NAN)))
FIRST_AND_LAST = [(0, "0.weight", -INF), (MICRO - 1, "2.bias", NAN)]


def bad_step(loop: Loop, name: str, data, micro: int, parameter: str, value: float) -> None:
    """One step with one bad gradient, and everything that must be true of it."""
    precision = loop.precision
    before = loop.state()
    scale = precision.loss_scale.state_dict()
    total, row = precision.progress.skipped_total, precision.progress.skipped_in_a_row
    if name in DYNAMIC:
        result = loop.step(data, (micro, [(parameter, value)]), max_norm=1.0)
        assert result.applied is False
        assert result.reason == ("nan_gradients" if math.isnan(value) else "overflow")
        assert result.nonfinite_parameters == (parameter,)
        assert (result.loss_scale, result.next_loss_scale) == (1024.0, 512.0)
        assert (result.skipped_total, result.skipped_in_a_row) == (total + 1, row + 1)
        assert not math.isfinite(result.grad_norm)
        assert math.isfinite(result.loss)
    else:
        message = f"gradients of {parameter} under a finite .* no loss scale to lower; the weights"
        with pytest.raises(NonFiniteError, match=message) as caught:
            loop.step(data, (micro, [(parameter, value)]), max_norm=1.0)
        assert caught.value.cause == "gradients"
        assert caught.value.parameters == (parameter,)
        assert parameter in str(caught.value)
    assert differences(before, loop.state()) == []
    assert all(p.grad is None for group in loop.optimizer.param_groups for p in group["params"])
    precision.loss_scale.load_state_dict(scale)  # the next one starts from the same scale


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CPU_POLICIES)
def test_one_bad_gradient_anywhere_changes_nothing_now_or_later(name, optimizer):
    spec = scaled(name, init_scale=2**10)
    loop, clean = Loop(spec, optimizer), Loop(spec, optimizer)
    grid = EVERYWHERE if optimizer == "adamw-loop" else FIRST_AND_LAST
    for i, data in enumerate(STEPS):
        for place in grid:
            bad_step(loop, name, data, *place)
        result = loop.step(data)
        expected = clean.step(data)
        assert result.applied
        assert result.skipped_in_a_row == 0
        assert result.skipped_total == len(grid) * (i + 1)  # counted in every precision
        assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
        assert differences(clean.state(), loop.state()) == []


# --- hopeless runs stop ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", CPU_POLICIES)
def test_a_loss_that_is_not_finite_stops_at_once_and_leaves_the_scale_alone(name, value):
    loop = Loop(scaled(name, init_scale=2**10))
    loop.step(STEPS[0])
    before = loop.state()
    for _ in range(2):
        with loop.precision.autocast():
            loss = mse(loop.model(STEPS[1][0][0]), STEPS[1][0][1]) * value
        loop.precision.backward(loss)
        with pytest.raises(NonFiniteError, match=r"no loss scale can help.*weights are unch") as e:
            loop.precision.step()
        assert e.value.cause == "forward"
        assert differences(before, loop.state()) == []
    assert loop.precision.loss_scale.value == (1024.0 if name in DYNAMIC else 1.0)
    assert loop.step(STEPS[1]).applied


def test_a_finite_loss_beyond_fp32_only_when_scaled_is_an_overflow_and_no_forward_error():
    loop = Loop(scaled("fp16-mixed", init_scale=2**16))
    x, y = STEPS[0][0]
    with loop.precision.autocast():
        loss = mse(loop.model(x), y) * 1e35
    assert loss.isfinite()
    result = loop.precision.step(loss)
    assert (result.applied, result.reason is None) == (False, False)
    assert result.next_loss_scale == 2.0**15
    assert math.isfinite(result.loss)


@pytest.mark.parametrize("name", DYNAMIC)
def test_nan_gradients_under_a_finite_loss_back_off_and_stop_at_the_floor(name):
    loop, bad = Loop(scaled(name, init_scale=8, min_scale=2)), (1, [("0.weight", NAN)])
    before = loop.state()
    for i, (scale, after) in enumerate([(8.0, 4.0), (4.0, 2.0)]):
        result = loop.step(STEPS[0], bad)
        assert (result.applied, result.reason) == (False, "nan_gradients")
        assert (result.loss_scale, result.next_loss_scale) == (scale, after)
        assert result.nonfinite_parameters == ("0.weight",)
        assert result.skipped_in_a_row == i + 1
    with pytest.raises(NonFiniteError, match=r"NaN .* smallest loss scale 2: .*unchan") as caught:
        loop.step(STEPS[0], bad)
    assert (caught.value.cause, caught.value.parameters) == ("loss_scale_floor", ("0.weight",))
    assert "0.weight" in str(caught.value)
    assert loop.precision.loss_scale.value == 2.0
    assert differences(before, loop.state()) == []


def test_a_static_scale_skips_and_stops_at_the_limit():
    spec = "compute=fp16,scale=static,init_scale=256,max_consecutive_skips=2"
    loop = Loop(spec)
    bad = (0, [("0.bias", INF)])
    result = loop.step(STEPS[0], bad)
    assert (result.applied, result.loss_scale, result.next_loss_scale) == (False, 256.0, 256.0)
    assert loop.step(STEPS[0]).applied
    loop.step(STEPS[0], bad)
    with pytest.raises(NonFiniteError) as caught:
        loop.step(STEPS[0], bad)
    assert caught.value.cause == "skip_limit"


def test_an_error_inside_the_optimizer_is_passed_on_and_leaves_no_gradients():
    loop = Loop("fp32")

    def fail() -> None:
        raise KeyError("from the optimizer")

    loop.optimizer.step = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="from the optimizer"):
        loop.step(STEPS[0])
    assert all(p.grad is None for p in loop.model.parameters())
    with pytest.raises(PrecisionError, match=r"step\(\) without backward"):
        loop.precision.step()


@pytest.mark.parametrize("name", ["fp16-master", "fp16-pure"])
def test_a_weight_that_grew_beyond_fp16_is_named_when_the_run_stops(name):
    # 60000 + 10000 is no fp16 number: the weight becomes inf, and so does the next loss. To blame
    # "the forward pass or the data" and to call the weights unchanged would send the user astray.
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(60000.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    precision = Precision(scaled(name, init_scale=1), model, optimizer)

    def two_steps() -> None:
        for _ in range(2):
            with precision.autocast():
                loss = -1e4 * model(torch.ones(1, 1)).float().sum()
            precision.step(loss)

    with pytest.raises(NonFiniteError) as caught:
        two_steps()
    assert "weight" in caught.value.parameters
