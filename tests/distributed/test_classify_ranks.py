"""Classification on several ranks: the same numbers as one process, and one rank that writes."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager

import pytest
import torch
from tests.reference.adam import EPS, assert_near
from tests.trainer.classifiers import (
    SPELLED,
    checkpoint_of,
    classify_config,
    column,
    metrics,
    whole_run,
    write_bert,
    write_files,
)

from distributed.commands import on_ranks
from halfstep.distributed.world import World
from halfstep.errors import ConfigError, PeerError
from halfstep.trainer import loop
from halfstep.trainer.data.token_file import no_progress
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
        patch.setitem(sys.modules, "matplotlib.figure", None)
        yield patch


def forbidden(*_, **__):
    raise AssertionError("rank 0 only")


def run_here(rank, files, path, overrides):
    """A rank's whole run; what its evaluations found, and its best step."""
    world = World.around_group()
    with lean() as patch:
        if rank:
            patch.setattr(classify_task, "write_report", forbidden)
            patch.setattr(classify_task, "replace_folder", forbidden)
            patch.setattr(loop, "MetricsFile", forbidden)
        config = with_run_folder(classify_config(files, **overrides), path)
        session = open_session(config, no_progress, world=world)
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


def assert_near_runs(path, one):
    """The measures of two runs, and their weights: fp32 sums in another order, and no more."""
    for key in ("loss", "val_loss"):
        assert column(path, key) == pytest.approx(column(one, key), rel=1e-5)
    for key in ("val_accuracy", "val_macro_f1", "step", "tokens", "learning_rate", "skipped_total"):
        assert column(path, key) == column(one, key), key
    assert_near(
        checkpoint_of(path).weights, checkpoint_of(one).weights, column(one, "learning_rate"),
        betas=(0.9, 0.98),
    )  # fmt: skip


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
    other = {"sent_bytes", "sent_bytes_fp32", "grad_norm", "val_loss"}
    return [{k: v for k, v in line.items() if k not in other} for line in metrics(path)]


@pytest.mark.parametrize("layout", ["data=2", "shard=2"])
def test_two_ranks_equal_one_process(pool2, files, tmp_path, layout):
    overrides = {
        "run__batch_size": 5, "model__class_weights": "balanced", "model__label_smoothing": 0.1,
        "model__dropout": 0.0, "optimizer__eps": EPS,
    }  # fmt: skip
    found = pool2.run(
        run_here,
        files=files,
        path=tmp_path / "two",
        overrides={**overrides, "run.parallel": layout},
    )
    session, ticks = alone(files, tmp_path / "one", **overrides)
    assert_near_runs(tmp_path / "two", tmp_path / "one")
    assert found[0] == found[1]
    told, best, stopped_by = found[0]
    assert told == [(t.record.step, t.evaluation.confusion) for t in ticks if t.evaluation]
    assert sum(map(sum, told[-1][1])) == 41
    assert (best, stopped_by) == (session.best.step, "")
    names = {p.name for p in (tmp_path / "two").iterdir()}
    assert names == {p.name for p in (tmp_path / "one").iterdir()}
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    assert report["confusion"] == [list(row) for row in dict(told)[best]]


@pytest.mark.parametrize(
    ("precision", "source"),
    [
        pytest.param("fp32", "scratch:tiny", marks=pytest.mark.slow),
        ("bf16-split", "bert"),
        (f"{SPELLED['fp16-mixed']},scale=dynamic,init_scale=16777216,growth_interval=3", "bert"),
    ],
)
def test_two_ranks_are_two_micro_batches(pool2, files, bert, tmp_path, precision, source):
    overrides = {
        "precision": precision,
        "model__source": bert if source == "bert" else source,
        "model__dropout": 0.2,
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


def refused(rank, files, overrides):
    try:
        config = classify_config(files, **overrides)
        open_session(config, no_progress, world=World.around_group())
    except (ConfigError, PeerError) as error:
        return str(error)
    return ""


def test_refusals_are_the_same_on_all_ranks(pool2, files):
    small = {"run__batch_size": 12, "run__grad_accum": 12}
    for overrides, words in (
        (small, "batch_size=12 is too small for 2 ranks"),
        ({"run.parallel": "shard=4"}, "needs 4 ranks"),
    ):
        found = pool2.run(refused, files=files, overrides=overrides)
        assert found[0] == found[1]
        assert words in found[0]


# --- through the command line ---


def words_of(files, path, *more):
    return ["--train", files[0], "--dev", files[1], "--model", "scratch:tiny", "--device", "cpu",
            "--precision", "fp32", "--batch-size", 24, "--max-steps", 6, "--eval-every", 3,
            "--run.rank_timeout", 60, "--output-dir", path, *more]  # fmt: skip


def test_two_ranks_print_and_write_once(pool2, files, tmp_path):
    path = tmp_path / "r"
    (code, out, err), silent = on_ranks(pool2, "finetune", "classify", *words_of(files, path))
    assert code == 0, err
    assert silent == (0, "", "")
    summary, judged, left = out.splitlines()
    assert judged.startswith("too short to judge: 0 of ")
    assert summary.startswith(f"{path}: step 6; validation loss ")
    assert "each rank sent " in summary
    assert left == f"model in {path / 'model'}, report in {path / 'report.txt'}"
    assert err.count("2 ranks as data=2") == 1
    assert err.count("step 3: validation loss ") == err.count("step 6: validation loss ") == 1
    assert len(metrics(path)) == 6
    assert {p.name for p in path.iterdir()} == {
        "config.toml", "env.json", "metrics.jsonl", "tokenizer",
        "checkpoints", "run.lock",
        "model", "report.txt", "report.json",
    }  # fmt: skip
