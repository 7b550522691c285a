"""The folder that halfstep.Recorder writes for a loop of one's own."""

import json

import pytest
import torch
from torch import nn

from halfstep import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    Precision,
    PrecisionError,
    Recorder,
    SpikeError,
)
from halfstep.report.findings import verdict
from halfstep.report.record import read_run
from halfstep.trainer.run import run_config

pytestmark = pytest.mark.filterwarnings("ignore:(the step is left out|back to a copy)")


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(policy, folder, on_spike):
    """Train 36 steps of two micro-batches with a Recorder; step 30 has large targets."""
    model, optimizer = made()
    draw = torch.Generator().manual_seed(5)
    precision = Precision(policy, model, optimizer, on_spike=on_spike)
    results = []
    with Recorder(precision, folder) as recorder:
        for step in range(1, 37):
            for _ in range(2):
                x = torch.randn(8, 6, generator=draw)
                y = x.sum(1, keepdim=True) * (300 if step == 30 else 1)
                with precision.autocast():
                    loss = (model(x) - y).square().mean() / 2
                precision.backward(loss)
            results.append(recorder.step(precision.step(max_norm=1.0)))
    return results


def test_the_folder_is_what_the_report_reads(tmp_path):
    results = train("bf16-mixed", tmp_path, "skip:4")
    record = read_run(tmp_path)
    assert record.policy == "bf16-mixed"
    assert [line["step"] for line in record.skipped] == [30]
    assert record.series("loss")[1] == [r.loss for r in results]
    with pytest.raises(ConfigError, match=r"a run of halfstep\.Recorder.*: halfstep report"):
        run_config(tmp_path)


def test_a_stop_writes_the_last_line(tmp_path):
    with pytest.raises(SpikeError):
        train("fp32", tmp_path, "stop")
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["skip_reason"] in ("loss_spike", "gradient_spike")


@pytest.mark.parametrize("leave", [True, False])
def test_an_error_that_the_loop_catches_is_recorded(tmp_path, leave):
    """Whether the loop ends then, or goes on with the next batch."""
    model, optimizer = made()
    precision = Precision("fp32", model, optimizer)
    with Recorder(precision, tmp_path) as recorder:
        for step in range(1, 41):
            x = torch.randn(8, 6) * (torch.nan if step == 40 - 10 * (not leave) else 1)
            with precision.autocast():
                loss = model(x).square().mean()
            try:
                recorder.step(precision.step(loss))
            except NonFiniteError:
                if leave:
                    break
    record = read_run(tmp_path)
    said = "Step 40 was not finite, and the run ended there (1 of 40 steps skipped)"
    if not leave:
        said = (
            "Steps that were not finite, left out: 1; the first is step 30 (1 of 40 steps skipped)"
        )
    assert [line["step"] for line in record.steps] == [*range(1, 41)]
    assert [line["skip_reason"] for line in record.skipped] == ["nonfinite_loss"]
    assert verdict(record) == said


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
