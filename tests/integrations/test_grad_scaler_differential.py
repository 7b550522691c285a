"""halfstep.GradScaler with its options off IS torch.amp.GradScaler: random programs in lock-step.

``lockstep.py`` describes the programs. Below, faults are planted in copies of the scaler, one of
each kind at a time, to show that the same programs would find them.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.amp.grad_scaler import OptState

from halfstep import GradScaler
from integrations.lockstep import first_difference
from integrations.scaler_side import outcome

PROGRAMS = 480
TORCH = torch.amp.GradScaler


@pytest.mark.parametrize(
    "start",
    [pytest.param(n, marks=() if n < 60 else pytest.mark.slow) for n in range(0, PROGRAMS, 60)],
)
def test_random_programs_give_what_torch_gives(start):
    for seed in range(start, start + 60):
        assert first_difference(TORCH, GradScaler, seed) is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enabled": False},
        {"device": "cpu", "growth_factor": 1.0},
        {"device": "cpu", "backoff_factor": 1.0},
        {"device": "cpu", "init_scale": 2.0**-130},
        {"device": "cpu", "nonsense": 1},
    ],
)
def test_construction_is_torchs_too(options):
    def numbers(scaler_class):
        scaler = scaler_class(**options)
        return scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()

    assert outcome(lambda: numbers(GradScaler)) == outcome(lambda: numbers(TORCH))


def test_positional_arguments_are_torchs():
    assert isinstance(GradScaler("cpu"), TORCH)
    arguments = ("cpu", 8.0, 4.0, 0.25, 7, True)
    assert GradScaler(*arguments).state_dict() == TORCH(*arguments).state_dict()


class GrowsOneStepLate(GradScaler):
    def _torch_update(self, new_scale):
        interval = self._growth_interval if self._enabled else None
        if interval is not None:
            self._growth_interval = interval + 1
        try:
            super()._torch_update(new_scale)
        finally:
            if interval is not None:
                self._growth_interval = interval


class LooksAtOneDeviceOnly(GradScaler):
    def _maybe_opt_step(self, optimizer, state, *args, **kwargs):
        first = dict(list(state["found_inf_per_device"].items())[:1])
        state = {**state, "found_inf_per_device": first}
        return super()._maybe_opt_step(optimizer, state, *args, **kwargs)


class LoadForgetsTheTracker(GradScaler):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict and {**state_dict, "_growth_tracker": 0})


class LosesTheReturnedValue(GradScaler):
    def step(self, optimizer, *args, **kwargs):
        super().step(optimizer, *args, **kwargs)


class DropsClosures(GradScaler):
    def step(self, optimizer, *args, closure=None, **kwargs):
        return super().step(optimizer, *args, **kwargs)


class OverlooksSparseGradients(GradScaler):
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        hidden = {p: p.grad for p in owned if p.grad is not None and p.grad.is_sparse}
        for p in hidden:
            p.grad = None
        try:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        finally:
            for p, gradient in hidden.items():
                p.grad = gradient


class MayStepTwice(GradScaler):
    def step(self, optimizer, *args, **kwargs):
        value = super().step(optimizer, *args, **kwargs)
        if self._enabled:
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
        return value


class TurnsListsIntoTuples(GradScaler):
    def scale(self, outputs):
        scaled = super().scale(outputs)
        return tuple(scaled) if isinstance(scaled, list) else scaled


class WarnsOnOverflow(GradScaler):
    def step(self, optimizer, *args, **kwargs):
        value = super().step(optimizer, *args, **kwargs)
        if self.last_step is not None and not self.last_step.applied:
            warnings.warn("skipped", stacklevel=2)
        return value


class RaisesAnotherType(GradScaler):
    def update(self, new_scale=None):
        try:
            super().update(new_scale)
        except AssertionError as error:
            raise RuntimeError(str(error)) from None


class CopiesInMidStep(GradScaler):
    def __getstate__(self):
        if self._enabled:
            self._per_optimizer_states.clear()
        return super().__getstate__()


FAULTS = [c for c in GradScaler.__subclasses__() if c.__module__ == __name__]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_differential_test_catches_planted_faults(fault):
    caught = (seed for seed in range(PROGRAMS) if first_difference(TORCH, fault, seed) is not None)
    assert next(caught, None) is not None
