"""halfstep.GradScaler with its options off IS torch.amp.GradScaler: random programs in lock-step.

``lockstep.py`` describes the programs. Below, faults are planted in copies of the scaler, one at a
time, to show that the same programs would find them.
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
    [pytest.param(n, marks=() if n < 120 else pytest.mark.slow) for n in range(0, PROGRAMS, 60)],
)
def test_random_programs_give_what_torch_gives(start):
    for seed in range(start, start + 60):
        assert first_difference(TORCH, GradScaler, seed) is None


def test_it_is_torchs_scaler_to_isinstance():
    assert isinstance(GradScaler("cpu"), TORCH)


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


class UnscalesTwice(GradScaler):
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        return super()._unscale_grads_(optimizer, inv_scale * inv_scale, found_inf, allow_fp16)


class ForgetsToResetOptimizers(GradScaler):
    def _torch_update(self, new_scale):
        states = self._per_optimizer_states if self._enabled else None
        super()._torch_update(new_scale)
        if states is not None:
            self._per_optimizer_states = states


class LooksAtOneDeviceOnly(GradScaler):
    def _maybe_opt_step(self, optimizer, state, *args, **kwargs):
        first = dict(list(state["found_inf_per_device"].items())[:1])
        state = {**state, "found_inf_per_device": first}
        return super()._maybe_opt_step(optimizer, state, *args, **kwargs)


class AdaptsToOneOptimizerOnly(GradScaler):
    def _torch_update(self, new_scale):
        if self._enabled:
            for state in list(self._per_optimizer_states.values())[1:]:
                for flag in state["found_inf_per_device"].values():
                    flag.zero_()
        super()._torch_update(new_scale)


class StateMissesAKey(GradScaler):
    def state_dict(self):
        return {k: v for k, v in super().state_dict().items() if k != "backoff_factor"}


class StateHasAKeyTooMany(GradScaler):
    def state_dict(self):
        return {**super().state_dict(), "halfstep": {}}


class LoadForgetsTheTracker(GradScaler):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict and {**state_dict, "_growth_tracker": 0})


class LoadForgetsALiveScale(GradScaler):
    def load_state_dict(self, state_dict):
        kept = self._scale.clone() if self._enabled and self._scale is not None else None
        super().load_state_dict(state_dict)
        if kept is not None:
            self._scale.copy_(kept)


class KeepsTheTrackerOnOverflow(GradScaler):
    def _torch_update(self, new_scale):
        live = self._enabled and self._growth_tracker is not None
        before = self._growth_tracker.clone() if live else None
        super()._torch_update(new_scale)
        if live and new_scale is None and self._growth_tracker == 0:
            self._growth_tracker.copy_(before)


class StepsOnInfinity(GradScaler):
    def _maybe_opt_step(self, optimizer, state, *args, **kwargs):
        super()._maybe_opt_step(optimizer, state, *args, **kwargs)
        return optimizer.step(*args, **kwargs) if self._host_flag else None


class LosesTheReturnedValue(GradScaler):
    def step(self, optimizer, *args, **kwargs):
        super().step(optimizer, *args, **kwargs)


class FusedSeesNoOverflow(GradScaler):
    def _check_inf_per_device(self, optimizer):
        found = super()._check_inf_per_device(optimizer)
        for flag in found.values():
            flag.zero_()
        return found


class DropsClosures(GradScaler):
    def step(self, optimizer, *args, closure=None, **kwargs):
        return super().step(optimizer, *args, **kwargs)


class UnscalesHalfGradients(GradScaler):
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


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


class HasAFloorUnasked(GradScaler):
    def _torch_update(self, new_scale):
        super()._torch_update(new_scale)
        if self._enabled:
            self._scale.clamp_(min=2.0**-126)


class IgnoresANewScaleTensor(GradScaler):
    def update(self, new_scale=None):
        super().update(None if isinstance(new_scale, torch.Tensor) else new_scale)


class MayBeUnscaledTwice(GradScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if self._enabled and not self._stepping:
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY


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


class CopiesForgetTheScale(GradScaler):
    def __getstate__(self):
        return {**super().__getstate__(), "_init_scale": 65536.0} if self._enabled else (
            super().__getstate__())  # fmt: skip


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
