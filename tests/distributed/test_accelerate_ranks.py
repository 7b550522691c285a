"""halfstep's scaler under Accelerate's data parallelism: ranks skip together and stay alike."""

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


BROKEN = {1: (0,), 3: (0, 1)}  # by step: ranks whose batch is not finite


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


def train(rank, init_scale):
    with launched(rank):
        acc = accelerator(gradient_accumulation_steps=2)
        assert (acc.num_processes, acc.distributed_type.name) == (2, "MULTI_CPU")
        scaler = attach(acc, init_scale=init_scale)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        model, optimizer, rates = acc.prepare(model, optimizer, rates)
        seen = []
        for step in range(5):
            for part in range(2):
                draw = torch.Generator().manual_seed(100 * step + 10 * part + rank)
                rows = torch.randn(6, 4, generator=draw)
                if part == 0 and rank in BROKEN.get(step, ()):
                    rows *= math.inf
                with acc.accumulate(model):
                    acc.backward(model(rows).square().mean())
                    if acc.sync_gradients:
                        acc.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    rates.step()
                    optimizer.zero_grad()
            seen.append((acc.optimizer_step_was_skipped, scaler.get_scale()))
        weights = [p.detach().clone() for p in model.parameters()]
        names = scaler._names.values()
        return seen, weights, rates.get_last_lr(), sorted(names)


def test_ranks_skip_together_and_stay_alike(pool2):
    (seen, weights, rates, names), other = pool2.run(train, init_scale=2.0**8)
    assert seen == other[0]
    assert [skipped for skipped, _ in seen] == [step in BROKEN for step in range(5)]
    assert seen[-1][1] == seen[0][1] / 4
    assert all(torch.equal(a, b) for a, b in zip(weights, other[1], strict=True))
    # Accelerate moves a schedule on by the number of processes: two for each of three steps
    assert rates == other[2] == [pytest.approx(0.1 / (1 + 2 * 3))]
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]


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
