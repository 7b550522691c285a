"""Finite spikes, a run's folder and captures under Lightning's Trainer and Fabric."""

import pytest
import torch
from torch import nn

from halfstep import ConfigError, NonFiniteError, PrecisionError, Recorder, SpikeError
from halfstep.report.record import read_run

pytest.importorskip("lightning")
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer

from halfstep.integrations import fabric as ours
from halfstep.integrations.lightning import (
    HalfstepPrecision,
    ScaledPrecision,
    StepLog,
    replay,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:(the step is left out|back to a copy)"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|self.trainer)"),
]
BAD = 30


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, factor = batch
        return (self.net(x) - 1).square().mean() * factor

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(bad=BAD, factor=400.0, steps=36, parts=2):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=draw), factor if step == bad else 1.0)
        for step in range(1, steps + 1)
        for _ in range(parts)
    ]


def fit(tmp_path, plugin, *, folder=True, **options):
    log = StepLog(folder=tmp_path / "run", captures=2) if folder else StepLog()
    module = Module()
    trainer = Trainer(
        plugins=[plugin], callbacks=[log], accelerator="cpu", max_epochs=1, logger=False,
        accumulate_grad_batches=2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data(**options), batch_size=None))
    return module


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master"])
def test_lightning_skips_lists_captures_and_repeats_a_spike(tmp_path, policy):
    fit(tmp_path, HalfstepPrecision(policy, on_spike="skip:3"))
    record = read_run(tmp_path / "run")
    assert [line["step"] for line in record.skipped] == [BAD]
    assert len(record.steps) == 36
    (line,) = record.excluded
    assert (line["step"], line["batch_idx"]) == (BAD, [58, 59])
    module = Module()
    capture = tmp_path / "run" / "captures" / f"step-{BAD - 1:08d}"
    found = replay(capture, module, module.configure_optimizers())
    assert (found.repeated, found.step) == (True, BAD)
    assert found.found.loss == record.steps[BAD - 1]["loss"]
    module = Module()
    other = replay(capture, module, module.configure_optimizers(), precision="fp32")
    assert other.verdict == "fp32 would not have survived"


def test_lightning_stops_rolls_back_and_the_folder_changes_no_weight(tmp_path):
    with pytest.raises(SpikeError):
        fit(tmp_path, HalfstepPrecision("fp32", on_spike="stop"))
    assert read_run(tmp_path / "run").steps[-1]["step"] == BAD
    plugin = HalfstepPrecision("fp32", on_spike="rollback:4")
    with_folder = fit(tmp_path / "b", plugin)
    assert [line["step"] for line in read_run(tmp_path / "b" / "run").excluded][-1] == BAD
    without = fit(tmp_path, HalfstepPrecision("fp32", on_spike="rollback:4"), folder=False)
    for one, two in zip(with_folder.parameters(), without.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_nan_is_captured_too(tmp_path):
    with pytest.raises(NonFiniteError):
        fit(tmp_path, HalfstepPrecision("bf16-mixed"), bad=5, factor=float("nan"))
    last = read_run(tmp_path / "run").steps[-1]
    assert (last["step"], last["loss"], last["skip_reason"]) == (5, "nan", "nonfinite_loss")
    module = Module()
    capture = tmp_path / "run" / "captures" / "step-00000004"
    assert replay(capture, module, module.configure_optimizers()).repeated


def test_fabric_has_the_guard_and_takes_a_recorder(tmp_path):
    precision = ours.HalfstepPrecision("bf16-mixed", on_spike="skip:3")
    fabric = Fabric(accelerator="cpu", plugins=[precision])
    module = Module().net
    model, optimizer = precision.setup(
        fabric, module, torch.optim.AdamW(module.parameters(), lr=1e-3)
    )
    with Recorder(precision.engine, tmp_path, captures=1) as recorder:
        for x, factor in data(parts=1):
            recorder.batch([x, factor])
            fabric.backward((model(x) - 1).square().mean() * factor)
            optimizer.step()
            recorder.step(precision.last_step)
            optimizer.zero_grad()
    assert [line["step"] for line in read_run(tmp_path).skipped] == [BAD]
    assert (tmp_path / "captures" / f"step-{BAD - 1:08d}").is_dir()


def test_what_lightning_cannot_honour_is_refused_by_name(tmp_path):
    with pytest.raises(PrecisionError, match=r"ScaledPrecision\(on_spike='skip'\).*HalfstepPrec"):
        ScaledPrecision(device="cpu", on_spike="skip")
    with pytest.raises(PrecisionError, match="on_spike='often'; allowed"):
        HalfstepPrecision("fp32", on_spike="often")
    with pytest.raises(ConfigError, match="captures=2 without a folder"):
        StepLog(captures=2)
    with pytest.raises(ConfigError, match=r"StepLog\(folder=.* with ScaledPrecision"):
        fit(tmp_path, ScaledPrecision(device="cpu"))
    precision = ours.HalfstepPrecision("fp32", on_spike="skip")
    fabric = Fabric(accelerator="cpu", plugins=[precision])
    nets = [Module().net, Module().net]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with pytest.raises(PrecisionError, match="on_spike=skip:10 with 2 optimizers"):
        precision.setup(fabric, nets, *optimizers)
