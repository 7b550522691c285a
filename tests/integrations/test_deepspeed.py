"""An observer of DeepSpeed's engine, with a stand-in; tests/strangers runs the engine itself."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfstep.errors import NonFiniteError
from halfstep.integrations.deepspeed import StepObserver

pytestmark = pytest.mark.filterwarnings("ignore:DeepSpeed skips a step")


class Engine:
    """What the observer reads of an engine; it skips where the gradient is not finite."""

    def __init__(self, scale=1.0, least=None, checked=True):
        self.module, self.skipped_steps = nn.Linear(1, 1, bias=False), 0
        self.optimizer = SimpleNamespace(loss_scale=scale)
        if checked:
            self.optimizer.overflow = False
        self.optimizer.loss_scale_config = SimpleNamespace(min_loss_scale=least)
        self.least, self.norm = least, math.nan

    def _take_model_step(self, lr_kwargs=None):
        self.norm = float(self.module.weight.grad.norm())
        if hasattr(self.optimizer, "overflow"):
            self.optimizer.overflow = not math.isfinite(self.norm)
            self.skipped_steps += self.optimizer.overflow
            if self.optimizer.overflow and self.least:
                self.optimizer.loss_scale = max(self.least, self.optimizer.loss_scale / 2)

    def was_step_applied(self):
        return not getattr(self.optimizer, "overflow", False)

    def get_global_grad_norm(self):
        return self.norm

    def step(self, gradient):
        self.module.weight.grad = torch.full((1, 1), gradient)
        self._take_model_step(None)


def end_of(engine, gradients):
    """How a run ends, and the results of its steps."""
    observer, results = StepObserver(engine), []
    for gradient in gradients:
        try:
            engine.step(gradient)
        except NonFiniteError as error:
            return error, [*results, observer.last_step]
        results.append(observer.last_step)
    return None, results


def test_a_step_is_told_and_the_first_skip_is_said():
    with pytest.warns(UserWarning, match="skips a step at loss scale 8"):
        end, (one, two, three) = end_of(Engine(8.0, least=1.0), [2.0, math.inf, 3.0])
    assert end is None
    assert (one.applied, one.grad_norm, two.applied, two.reason) == (True, 2.0, False, "overflow")
    assert (two.next_loss_scale, three.loss_scale, three.skipped_total) == (4.0, 4.0, 1)


@pytest.mark.parametrize(
    ("engine", "steps", "cause"),
    [
        (Engine(), 3, "skip_limit"),  # bf16: no scale moves
        (Engine(64.0, least=8.0), 6, "skip_limit"),  # 64, 32, 16, and three at 8
        (Engine(checked=False), 1, "gradients"),  # a torch optimizer would apply them
    ],
)
def test_a_run_that_skips_for_ever_ends(engine, steps, cause):
    end, results = end_of(engine, [math.nan] * 9)
    assert (len(results), end.cause, end.parameters) == (steps, cause, ("weight",))
    assert "NaN in the gradients of weight" in str(end)


def test_skips_that_end_do_not_end_a_run():
    assert end_of(Engine(), [math.nan, math.nan, 1.0] * 9)[0] is None
    assert end_of(Engine(2.0**32, least=1.0), [math.inf] * 32 + [1.0])[0] is None


def test_a_step_that_was_applied_with_a_broken_norm_is_an_error():
    engine = Engine()
    engine.was_step_applied = lambda: True
    end, _ = end_of(engine, [1.0, math.nan])
    assert end.cause == "gradients"
    assert "has applied a step" in str(end)
