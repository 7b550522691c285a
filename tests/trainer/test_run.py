"""Whole runs on a tiny model: resume, guards, accumulation, skipped steps, golden losses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.trainer.runs import (
    ON_CPU,
    TIMES,
    assert_same_tensors,
    metrics,
    newest,
    overflowing,
    run,
    small_config,
    start,
)

from halfstep.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from halfstep.trainer.config.config import load_config
from halfstep.trainer.loop import train
from halfstep.trainer.run import (
    create_run,
    lock_run,
    require_fresh,
    resume,
    resumed,
    run_config,
    with_run_folder,
)
from halfstep.trainer.session import open_session

# One a mechanism: a scale of losses, masters, remainders, random bits, none of them.
SHORT = ("fp16-mixed", "fp16-master", "bf16-split", "bf16-sr", "bf16-pure")
MECHANISMS = [pytest.param(p, marks=() if p in SHORT else pytest.mark.slow) for p in ON_CPU]


CASES = [
    *MECHANISMS, "muon bf16-split,moments=8bit", "muon fp16-mixed", "fp8,simulate=yes",
    "nvfp4,simulate=yes", "bf16-split,recipe=mxfp8,simulate=yes,moments=8bit",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:the second moments of")
def test_resume_is_bit_for_bit(corpus, tmp_path, case):
    name, _, policy = ("adamw " + case).rpartition(" ")
    dynamic = policy.startswith("fp16")
    every = 1 if dynamic else 3
    config = small_config(
        corpus, policy, precision=overflowing(policy) if dynamic else policy, model__dropout=0.1,
        run__lost_update_every=every, optimizer__name=name.split()[-1],
    )  # fmt: skip
    run(config, tmp_path / "whole")
    run(config, tmp_path / "cut", until=6)  # the last checkpoint is of step 4
    session, ticks = run(config, tmp_path / "cut")
    assert ticks[0].record.step == 5
    assert session.step == 8
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    measured = [line["step"] for line in metrics(tmp_path / "cut") if "lost_updates" in line]
    applied = [line["step"] for line in metrics(tmp_path / "cut") if line["applied"]]
    assert measured == applied[every - 1 :: every]
    a, b = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert_same_tensors(a.weights, b.weights)
    assert_same_tensors(a.optimizer, b.optimizer)
    assert a.state["precision"] == b.state["precision"]
    if dynamic:
        assert a.state["precision"]["skipped_total"] > 0


def test_the_loss_falls_and_metrics_have_the_promised_keys(corpus, tmp_path):
    config = small_config(corpus, run__max_steps=24, optimizer__learning_rate=1e-2)
    run(config, tmp_path / "r")
    lines = [json.loads(x) for x in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert lines[-1]["val_loss"] < lines[3]["val_loss"] - 0.5
    always = TIMES | {
        "step", "loss", "learning_rate", "grad_norm", "loss_scale", "applied", "skipped_total",
        "tokens",
    }  # fmt: skip
    for line in lines:
        assert set(line) - {"val_loss"} == always
        assert ("val_loss" in line) == (line["step"] % 4 == 0)
        assert line["tokens"] == line["step"] * 4 * 32
    assert {p.name for p in (tmp_path / "r").iterdir()} == {
        "config.toml", "env.json", "health.jsonl", "metrics.jsonl", "tokenizer",
        "checkpoints", "run.lock",
    }  # fmt: skip


def test_a_skipped_step_changes_nothing_and_holds_the_schedule(corpus, tmp_path):
    config = small_config(
        corpus, precision=overflowing("fp16-mixed"), run__max_steps=12, run__save_every=1,
        run__lost_update_every=1,
    )  # fmt: skip
    session, folder = start(config, tmp_path / "r")
    before = {n: p.detach().clone() for n, p in session.precision.named_parameters().items()}
    skipped = 0
    for tick in train(session, Path(folder.name).parent):
        assert (tick.record.lost_updates is not None) == tick.record.applied
        if tick.record.applied:
            break
        skipped += 1
        # inf - inf on the way can leave NaN alone in the parameters
        assert tick.record.skip_reason in ("overflow", "nan_gradients")
        assert tick.record.learning_rate == pytest.approx(config.optimizer.learning_rate / 2)
        assert not session.precision.optimizers[0].state
        assert_same_tensors(session.precision.named_parameters(), before)
    folder.close()
    assert skipped > 0
    assert session.applied == 1


def break_forward(loss_sum):
    calls = []

    def wrapped(batch):
        calls.append(0)
        total, count = loss_sum(batch)
        return (total * float("nan") if len(calls) == 6 else total), count

    return wrapped


def finish_broken(corpus, path, breaks, policy, **overrides):
    """The error that ends a run whose loss is wrapped."""
    session, folder = start(small_config(corpus, policy, **overrides), path)
    session.loss_sum = breaks(session.loss_sum)
    with pytest.raises(NonFiniteError) as error:
        list(train(session, path))
    folder.close()
    return session, error.value


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-split"])
def test_a_nan_in_the_forward_stops_with_the_last_checkpoint_intact(corpus, tmp_path, policy):
    sparse = {"run__save_every": 2, "run__keep": 1, "run__eval_every": 0}
    _, error = finish_broken(corpus, tmp_path / "r", break_forward, policy, **sparse)
    assert "step 6: the loss is nan" in str(error)
    assert "step-00000004" in str(error)
    assert (error.cause, error.exit_code) == ("forward", 3)
    assert newest(tmp_path / "r").state["step"] == 4
    last = metrics(tmp_path / "r")[-1]
    assert (last["step"], last["applied"], last["skip_reason"]) == (6, False, "forward")
    assert (last["loss"], last["grad_norm"]) == ("nan", "nan")
    # the loss is broken at its 6th call only, so the same batch again is finite
    assert "first cause" not in str(error)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The session, checkpoint and folder of a run that has ended."""
    path = tmp_path_factory.mktemp("finished") / "r"
    session, _ = run(small_config(corpus), path)
    return session, newest(path), path


