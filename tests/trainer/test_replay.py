"""Captured steps: written before the answer, repeated bit for bit, and refused when hostile."""

import hashlib
import json
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.runs import ON_CPU, overflowing, small_config, start

from halfstep.diagnostics.recording.metrics import CAPTURES
from halfstep.errors import (
    CheckpointError,
    ConfigError,
    HalfstepError,
    NonFiniteError,
    SpikeError,
)
from halfstep.trainer.checkpoint.store import list_checkpoints
from halfstep.trainer.loop import train
from halfstep.trainer.run.replay import replay

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
    assert not replayed.survives


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
    same, other = replay(first), replay(first, "fp32")
    assert same.repeated
    assert same.found.reason == "nonfinite_loss"
    assert math.isnan(same.found.loss) or math.isinf(same.found.loss)
    assert other.survives
    assert not other.unchanged
    assert other.precision == "fp32"


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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ON_CPU)
def test_new_processes_repeat_every_capture_of_every_policy(corpus, tmp_path, policy):
    """Nine spikes a policy, each taken again in a process of its own: 99 in all."""
    follow(
        corpus, tmp_path / "r", policy, spoil=blow_up(22), run__on_spike="skip:9", run__capture=9
    )
    found = list_checkpoints(tmp_path / "r" / CAPTURES)
    assert len(found) == 9
    for capture in found:
        command = [sys.executable, "-m", "halfstep", "replay", str(capture)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "repeats bit for bit" in done.stdout, (capture, done.stderr)


def test_another_number_of_ranks_is_refused(capture):
    with pytest.raises(CheckpointError, match=r"a step of 1 ranks, and this is 2: .*torchrun"):
        replay(capture, world=SimpleNamespace(size=2))


def test_the_error_that_ends_a_run_names_the_command(corpus, tmp_path):
    config = small_config(
        corpus, run__max_steps=30, run__eval_every=0, run__capture=1, run__on_spike="stop"
    )
    session, folder = start(config, tmp_path / "r")
    ticks = train(session, tmp_path / "r")
    while session.step < 25:
        next(ticks)
    blow_up(26)(session)
    with pytest.raises(SpikeError, match=r"halfstep replay .*captures/step-00000025") as told:
        next(ticks)
    folder.close()
    assert replay(Path(str(told.value).rpartition("halfstep replay ")[2])).repeated


def test_the_newest_are_kept_and_none_where_it_is_off(corpus, tmp_path):
    follow(corpus, tmp_path / "r", spoil=blow_up(24), run__on_spike="skip:9", run__capture=2)
    assert [p.name for p in list_checkpoints(tmp_path / "r" / CAPTURES)] == [
        "step-00000028", "step-00000029",
    ]  # fmt: skip
    follow(corpus, tmp_path / "s", spoil=blow_up(24), run__on_spike="skip:9", run__capture=0)
    assert not (tmp_path / "s" / CAPTURES).exists()


def test_captures_change_nothing_in_a_run(corpus, tmp_path):
    one, two = (
        follow(
            corpus, tmp_path / str(keep), "fp16-master", spoil=blow_up(26),
            run__on_spike="skip:9", run__capture=keep,
        )
        for keep in (0, 2)
    )  # fmt: skip
    for name, weight in one.precision.masters.items():
        assert torch.equal(weight, dict(two.precision.masters.items())[name])


def test_a_full_disk_costs_one_warning(corpus, tmp_path):
    (tmp_path / "r").mkdir()

    def spoil(session):
        (tmp_path / "r" / CAPTURES).touch()  # a file where the folder would be
        blow_up(24)(session)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session = follow(corpus, tmp_path / "r", spoil=spoil, run__on_spike="skip:9")
    assert session.step == 30
    assert len([w for w in told if "no capture of step 24" in str(w.message)]) == 1
    assert len([w for w in told if "no capture" in str(w.message)]) == 1


# Hostile captures.


def seal(path):
    """Give the manifest the hashes of the files as they are, as an attacker can."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def edited(change, name="state.json"):
    """Edit a JSON file of a capture, and seal it again."""

    def act(path):
        values = json.loads((path / name).read_text())
        change(values)
        (path / name).write_text(json.dumps(values))
        if name == "state.json":
            seal(path)

    return act


def flipped(name, at):
    def act(path):
        data = bytearray((path / name).read_bytes())
        data[at] ^= 0x10
        (path / name).write_bytes(bytes(data))

    return act


class Bomb:
    def __reduce__(self):
        return os.system, ("touch halfstep-was-hacked",)


def pickled(name):
    def act(path):
        (path / name).write_bytes(pickle.dumps(Bomb()))
        seal(path)

    return act


def replaced_by_link(name):
    def act(path):
        (path / name).rename(path.parent / f"moved-{name}")
        (path / name).symlink_to(path.parent / f"moved-{name}")

    return act


def renamed_file(to):
    def act(path):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][to] = manifest["files"].pop("state.json")
        (path / "manifest.json").write_text(json.dumps(manifest))

    return act


def long_header(path):
    data = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(struct.pack("<Q", 2**62) + data[8:])
    seal(path)


def setting(*keys, to):
    def change(values):
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = to

    return edited(change)


HOSTILE = {
    "a flipped bit in the weights": flipped("weights.safetensors", -3),
    "a flipped bit in the header": flipped("weights.safetensors", 12),
    "a flipped bit in the moments": flipped("optimizer.safetensors", -5),
    "a flipped bit in the state": flipped("state.json", 40),
    "a flipped bit in the manifest": flipped("manifest.json", 60),
    "a pickle as weights": pickled("weights.safetensors"),
    "a pickle as moments": pickled("optimizer.safetensors"),
    "a pickle as state": pickled("state.json"),
    "a pickle as manifest": lambda p: (p / "manifest.json").write_bytes(pickle.dumps(Bomb())),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "no state": lambda p: (p / "state.json").unlink(),
    "no weights": lambda p: (p / "weights.safetensors").unlink(),
    "a link for the weights": replaced_by_link("weights.safetensors"),
    "a link for the state": replaced_by_link("state.json"),
    "a path out of the folder": renamed_file("../../state.json"),
    "an absolute path": renamed_file("/etc/passwd"),
    "a header of 2^62 bytes": long_header,
    "an empty manifest": lambda p: (p / "manifest.json").write_text("{}"),
    "a manifest of brackets": lambda p: (p / "manifest.json").write_text("[" * 100_000),
    "no finding": edited(lambda s: s.pop("captured")),
    "a finding of text": setting("captured", to="nan"),
    "a loss of code": setting("captured", "loss", to="__import__('os')"),
    "a loss beyond fp64": setting("captured", "loss", to="0x1p+99999"),
    "10^9 threads": setting("captured", "threads", to=10**9),
    "threads of True": setting("captured", "threads", to=True),
    "no configuration": edited(lambda s: s.pop("config")),
    "another task": setting("config", "task", to="module"),
    "a task that is a path": setting("config", "task", to="../../x"),
    "an unknown key": setting("config", "run", "shell", to="rm -rf /"),
    "10^9 layers": setting("config", "model", "n_layer", to=10**9),
    "a wider model": setting("config", "model", "n_embd", to=64),
    "other data": setting("config", "data", "train", to=["/etc/passwd"]),
    "another step": setting("step", to=10**30),
    "a policy of nonsense": setting("config", "precision", to="import os"),
    "another loss scale": setting("precision", "loss_scale", to={"value": "x"}),
    "a window of text": setting("precision", "spikes", to="x" * 1000),
    "a window of infinities": setting("precision", "spikes", "highest_loss", to=1e999),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_capture_is_refused_and_runs_nothing(capture, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(capture, tmp_path / capture.name)
    HOSTILE[name](copy)
    with pytest.raises(HalfstepError) as told:
        replay(copy)
    assert isinstance(told.value, CheckpointError | ConfigError | HalfstepError)
    assert len(str(told.value)) < 1000
    assert not list(tmp_path.rglob("halfstep-was-hacked"))


def test_a_link_and_a_checkpoint_are_no_captures(capture, tmp_path):
    (tmp_path / capture.name).symlink_to(capture)
    with pytest.raises(CheckpointError, match="a link"):
        replay(tmp_path / capture.name)
    checkpoint = list_checkpoints(capture.parent.parent / "checkpoints")[-1]
    with pytest.raises(CheckpointError, match="no capture"):
        replay(checkpoint)
    with pytest.raises(CheckpointError):
        replay(tmp_path / "absent")
