"""The folder that halfstep.Recorder writes for a loop of one's own."""

import json

import pytest
import torch
from torch import nn

from halfstep import (
    CheckpointError,
    NonFiniteError,
    Precision,
    PrecisionError,
    Recorder,
    SpikeError,
)
from halfstep.report.record import read_run

pytestmark = pytest.mark.filterwarnings("ignore:(the step is left out|back to a copy)")


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(policy, folder, steps, bad, times=300.0, *, parts=1, on_spike="off"):
    """Train with a Recorder, without one if ``folder`` is None; a bad step has large targets."""
    model, optimizer = made()
    draw = torch.Generator().manual_seed(5)
    precision = Precision(policy, model, optimizer, on_spike=on_spike)
    recorder = folder and Recorder(precision, folder)
    results = []

    def loop():
        for step in range(1, steps + 1):
            for _ in range(parts):
                x = torch.randn(8, 6, generator=draw)
                y = x.sum(1, keepdim=True) * (times if step == bad else 1)
                if recorder:
                    recorder.batch(rows=[step])
                with precision.autocast():
                    loss = (model(x) - y).square().mean() / parts
                precision.backward(loss)
            result = precision.step(max_norm=1.0)
            results.append(recorder.step(result) if recorder else result)

    if recorder:
        with recorder:
            loop()
    else:
        loop()
    return precision, results


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_folder_is_what_the_report_reads(tmp_path):
    _, results = train("bf16-mixed", tmp_path, 36, 30, parts=2, on_spike="skip:4")
    record = read_run(tmp_path)
    assert record.policy == "bf16-mixed"
    assert [line["step"] for line in record.skipped] == [30]
    assert record.series("loss")[1] == [r.loss for r in results]
    assert [line["step"] for line in record.excluded] == [30]
    for line in record.excluded:
        assert line["rows"] == [[line["step"]]] * 2
        assert line["batch"] == [2 * line["step"] - 2, 2 * line["step"] - 1]


def test_a_stop_writes_the_last_line_and_its_batches(tmp_path):
    with pytest.raises(SpikeError):
        train("fp32", tmp_path, 40, 30, on_spike="stop")
    assert lines(tmp_path / "metrics.jsonl")[-1]["skip_reason"] in ("loss_spike", "gradient_spike")
    assert [x["step"] for x in lines(tmp_path / "exclude.jsonl")] == [30]
    with pytest.raises(NonFiniteError):
        train("fp32", tmp_path / "n", 9, 5, float("nan"))
    last = lines(tmp_path / "n" / "metrics.jsonl")[-1]
    assert (last["step"], last["loss"], last["skip_reason"]) == (5, "nan", "nonfinite_loss")


def test_what_cannot_be_recorded_is_refused(tmp_path):
    model, optimizer = made()
    with pytest.raises(PrecisionError, match=r"Recorder\(precision\) got a Sequential"):
        Recorder(model, tmp_path)
    precision = Precision("fp32", model, optimizer)
    recorder = Recorder(precision, tmp_path)
    with pytest.raises(PrecisionError, match="has a Recorder already"):
        Recorder(precision, tmp_path)
    recorder.close()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        Recorder(precision, tmp_path / "file" / "run")