def test_a_run_folder_is_not_overwritten_or_shared(corpus, tmp_path, finished):
    session, _, path = finished
    with pytest.raises(ConfigError, match="holds a run already"):
        require_fresh(path)
    folder = lock_run(path)
    with pytest.raises(ConfigError, match="written by another process"):
        lock_run(path)
    folder.close()
    lock_run(path).close()
    with pytest.raises(ConfigError, match="holds no run"):
        run_config(tmp_path)
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        require_fresh(tmp_path)
    # what a killed start has left is taken up
    left = tmp_path / "r"
    (left / "tokenizer").mkdir(parents=True)
    (left / "env.json").write_text("{")
    (left / "run.lock").write_text("pid 1")
    require_fresh(left)
    create_run(left, session).close()
    assert load_config(str(left / "config.toml")) == session.config


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.n_layer", 2), ("data.tokenizer", "bpe:300"), ("precision", "fp32"), ("run.seed", 1),
     ("optimizer.learning_rate", 3.0)],
)  # fmt: skip
def test_resume_refuses_another_model_tokenizer_or_precision(corpus, finished, key, value):
    _, _, path = finished
    config, other = small_config(corpus), small_config(corpus, **{key: value})
    with pytest.raises(ConfigError, match=f"cannot change {key.removeprefix('run.')}="):
        resumed(config, other, path)
    if key in ("model.n_layer", "data.tokenizer"):
        stranger = open_session(with_run_folder(other, path))
        with pytest.raises(CheckpointError, match=r"made (by|with) another (model|tokenizer)"):
            resume(stranger, path / "checkpoints")


def test_last_good_goes_on_before_a_damaged_checkpoint_and_sets_it_aside(corpus, tmp_path):
    config = small_config(corpus, run__save_every=2)
    _, ticks = run(config, tmp_path / "r")
    checkpoints = tmp_path / "r" / "checkpoints"
    for step in (6, 8):
        file = checkpoints / f"step-0000000{step}" / "shard-00001-model-00001.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    session = open_session(with_run_folder(config, tmp_path / "r"))
    with pytest.raises(CheckpointError, match=r"Rename step-00000008, .*by --resume last-good"):
        resume(session, checkpoints)
    said = []
    assert resume(session, checkpoints, "last-good", said.append).name == "step-00000004"
    assert [("step-00000008" in a, "step-00000006" in b) for a, b in [said]] == [(True, True)]
    _, again = run(config, tmp_path / "r")
    assert [t.record.loss for t in again] == [t.record.loss for t in ticks[4:]]
    assert {p.name for p in checkpoints.iterdir()} == {
        *(f"step-0000000{n}" for n in (2, 4, 6, 8)), "damaged-step-00000006",
        "damaged-step-00000008",
    }  # fmt: skip


def test_a_runs_own_file_may_hold_keys_of_another_version_and_a_users_may_not(tmp_path, finished):
    finished = finished[2]
    folder = shutil.copytree(finished, tmp_path / "run")
    file = folder / "config.toml"
    text = file.read_text().replace("[run]", "[run]\nrelease_what = true", 1)
    file.write_text(text + "\n[gone]\nkey = 1\n")
    notes = []
    assert run_config(folder, notes) == run_config(finished)
    assert notes[0] == "this version does not know run.release_what = True: it is left out"
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(str(file))


def replace_steps(config, steps):
    return replace(config, run=replace(config.run, max_steps=steps))


def test_data_are_known_by_what_they_hold_wherever_they_are(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, text = tmp_path / "r", corpus.read_text()
    Path("data.txt").write_text(text)
    run(small_config("data.txt", run__max_steps=2), path)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    session, _ = run(replace_steps(run_config(path), 3), path)  # found from another directory
    moved = (tmp_path / "data.txt").rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match=r"data\.txt: no such file"):
        run(replace_steps(run_config(path), 4), path)
    saved = run_config(path)
    config = resumed(saved, small_config(moved, run__max_steps=4).filled(saved), path)
    session, _ = run(config, path)
    assert session.step == 4
    moved.write_text(text + "one more line\n")
    with pytest.raises(CheckpointError, match="another training data, or it has changed"):
        run(config, path)


@pytest.mark.filterwarnings("ignore:the second moments of parameter 8")
def test_a_resume_may_change_the_precision_where_it_is_asked_for(corpus, tmp_path):
    first = small_config(corpus, "bf16-split,moments=8bit", run__max_steps=4)
    session, _ = run(first, tmp_path / "r")
    exact = {n: v.clone() for n, v in session.precision.masters.items()}
    for policy in ("fp32", "bf16-mixed", "bf16-master", "bf16-split", "bf16-sr", "fp16-master"):
        later = small_config(corpus, policy, run__max_steps=12)
        other = open_session(with_run_folder(later, tmp_path / "r"))
        other.restore(newest(tmp_path / "r"), tmp_path)
        assert other.step == 4
        if policy != "bf16-sr":
            assert_same_tensors(dict(other.precision.masters.items()), exact)
        batch = other.micro_batches(other.step).batches
        with other.precision.autocast():
            total, count = other.loss_sum(batch[0])
        assert other.precision.step(total / count).loss < 6
