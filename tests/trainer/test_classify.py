"""Classification runs in one process: batches, losses, evaluation, the best state."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.classifiers import (
    checkpoint_of,
    checkpoint_steps,
    classify_config,
    column,
    opened,
    rows,
    whole_run,
    write_bert,
    write_files,
)
from tests.trainer.runs import assert_same_tensors, metrics, start
from torch.nn import functional

from halfstep.trainer.config.config import load_config
from halfstep.trainer.loop import train
from halfstep.trainer.run import finish_run
from halfstep.trainer.session import open_session
from halfstep.trainer.step import Judge

pytestmark = pytest.mark.covering


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert") / "b")


def session_of(config):
    return open_session(config)


def model_of(path):
    """The tensors of the model that a run left, by name."""
    return load_file(path / "model" / "model.safetensors")


# --- training ---


@pytest.mark.parametrize("source", ["scratch:tiny", "bert"])
def test_a_run_learns_and_leaves_what_it_promises(files, bert, tmp_path, source):
    config = classify_config(
        files,
        shipped="classify-scratch" if source != "bert" else "classify-pretrained",
        model__source=str(bert) if source == "bert" else source,
        run__max_steps=0,
        run__epochs=5,
        run__eval_every=0,
        optimizer__learning_rate=3e-3,
    )
    session, ticks = whole_run(config, tmp_path / "r")
    assert session.config.run.max_steps == 5 * 9 == len(ticks)  # 200 examples in batches of 24
    assert [t.record.step for t in ticks if t.evaluation] == [9, 18, 27, 36, 45]
    majority = 24 / 41
    assert max(column(tmp_path / "r", "val_accuracy")) > majority + 0.1
    assert column(tmp_path / "r", "val_loss")[-1] < 0.9 * math.log(3)
    assert {p.name for p in (tmp_path / "r").iterdir()} == {
        "config.toml", "env.json", "health.jsonl", "metrics.jsonl", "tokenizer",
        "checkpoints", "run.lock",
        "model", "report.txt", "report.json",
    }  # fmt: skip
    best = session.best.step
    report = json.loads((tmp_path / "r" / "report.json").read_text("utf-8"))
    record = metrics(tmp_path / "r")[best - 1]
    assert (report["step"], report["loss"]) == (best, record["val_loss"])
    assert (report["accuracy"], report["macro_f1"]) == (
        record["val_accuracy"], record["val_macro_f1"],
    )  # fmt: skip
    assert report["labels"] == ["joy", "sad", "怒"]
    assert sum(map(sum, report["confusion"])) == 41
    # the model in the folder is the one that was measured
    dev = rows(41, seed=2)
    found = opened(tmp_path / "r").predict([text for text, _ in dev], 7)
    right = sum(label == mine for (_, label), (_, mine, _) in zip(dev, found, strict=True))
    assert right / 41 == report["accuracy"]
    lines = [json.loads(x) for x in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    counts = [int(session.task.batch(s, range(99))[1].sum()) for s in range(45)]
    assert [line["tokens"] for line in lines] == [sum(counts[: i + 1]) for i in range(45)]
    written = load_config(str(tmp_path / "r" / "config.toml"))
    assert written == session.config
    assert (written.run.eval_every, written.schedule.warmup_steps) == (9, 2)


@pytest.mark.parametrize(("smoothing", "accum"), [(0.0, 1), (0.2, 3)])
def test_the_loss_is_torchs_over_the_whole_batch(files, tmp_path, smoothing, accum):
    config = classify_config(
        files,
        model__label_smoothing=smoothing,
        run__grad_accum=accum,
        run__max_steps=3,
        run__eval_every=0,
    )
    session, folder = start(config, tmp_path / "r")
    for module in session.task.model.modules():  # without dropout
        module.p = 0.0
    expected = []
    for tick in train(session, tmp_path / "r"):
        # the next step's batch, whose sizes of 22 and 23 make uneven micro-batches of 7 and 8
        batch = session.task.batch(session.step, range(99))
        with torch.no_grad():
            logits_BC = session.task.model.logits(batch).double()
        expected.append(
            functional.cross_entropy(logits_BC, batch[2], label_smoothing=smoothing).item()
        )
        if tick.record.step > 1:
            # fp32 sums of 23 losses near 1: some ulp of 6e-8 each
            assert tick.record.loss == pytest.approx(expected[-2], rel=2e-6)
    folder.close()


# --- evaluation ---


class Heard(Exception):
    """Ends an evaluation when its sums are known."""


def sums_of_rank(session, rank, ranks):
    """What a rank adds to the sums, and how often it runs the model."""
    sums, calls = [], []

    def hear(values):
        sums.extend(values)
        raise Heard

    model = session.task.model
    real = model.logits
    model.logits = lambda batch: calls.append(len(batch[0])) or real(batch)
    model.eval()
    judge = Judge(session.loss_sum, session.precision.autocast, session.device, rank, ranks, hear)
    try:
        with pytest.raises(Heard):
            session.task.evaluate(judge)
    finally:
        model.train()
        del model.logits
    return sums, calls


@pytest.mark.parametrize(("count", "batch_size", "ranks"), [(41, 5, 3), (40, 8, 2), (4, 64, 3)])
def test_every_example_counts_once_and_unsmoothed(tmp_path, count, batch_size, ranks):
    files = write_files(tmp_path / "d", train=150, dev=count)
    config = classify_config(files, run__batch_size=batch_size, model__label_smoothing=0.3)
    session = session_of(config)
    task, names = session.task, ("joy", "sad", "怒")
    confusion = torch.zeros(3, 3)
    total = 0.0
    task.model.eval()
    for text, name in rows(count, seed=2):  # one by one, without padding
        ids_BT = torch.tensor(task.tokenizer.encode_batch([text]))
        label_B = torch.tensor([names.index(name)])
        with torch.no_grad():
            logits_BC = task.model.logits((ids_BT, ids_BT >= 0, label_B))
        total += functional.cross_entropy(logits_BC, label_B).item()
        confusion[label_B, logits_BC.argmax()] += 1
    task.model.train()
    heard = [sums_of_rank(session, rank, ranks) for rank in range(ranks)]
    sums = torch.tensor([h[0] for h in heard], dtype=torch.float64).sum(dim=0)
    assert sums[1:].tolist() == confusion.flatten().tolist()
    # other padding, other order: fp32 losses near 1 differ by some ulp of 6e-8
    assert sums[0].item() == pytest.approx(total, rel=1e-5)
    assert len({len(calls) for _, calls in heard}) == 1  # else a sharded model waits for ever
    assert all(size <= batch_size for _, calls in heard for size in calls)


def test_outputs_that_are_not_finite_have_no_score_and_no_report(files, tmp_path):
    session = session_of(classify_config(files))
    with torch.no_grad():
        next(session.task.model.model.classifier.parameters()).fill_(math.nan)
    found = session.evaluate()
    assert math.isnan(found.score)
    assert found.accuracy is None
    session.task.improved(tmp_path, 1, found)
    assert not list(tmp_path.iterdir())


# --- the best state ---


def graded(session, scores, monkeypatch):
    """Evaluations get these scores in turn, or scores with losses, whatever the model does."""
    real, given = session.task.evaluate, iter(scores)

    def evaluate(judge):
        score = next(given)
        told = score if isinstance(score, dict) else {"score": score}
        return dataclasses.replace(real(judge), **told)

    monkeypatch.setattr(session.task, "evaluate", evaluate)


def run_graded(config, path, scores, monkeypatch):
    session, folder = start(config, path)
    graded(session, scores, monkeypatch)
    ticks = list(train(session, path))
    finish_run(session, path)
    folder.close()
    return session, ticks


@pytest.mark.parametrize(
    ("scores", "save_every", "keep", "best", "left"),
    [
        ((0.1, 0.9, 0.2, 0.3, 0.4, 0.5), 1, 2, 4, [4, 11, 12]),
        # of equal scores the lowest loss, and the first of equals
        ([{"score": 0.5, "loss": x} for x in (3, 1, 2, 1, math.nan, 4)], 0, 3, 4, [4, 8, 10, 12]),
        ((math.nan, 0.2, math.nan, 0.1, 0.1, 0.0), 0, 1, 4, [4, 12]),
    ],
)
def test_the_best_checkpoint_survives(
    files, tmp_path, monkeypatch, scores, save_every, keep, best, left
):
    config = classify_config(
        files,
        run__max_steps=12,
        run__eval_every=2,
        run__save_every=save_every,
        run__keep=keep,
    )
    session, _ = run_graded(config, tmp_path / "r", scores, monkeypatch)
    assert session.best.step == best
    assert checkpoint_steps(tmp_path / "r") == left
    state = checkpoint_of(tmp_path / "r").state["best"]
    assert state["step"] == best
    held = checkpoint_of(tmp_path / "r", best).weights
    assert_same_tensors(
        model_of(tmp_path / "r"), {n.removeprefix("model."): w for n, w in held.items()}
    )
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["step"] == best
