"""halfstep.Trainer over several ranks: a user's own module by the same program."""

import threading
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn import functional

import halfstep
from halfstep.distributed import ParallelPlan
from halfstep.trainer import checkpoint, loop
from halfstep.trainer.checkpoint import list_checkpoints, load_checkpoint

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Two layers, and a buffer that each rank moves by its own rows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean()
        return self.second(functional.gelu(self.first(x)))


def items():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator)
    return [(row, row[:3].argmax()) for row in x]


def train(rank, path, seed=0, plan=False, resume=False, stop=0, disk=None, fails=False, **settings):
    torch.manual_seed(seed + rank)  # each rank makes another model; rank 0's counts
    model = Net()

    def watch(tick):
        if disk and tick.record.step == 2:
            assert not list_checkpoints(path / "checkpoints")
            disk.set()
            assert not fails or 1 / 0
        if tick.record.step == stop - 1 and rank == 1:  # one rank's word is enough
            trainer.stop()

    trainer = halfstep.Trainer(
        model, items(), lambda m, b: functional.cross_entropy(m(b[0]), b[1]),
        val_data=items()[:9], batch_size=8, max_steps=6, eval_every=3, save_every=2, keep=9,
        device="cpu", quiet=True, output_dir=str(path), learning_rate=1e-2,
        callbacks=[watch], plan=ParallelPlan(blocks=(model.first, model.second)) if plan else None,
        **{"precision": "fp32", "grad_accum": 2, **settings},
    )  # fmt: skip
    trained = trainer.train(resume=resume)
    return trained.step, trained.best.loss


def train_ahead(rank, path, **settings):
    """Where the first save waits for rank 1's disk until its step is over."""
    disk, real = threading.Event(), checkpoint.make_lasting

    def lasting(where, sha):
        assert rank == 0 or disk.wait(60)
        real(where, sha)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "make_lasting", lasting)
        patch.setattr(loop, "STILL_SECONDS", 0.0)
        return train(rank, path, disk=disk, **settings)


def train_till_an_error(rank, path, gone):
    """Where all ranks fail in the callback of step 2; one may be gone before its disk is ready."""
    with pytest.MonkeyPatch.context() as patch:
        if gone:
            patch.setattr(checkpoint, "_LAST_WORD", timedelta(seconds=0.1))
        if gone and rank == 1:
            patch.setattr(checkpoint.Save, "alone", lambda _: None)
        with pytest.raises(ZeroDivisionError):
            train_ahead(rank, path, fails=True)


def newest(path):
    return load_checkpoint(list_checkpoints(path / "checkpoints")[-1])


@pytest.mark.covering(ends=True)
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (
            {"parallel": "shard=2", "ema_decay": 0.9, "precision": "bf16-mixed"},
            {"seen/buffer", "first.weight/ema"},
        ),
        (
            {"parallel": "shard=2", "precision": "bf16-split,moments=8bit"},
            {"first.weight/exp_avg_sq", "second.weight/step"},
        ),
        (
            {
                **{"parallel": "data=2", "precision": "bf16-split,moments=8bit"},
                "optimizer": "muon",
            },
            {"first.weight/momentum_buffer", "second.weight/step"},
        ),
    ],
)
def test_a_resume_on_two_ranks_is_bit_for_bit(pool2, tmp_path, settings, kept):
    settings = {**settings, "plan": True}
    pool2.run(train, path=tmp_path / "whole", **settings)
    ends = pool2.run(train_ahead, path=tmp_path / "cut", stop=4, **settings)
    assert len(list_checkpoints(tmp_path / "cut" / "checkpoints")) == 3
    assert [step for step, _ in ends] == [4, 4]
    pool2.run(train, path=tmp_path / "cut", resume=True, seed=5, **settings)
    a, b = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert kept <= a.optimizer.keys()
    for one, two in ((a.weights, b.weights), (a.optimizer, b.optimizer)):
        assert one.keys() == two.keys()
        for name in one:
            assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("gone", [False, True])
def test_a_save_whose_ranks_fail_is_complete_if_all_have_written_it(pool2, tmp_path, gone):
    pool2.run(train_till_an_error, path=tmp_path / "r", gone=gone)
    kept = list_checkpoints(tmp_path / "r" / "checkpoints")
    assert [path.name for path in kept] == ([] if gone else ["step-00000002"])
