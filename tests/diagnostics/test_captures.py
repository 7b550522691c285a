"""Captures of a loop of one's own: repeated bit for bit, and refused when hostile."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import warnings

import pytest
import torch
from torch import nn

from diagnostics import loop_of_ones_own as own
from diagnostics.loop_of_ones_own import batches, train
from halfstep import (
    CheckpointError,
    HalfstepError,
    NonFiniteError,
    Precision,
    PrecisionError,
    Recorder,
    SpikeError,
    replay,
)
from halfstep.cli.main import main as command
from halfstep.diagnostics.capture import read_sealed, write_sealed
from halfstep.optim.optimizers import AdamW
from halfstep.report.record import read_run

pytestmark = pytest.mark.filterwarnings("ignore:(the step is left out|back to a copy)")
NORM = ",keep_fp32=type:BatchNorm1d"  # whose kernels take no 16-bit weights
STATIC = ",scale=static,init_scale=16"  # a spike that overflows the gradients would be no spike
POLICIES = (
    "fp32",
    "bf16-mixed",
    f"bf16-master{NORM}",
    f"params=fp32,compute=fp16{STATIC}",
    f"params=fp16{STATIC}{NORM}",
)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def again(path, precision="", make=own.make):
    model, optimizer, loss = make()
    return replay(path, model, optimizer, lambda b: loss(model, b), precision=precision)


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """A spike in step 30 of micro-batches with dropout and running means."""
    path = tmp_path_factory.mktemp("run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train("bf16-mixed", path, batches(30, 2, {30}), on_spike="skip:3")
    return path / "captures" / "step-00000029"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_spike_repeats_bit_for_bit_in_every_policy(tmp_path, policy, parts):
    torch.manual_seed(1)
    _, results = train(policy, tmp_path, batches(32, parts, {30}, times=30.0), on_spike="skip:3")
    assert [r.applied for r in results[20:]] == [n != 30 for n in range(21, 33)]
    found = again(tmp_path / "captures" / "step-00000029")
    assert (found.step, found.captured.reason) == (30, results[29].reason)
    assert (found.captured.loss, found.captured.grad_norm) == (
        results[29].loss, results[29].grad_norm,
    )  # fmt: skip
    assert found.repeated
    assert not found.survives


def test_the_random_state_and_the_buffers_of_the_step_are_what_makes_it_repeat(capture, tmp_path):
    """With another dropout mask or another batch the finding differs: the check can fail."""
    values = read_sealed(capture)
    for change in ("random", "batches"):
        other = dict(values)
        if change == "random":
            other["random"] = [[torch.get_rng_state()] for _ in values["random"]]
        else:
            other["batches"] = values["batches"][::-1]
            other["random"] = values["random"]
        write_sealed(tmp_path / change, other)
        assert not again(tmp_path / change).repeated
    assert again(capture).repeated


def test_fp32_is_asked_whether_it_would_have_survived(tmp_path):
    """A weight whose products leave fp16's range, but not fp32's."""

    def spoil(step, model):
        if step == 25:
            with torch.no_grad():
                model.body[4].weight.fill_(3e5)

    policy = "fp16-mixed"
    _, results = train(policy, tmp_path, batches(25), spoil=spoil, on_nonfinite="skip:9")
    assert results[-1].reason == "nonfinite_loss"
    path = tmp_path / "captures" / "step-00000024"
    same, other = again(path), again(path, "fp32")
    assert same.repeated
    assert "repeats bit for bit" in same.verdict
    assert (other.survives, other.unchanged, other.repeated) == (True, False, False)
    assert other.verdict == "fp32 would have survived"


def test_the_command_is_for_captures_of_runs(capture, capsys):
    assert command(["replay", str(capture)]) == 2
    assert "call halfstep.replay(path, model, optimizer, loss)" in capsys.readouterr().err


def test_the_folder_is_what_the_report_reads(tmp_path):
    _, results = train("bf16-mixed", tmp_path, batches(36, 2, {30}), on_spike="rollback:4")
    record = read_run(tmp_path)
    assert record.policy == "bf16-mixed"
    assert [line["step"] for line in record.skipped] == [30]
    assert record.series("loss")[1] == [r.loss for r in results]
    undone = results[29].steps_undone
    assert undone > 0
    assert [line["step"] for line in record.excluded] == [*range(30 - undone, 31)]
    for line in record.excluded:
        assert line["rows"] == [[line["step"]]] * 2
        assert line["batch"] == [2 * line["step"] - 2, 2 * line["step"] - 1]


def test_a_stop_writes_the_last_line_its_batches_and_the_capture(tmp_path):
    with pytest.raises(SpikeError):
        train("fp32", tmp_path, batches(40, 1, {30}), on_spike="stop")
    assert lines(tmp_path / "metrics.jsonl")[-1]["skip_reason"] in ("loss_spike", "gradient_spike")
    assert [x["step"] for x in lines(tmp_path / "exclude.jsonl")] == [30]
    assert again(tmp_path / "captures" / "step-00000029").repeated
    with pytest.raises(NonFiniteError):
        train("fp32", tmp_path / "n", batches(9, 1, {5}, times=float("nan")))
    last = lines(tmp_path / "n" / "metrics.jsonl")[-1]
    assert (last["step"], last["loss"], last["skip_reason"]) == (5, "nan", "nonfinite_loss")
    assert again(tmp_path / "n" / "captures" / "step-00000004").repeated


def test_recording_changes_nothing_and_the_newest_are_kept(tmp_path):
    data = [*batches(34, 2, {30, 31, 32})]
    one, _ = train("bf16-mixed", tmp_path / "a", data, on_spike="skip:5", captures=2)
    two, _ = train("bf16-mixed", tmp_path / "b", data, on_spike="skip:5", captures=0)
    for name, weight in one.masters.items():
        assert torch.equal(weight, dict(two.masters.items())[name])
    kept = sorted(path.name for path in (tmp_path / "a" / "captures").iterdir())
    assert kept == ["step-00000030", "step-00000031"]
    assert not (tmp_path / "b" / "captures").exists()
    train("bf16-mixed", tmp_path / "a", data[:30], on_spike="skip:5", captures=1)
    assert [path.name for path in (tmp_path / "a" / "captures").iterdir()] == ["step-00000029"]


def test_a_dropped_batch_is_in_no_capture(tmp_path):
    model, optimizer, loss_of = own.make()
    precision = Precision("fp32", model, optimizer, on_nonfinite="skip:9")
    (one,), (two,) = batches(2, 1, {2}, times=float("nan"))
    with Recorder(precision, tmp_path, captures=1) as recorder:
        for batch in (one, two):
            recorder.batch(batch)
            with precision.autocast():
                precision.backward(loss_of(model, batch))
            if batch is one:
                optimizer.zero_grad()
        recorder.step(precision.step())
    (held,) = read_sealed(tmp_path / "captures" / "step-00000000")["batches"]
    assert held["y"].isnan().all()


def test_moments_in_memory_order_come_back(tmp_path):
    """8-bit codes follow memory order; a transposed weight keeps its strides."""
    weight = nn.Parameter(torch.randn(6, 4).t())
    optimizer = AdamW([weight], lr=1e-3, moments="8bit")
    weight.grad = torch.randn(4, 6)
    optimizer.step()
    state = optimizer.state_dict()
    write_sealed(tmp_path / "c", {"optimizer": state, "odd": [float("nan"), (1, None), {3: "x"}]})
    found = read_sealed(tmp_path / "c")
    for key, value in state["state"][0].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found["optimizer"]["state"][0][key], value), key
            assert found["optimizer"]["state"][0][key].stride() == value.stride()
    assert str(found["odd"]) == "[nan, (1, None), {3: 'x'}]"


def test_what_no_capture_holds_is_told_once_and_training_goes_on(tmp_path):
    data = [[{**micro[0], "odd": object()}] for micro in batches(34, 1, {30, 31})]
    with pytest.warns(UserWarning, match=r"no capture of step 30: \['batches'\]\[0\]") as told:
        _, results = train("fp32", tmp_path, data, on_spike="skip:5")
    assert len(results) == 34
    assert len([w for w in told if "no capture" in str(w.message)]) == 1


def test_what_cannot_be_recorded_is_refused(tmp_path):
    model, optimizer, _ = own.make()
    with pytest.raises(PrecisionError, match=r"Recorder\(precision\) got a Net"):
        Recorder(model, tmp_path)
    precision = Precision("fp32", model, optimizer)
    with pytest.raises(PrecisionError, match="captures=-1"):
        Recorder(precision, tmp_path, captures=-1)
    recorder = Recorder(precision, tmp_path)
    with pytest.raises(PrecisionError, match="has a Recorder already"):
        Recorder(precision, tmp_path)
    recorder.close()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        Recorder(precision, tmp_path / "file" / "run")


# Hostile captures.


class Bomb:
    def __reduce__(self):
        return os.system, ("touch halfstep-was-hacked",)


def reseal(path, change):
    """Change the values of a capture, and seal it anew, as an attacker can."""
    values = read_sealed(path)
    change(values)
    write_sealed(path, values)


def setting(key, to):
    return lambda path: reseal(path, lambda values: values.update({key: to}))


def raw(text):
    """Write values.json as given, with a manifest that fits."""

    def act(path):
        (path / "values.json").write_text(text)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["values.json"] = hashlib.sha256(text.encode()).hexdigest()
        (path / "manifest.json").write_text(json.dumps(manifest))

    return act


def flipped(name, at):
    def act(path):
        data = bytearray((path / name).read_bytes())
        data[at] ^= 0x10
        (path / name).write_bytes(bytes(data))

    return act


def linked(name):
    def act(path):
        (path / name).rename(path.parent / f"moved-{name}")
        (path / name).symlink_to(path.parent / f"moved-{name}")

    return act


def long_header(path):
    data = (path / "tensors.safetensors").read_bytes()
    data = struct.pack("<Q", 2**62) + data[8:]
    (path / "tensors.safetensors").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    digest = hashlib.sha256(data).hexdigest()
    manifest["files"]["tensors.safetensors"] = digest
    (path / "manifest.json").write_text(json.dumps(manifest))


def bomb(name):
    return lambda path: (path / name).write_bytes(pickle.dumps(Bomb()))


def outside(path):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../x"] = manifest["files"].pop("values.json")
    (path / "manifest.json").write_text(json.dumps(manifest))


FOUND = {"reason": "x", "loss": "0x1p0", "grad_norm": "0x1p0", "threads": 1}

HOSTILE = {
    "a flipped bit in a tensor": flipped("tensors.safetensors", -3),
    "a flipped bit in the header": flipped("tensors.safetensors", 12),
    "a flipped bit in the values": flipped("values.json", 40),
    "a flipped bit in the manifest": flipped("manifest.json", 30),
    "a pickle as tensors": bomb("tensors.safetensors"),
    "a pickle as values": bomb("values.json"),
    "a pickle as manifest": bomb("manifest.json"),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "no tensors": lambda p: (p / "tensors.safetensors").unlink(),
    "a link for the tensors": linked("tensors.safetensors"),
    "a link for the values": linked("values.json"),
    "a path out of the folder": outside,
    "a header of 2^62 bytes": long_header,
    "brackets": raw("[" * 100_000),
    "deep values": raw('{"list": [' * 500 + "1" + "]}" * 500),
    "a tensor that is absent": raw('{"dict": [["x", {"tensor": "999", "order": []}]]}'),
    "a tensor of wrong order": raw('{"dict": [["x", {"tensor": "0", "order": [9]}]]}'),
    "an unknown kind": raw('{"dict": [["x", {"code": "import os"}]]}'),
    "an empty value": raw('{"dict": [["x", {}]]}'),
    "a key that is a list": raw('{"dict": [[["x"], 1]]}'),
    "a list": raw('{"list": []}'),
    "no finding": setting("found", {}),
    "a loss of code": setting("found", FOUND | {"loss": "os"}),
    "10^9 threads": setting("found", FOUND | {"threads": 10**9}),
    "a policy of nonsense": setting("policy", "import os"),
    "no weights": setting("weights", {}),
    "a weight of text": setting("weights", {"body.0.weight": "x"}),
    "no optimizer": setting("optimizers", []),
    "an optimizer of nonsense": setting("optimizers", [{"state": 3, "param_groups": "x"}]),
    "a state of nonsense": setting("state", {"x": 1}),
    "random states of text": setting("random", [["x"], ["y"]]),
    "random states of one byte": setting("random", [[torch.zeros(1, dtype=torch.uint8)]] * 2),
    "random states too few": setting("random", []),
    "evaluating parts of numbers": setting("evaluating", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_capture_is_refused_and_runs_nothing(capture, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(capture, tmp_path / capture.name)
    HOSTILE[name](copy)
    with pytest.raises(HalfstepError) as told:
        again(copy)
    assert len(str(told.value)) < 1000
    assert not list(tmp_path.rglob("halfstep-was-hacked"))


def test_a_link_and_another_model_are_refused(capture, tmp_path):
    (tmp_path / "link").symlink_to(capture)
    with pytest.raises(CheckpointError, match="a link"):
        again(tmp_path / "link")
    with pytest.raises(CheckpointError, match="of another model: weights"):
        again(capture, make=own.make_another)
