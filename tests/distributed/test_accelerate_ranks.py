"""halfstep's scaler under Accelerate's data parallelism: ranks stop together."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from unittest import mock

import pytest
import torch
from torch import nn

from halfstep.errors import NonFiniteError
from halfstep.integrations.accelerate import attach

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


@pytest.fixture(autouse=True)
def packages():
    """Imported when these tests run, not where they are collected."""
    pytest.importorskip("accelerate")


def accelerator(**options):
    return importlib.import_module("accelerate").Accelerator(cpu=True, **options)


@contextlib.contextmanager
def launched(rank):
    """What a launcher tells a process, for Accelerate; the process group stands already."""
    environment = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    with mock.patch.dict(os.environ, environment):
        try:
            yield
        finally:
            state = importlib.import_module("accelerate.state")
            state.AcceleratorState._shared_state.clear()
            state.PartialState._shared_state.clear()
            state.GradientState._reset_state()


def train_bf16(rank, value):
    """In step 1 the loss of rank 0 is broken; gradients are reduced, so everybody's are."""
    with launched(rank):
        acc = accelerator(mixed_precision="bf16")
        scaler = attach(acc)
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        told = []
        for step in range(3):
            draw = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(6, 4, generator=draw)).square().mean()
            acc.backward(loss * (value if (step, rank) == (1, 0) else 1.0))
            try:
                optimizer.step()
            except NonFiniteError as error:
                return told, error.cause, str(error).startswith("rank 0's loss is")
            optimizer.zero_grad()
            told.append((acc.optimizer_step_was_skipped, scaler.last_step.next_loss_scale))
        return told, [p.detach().clone() for p in model.parameters()], scaler.skipped_total


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_broken_loss_of_one_rank_stops_all_in_bf16(pool2, value):
    first, second = pool2.run(train_bf16, value=value)
    assert first == ([(False, 1.0)], "forward", True)
    assert second == ([(False, 1.0)], "forward", True)
