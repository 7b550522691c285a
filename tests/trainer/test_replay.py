"""Captured steps: written before the answer, repeated bit for bit, and refused when hostile."""

import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from tests.trainer.runs import ON_CPU, overflowing, small_config, start

from halfstep.diagnostics.metrics import CAPTURES
from halfstep.errors import (
    CheckpointError,
    NonFiniteError,
)
from halfstep.trainer.checkpoint import list_checkpoints
from halfstep.trainer.loop import train
from halfstep.trainer.replay import replay
from halfstep.trainer.tasks.text import TextTask

pytestmark = pytest.mark.filterwarnings("ignore:(the step is left out|back to a copy)")


def follow(corpus, path, policy="bf16-mixed", spoil=None, **overrides):
    """Train with captures; ``spoil(session)`` may break something between two steps."""
    values = {
        "run__max_steps": 30, "run__eval_every": 0, "run__save_every": 0, "run__capture": 2,
        "model__dropout": 0.1,
    } | overrides  # fmt: skip
    session, folder = start(small_config(corpus, policy, **values), path)
    try:
        for _ in train(session, path):
            if spoil is not None:
                spoil(session)
    except NonFiniteError:
        pass
    finally:
        folder.close()
    return session


def blow_up(at, times=30.0):
    """Multiply the embedding, which is the head too, before the step ``at``: the loss spikes."""

    def spoil(session):
        if session.step == at - 1:
            with torch.no_grad():
                session.task.model.wte.weight.mul_(times)

    return spoil


@pytest.fixture(scope="module")
def capture(corpus, tmp_path_factory):
    """A capture of a spike in step 26 of a bf16-mixed run."""
    path = tmp_path_factory.mktemp("run") / "r"
    follow(corpus, path, spoil=blow_up(26), run__on_spike="skip:9", run__max_steps=26)
    return list_checkpoints(path / CAPTURES)[0]


@pytest.mark.parametrize("policy", ON_CPU)
def test_a_spiking_step_repeats_bit_for_bit_in_every_policy(corpus, tmp_path, policy):
    follow(
        corpus, tmp_path / "r", policy, spoil=blow_up(26), run__on_spike="skip:4",
        run__max_steps=26,
    )  # fmt: skip
    (found,) = list_checkpoints(tmp_path / "r" / CAPTURES)
    replayed = replay(found)
    assert replayed.step == 26
    assert replayed.captured.reason in ("loss_spike", "gradient_spike")
    assert replayed.repeated


def test_a_nan_repeats_and_fp32_is_asked_about_it(corpus, tmp_path):
    """A weight beyond fp16's range in products: fp16 breaks where fp32 does not."""
    policy = overflowing("fp16-mixed").replace("1048576", "4")

    def spoil(session):
        if session.step == 25:
            with torch.no_grad():
                weights = dict(session.task.model.named_parameters())
                name = next(n for n in weights if "mlp" in n and weights[n].dim() == 2)
                weights[name].mul_(3e6)

    follow(corpus, tmp_path / "r", policy, spoil=spoil, run__on_nonfinite="skip:9")
    first = list_checkpoints(tmp_path / "r" / CAPTURES)[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    same, other = replay(first), replay(first, "fp32")
    assert (same.found.threads, torch.get_num_threads()) == (threads, threads + 1)
    torch.set_num_threads(threads)
    assert same.repeated
    assert same.found.reason == "nonfinite_loss"
    assert math.isnan(same.found.loss) or math.isinf(same.found.loss)
    assert other.found.reason == "applied"
    assert not other.unchanged
    assert other.precision == "fp32"


OWN = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda: np.random.rand() + random.random(), "repeats bit for bit"),
        (lambda: OWN.random(), "does not repeat: what a capture holds does not determine it"),
    ],
)
def test_a_loss_that_draws_from_numpy_and_python_repeats(corpus, tmp_path, monkeypatch, draw, says):
    plain = TextTask.loss_sum

    def noisy(task, batch):
        total, count = plain(task, batch)
        return total * (1 + 0.01 * draw()), count

    monkeypatch.setattr(TextTask, "loss_sum", noisy)
    follow(corpus, tmp_path / "r", spoil=blow_up(26), run__on_spike="skip:9", run__max_steps=26)
    (found,) = list_checkpoints(tmp_path / "r" / CAPTURES)
    before = random.getstate(), np.random.get_state()[2]
    assert says in replay(found).verdict
    assert (random.getstate(), np.random.get_state()[2]) == before


def test_a_run_is_told_that_it_is_no_capture(capture, tmp_path):
    run = capture.parent.parent
    for folder in (run, capture.parent):
        with pytest.raises(CheckpointError) as told:
            replay(folder)
        said = f"is no capture, but holds some: {capture.name}; write: halfstep replay {capture}"
        assert str(told.value) == f"{folder} {said}"
    shutil.copy(run / "config.toml", tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no capture; .* --capture 3"):
        replay(tmp_path)


def test_a_new_process_repeats_it(capture):
    def call(*words):
        command = [sys.executable, "-m", "halfstep", "replay", str(capture), *words]
        return subprocess.run(command, capture_output=True, text=True)

    done = call()
    assert done.returncode == 0, done.stderr
    first, second, verdict = done.stdout.splitlines()
    assert first.startswith("step 26 in ")
    assert first.partition(": ")[2] == second.partition(": ")[2]
    assert "repeats bit for bit" in verdict
    done = call("--precision", "fp32")
    assert done.returncode == 0, done.stderr
    assert "fp32 would" in done.stdout
    done = call("--precision", "fp33")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_disk_costs_a_warning(corpus, tmp_path):
    (tmp_path / "r").mkdir()

    def spoil(session):
        (tmp_path / "r" / CAPTURES).touch()  # a file where the folder would be
        blow_up(24)(session)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session = follow(corpus, tmp_path / "r", spoil=spoil, run__on_spike="skip:9")
    assert session.step == 30
    assert any("no capture of step 24" in str(w.message) for w in told)


@pytest.mark.parametrize(
    ("section", "key", "value"), [("model", "n_embd", 64), ("data", "train", [__file__])]
)
def test_another_model_or_other_data_are_refused(capture, tmp_path, section, key, value):
    copy = shutil.copytree(capture, tmp_path / capture.name)
    state, manifest = (json.loads((copy / f"{n}.json").read_text()) for n in ("state", "manifest"))
    state["config"][section][key] = value
    text = json.dumps(state)
    manifest["files"]["state.json"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (copy / "state.json").write_text(text)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"made (by|with) another"):
        replay(copy)


def test_a_checkpoint_is_no_capture(capture, tmp_path):
    checkpoint = list_checkpoints(capture.parent.parent / "checkpoints")[-1]
    with pytest.raises(CheckpointError, match="no capture"):
        replay(checkpoint)
    with pytest.raises(CheckpointError):
        replay(tmp_path / "absent")
