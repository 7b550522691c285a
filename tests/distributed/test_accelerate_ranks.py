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
                return told, error.cause, "not finite on another rank" in str(error)
            optimizer.zero_grad()
            told.append((acc.optimizer_step_was_skipped, scaler.last_step.next_loss_scale))
        return told, [p.detach().clone() for p in model.parameters()], scaler.skipped_total


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_broken_loss_of_one_rank_stops_all_in_bf16(pool2, value):
    first, second = pool2.run(train_bf16, value=value)
    assert first == ([(False, 1.0)], "forward", False)
    assert second == ([(False, 1.0)], "forward", True)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "labels": 0.0}


class Regression(nn.Module):
    """Its loss is NaN on one rank in one step."""

    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.rank, self.calls = rank, 0

    def forward(self, x, labels):
        self.calls += 1
        loss = self.linear(x).square().mean()
        return {"loss": loss * math.nan if (self.calls, self.rank) == (3, 1) else loss}


def trainer_of(model, rows, **options):
    """The Trainer of transformers, which takes the rows in their order, with halfstep attached."""
    transformers = importlib.import_module("transformers")

    class Ordered(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    attached = {key: options.pop(key) for key in ("scaler", "folder") if key in options}
    arguments = transformers.TrainingArguments(
        use_cpu=True, report_to=[], max_steps=5, per_device_train_batch_size=4, save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    trainer = Ordered(model, arguments, train_dataset=rows)
    assert trainer.accelerator.num_processes == 2
    importlib.import_module("halfstep.integrations.hf_trainer").attach(trainer, **attached)
    return trainer


def run_trainer(rank, folder, scaler):
    with launched(rank):
        torch.manual_seed(0)
        trainer = trainer_of(Regression(rank), Rows(), output_dir=folder, scaler=scaler)
        try:
            trainer.train()
        except NonFiniteError as error:
            weights = [p.detach().clone() for p in trainer.model.parameters()]
            return error.cause, str(error), trainer.state.global_step, weights
        return None


@pytest.mark.slow
@pytest.mark.parametrize("scaler", [False, True])
def test_a_nan_loss_on_one_rank_stops_all(pool2, tmp_path, scaler):
    first, second = pool2.run(run_trainer, folder=str(tmp_path), scaler=scaler)
    assert first[0] == second[0] == "forward"
    assert "step 3: the loss of another rank is not finite" in first[1]
    assert "step 3: the loss is nan: the forward pass or the data" in second[1]
    assert first[2] == second[2] == 2
    assert all(torch.equal(a, b) for a, b in zip(first[3], second[3], strict=True))
