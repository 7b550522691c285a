"""Classification on several ranks: the same numbers as one process, and one rank that writes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from tests.trainer.classifiers import (
    checkpoint_of,
    classify_config,
    column,
    metrics,
    whole_run,
    write_bert,
    write_files,
)

from halfstep.distributed.world import World
from halfstep.trainer import loop
from halfstep.trainer.loop import train
from halfstep.trainer.run import create_run, finish_run, with_run_folder
from halfstep.trainer.session import open_session
from halfstep.trainer.tasks import classify as classify_task

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return str(write_bert(tmp_path_factory.mktemp("bert") / "b"))


@contextmanager
def lean():
    """Without the measurement of the matrix rate, and without pictures."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def forbidden(*_, **__):
    raise AssertionError("rank 0 only")


def run_here(rank, files, path, overrides):
    """A rank's whole run; what its evaluations found, and its best step."""
    world = World.around_group()
    with lean() as patch:
        if rank:
            patch.setattr(classify_task, "report_table", forbidden)
            patch.setattr("halfstep.trainer.tasks.epochs.new_folder", forbidden)
            patch.setattr(loop, "append_line", forbidden)
        config = with_run_folder(classify_config(files, **overrides), path)
        session = open_session(config, world=world)
        folder = world.main_only(lambda: create_run(path, session))
        try:
            ticks = list(train(session, path))
            world.main_only(lambda: finish_run(session, path))
        finally:
            if folder is not None:
                folder.close()
    told = [(t.record.step, t.evaluation.confusion) for t in ticks if t.evaluation]
    return told, session.best.step, ticks[-1].stopped_by


def alone(files, path, **overrides):
    with lean():
        return whole_run(classify_config(files, **overrides), path)


def assert_equal(path, one):
    assert metrics_without_layout(path) == metrics_without_layout(one)
    a, b = checkpoint_of(path), checkpoint_of(one)
    for mine, theirs in ((a.weights, b.weights), (a.optimizer, b.optimizer)):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name


def metrics_without_layout(path):
    """All but traffic, and what is computed from the whole gradient or evaluated in other batches.

    Micro-batches of one process evaluate half as many rows at a time as two ranks do.
    """
    other = {"grad_norm", "val_loss"}
    return [{k: v for k, v in line.items() if k not in other} for line in metrics(path)]


@pytest.mark.parametrize(
    ("precision", "source"),
    [
        pytest.param("fp32", "scratch:tiny", marks=pytest.mark.slow),
        ("bf16-split", "bert"),
        ("params=fp32,compute=fp16,scale=dynamic,init_scale=16777216,growth_interval=3", "bert"),
    ],
)
def test_two_ranks_are_two_micro_batches(pool2, files, bert, tmp_path, precision, source):
    overrides = {
        "precision": precision,
        "model__source": bert if source == "bert" else source,
    }
    pool2.run(run_here, files=files, path=tmp_path / "two", overrides=overrides)
    alone(files, tmp_path / "one", **overrides, run__grad_accum=2)
    assert_equal(tmp_path / "two", tmp_path / "one")
    # the mean over 41 texts in other batches: some ulp, of bf16 or fp16 where that computes
    rel = 1e-5 if precision == "fp32" else 2e-2
    two, one = column(tmp_path / "two", "val_loss"), column(tmp_path / "one", "val_loss")
    assert two == pytest.approx(one, rel=rel)
    if "init_scale" in precision:
        assert metrics(tmp_path / "two")[-1]["skipped_total"] > 0


@pytest.mark.parametrize("precision", ["bf16-split", "bf16-mixed"])
def test_sharded_ranks_leave_a_model_of_masters(pool2, files, bert, tmp_path, precision):
    load_file = pytest.importorskip("safetensors.torch").load_file
    overrides = {"precision": precision, "model__source": bert, "run.parallel": "shard=2",
                 "run__max_steps": 3}  # fmt: skip
    ((_, best, _), _) = pool2.run(run_here, files=files, path=tmp_path / "r", overrides=overrides)
    saved = load_file(tmp_path / "r" / "model" / "model.safetensors")
    weights = checkpoint_of(tmp_path / "r", best).weights
    common = {name.removeprefix("model."): w for name, w in weights.items()}
    assert saved.keys() <= common.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, common[name]), name
