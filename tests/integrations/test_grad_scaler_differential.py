"""halfstep.GradScaler with its options off IS torch.amp.GradScaler: random programs in lock-step.

``lockstep.py`` describes the programs.
"""

from __future__ import annotations

import pytest
import torch

from halfstep import GradScaler
from integrations.lockstep import first_difference, outcome

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
