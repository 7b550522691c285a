"""Finite spikes, a run's folder and captures in other people's trainers."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

from halfstep import CheckpointError, ConfigError, NonFiniteError, PrecisionError, SpikeError
from halfstep.precision.scaling.spikes import SpikeDetector
from halfstep.report.record import read_run

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from accelerate import Accelerator  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from halfstep.integrations import accelerate, hf_trainer  # noqa: E402
from halfstep.integrations.hf_replay import replay  # noqa: E402
from integrations.test_accelerate import fresh  # noqa: E402, F401 - the fixture resets Accelerate
from integrations.test_transformers_trainer import Data, bert  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:(the step is left out|back to a copy)")
BAD = 30  # the step whose loss is multiplied


# Accelerate.


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))


def rows(step, part):
    draw = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(8, 4, generator=draw)


def loop(
    answer, *, scaler=None, mixed="bf16", micro=2, clip=1.0, fused=False, bad=(BAD,), steps=36
):
    """An Accelerate loop with a spike: results, weights after each step, losses and norms."""
    micro = 2
    acc = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=micro)
    ours = accelerate.attach(acc, on_spike=answer, scaler=scaler)
    optimizer = torch.optim.AdamW((model := net()).parameters(), lr=1e-3, fused=fused)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    model, optimizer, rates = acc.prepare(model, optimizer, rates)
    seen, copies, measured = [], [], []
    for step in range(1, steps + 1):
        total = 0.0
        for part in range(micro):
            with acc.accumulate(model):
                loss = (model(rows(step, part)) - 1).square().mean() * (400 if step in bad else 1)
                total += loss.item() / micro
                acc.backward(loss)
                if acc.sync_gradients:
                    square = sum(p.grad.double().square().sum() for p in model.parameters())
                    measured.append((total, math.sqrt(square) / ours.get_scale()))
                    if clip:
                        acc.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
        seen.append(ours.last_step)
        copies.append([p.detach().clone() for p in model.parameters()])
    return seen, copies, measured, ours


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [None, True])
def test_accelerate_leaves_a_spike_out_by_loss_and_norm_before_clipping(clip, fused, scale):
    mixed = "no" if scale else "bf16"
    seen, copies, measured, ours = loop("skip:3", scaler=scale, mixed=mixed, clip=clip, fused=fused)
    assert [r.applied for r in seen] == [n != BAD for n in range(1, 37)]
    assert seen[BAD - 1].reason in ("loss_spike", "gradient_spike")
    assert equal(copies[BAD - 1], copies[BAD - 2])
    assert ours.skipped_total == 1
    oracle = SpikeDetector()  # told the loop's own losses and norms, taken before any clipping
    for (loss, norm), result in zip(measured, seen, strict=True):
        assert (result.loss, result.grad_norm) == pytest.approx((loss, norm), rel=1e-5)  # fp32 sums
        assert (oracle.test(loss, norm) is None) == result.applied
        if result.applied:
            oracle.remember(loss, norm)


def test_without_a_spike_nothing_changes_and_without_a_guard_it_is_applied():
    guarded, plain = loop("skip:3", bad=()), loop("off", bad=())
    assert equal(guarded[1][-1], plain[1][-1])
    assert all(result.applied for result in loop("off")[0])


def test_accelerate_stops_or_rolls_back():
    with pytest.raises(SpikeError, match=r"the .* spikes: .*the weights are unchanged"):
        loop("stop")
    seen, copies, _, _ = loop("rollback:4")
    result = seen[BAD - 1]
    assert (result.applied, result.rolled_back) == (False, True)
    assert result.steps_undone > 0
    assert equal(copies[BAD - 1], copies[BAD - 2 - result.steps_undone])
    with pytest.raises(SpikeError):
        loop("skip:1", bad=(BAD, BAD + 1))


def test_the_window_is_saved_with_the_scaler():
    *_, ours = loop("skip:3", bad=(), steps=25)
    state = ours.state_dict()
    *_, other = loop("skip:3", bad=(), steps=1)
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.spikes.state() == ours.spikes.state()
    with pytest.raises(PrecisionError, match="has spikes="):
        other.load_state_dict(state | {"halfstep_spikes": "x"})


def test_what_accelerate_cannot_honour_is_refused_by_name():
    with pytest.raises(PrecisionError, match="on_spike='sometimes'; allowed"):
        accelerate.attach(Accelerator(cpu=True, mixed_precision="bf16"), on_spike="sometimes")
    acc = Accelerator(cpu=True, mixed_precision="bf16")
    accelerate.attach(acc, on_spike="stop")
    one, two = net(), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    one, two, *optimizers = acc.prepare(one, two, *optimizers)
    acc.backward(one(rows(1, 0)).sum() + two(rows(1, 0)).sum())
    with pytest.raises(PrecisionError, match="on_spike=stop with 2 optimizers"):
        optimizers[0].step()


# The Transformers Trainer.


class Marked(Data):
    """Examples with a factor of their loss: one bad one in step ``BAD``, of 8 a step."""

    def __init__(self, factor=1.0, at=BAD):
        self.factor, self.at = factor, at

    def __len__(self):
        return 400

    def __getitem__(self, i):
        bad = i == 8 * (self.at - 1) + 5
        return super().__getitem__(i) | {"mark": torch.tensor(self.factor if bad else 1.0)}


class Ordered(Trainer):
    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs = dict(inputs)
        factor = inputs.pop("mark").max()
        return super().compute_loss(model, inputs, *args, **kwargs) * factor


def trainer(tmp_path, factor=1.0, at=BAD, bf16=True, **options):
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=34, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-3, bf16=bf16, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=5, remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip
    made = Ordered(bert(dropout=0.1), args, train_dataset=Marked(factor, at))
    return made, hf_trainer.attach(made, **options)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_skips_lists_captures_and_repeats_a_spike(tmp_path, bf16):
    run = tmp_path / "run"
    made, callback = trainer(
        tmp_path, 300.0, bf16=bf16, on_spike="skip:3", folder=run, captures=2
    )  # fmt: skip
    made.train()
    assert callback.scaler.skipped_total == 1
    record = read_run(run)
    assert [(line["step"], line["applied"]) for line in record.steps] == [
        (n, n != BAD) for n in range(1, 35)
    ]
    assert record.policy == ("bf16-mixed" if bf16 else "fp32")
    (line,) = record.excluded
    assert (line["step"], line["batch"], line["epoch"]) == (BAD, [58, 59], [0, 0])
    capture = run / "captures" / f"step-{BAD - 1:08d}"
    again, _ = trainer(tmp_path, bf16=bf16, on_spike="skip:3")
    found = replay(again, capture)
    assert (found.step, found.repeated, found.survives) == (BAD, True, False)
    assert found.found.loss == record.steps[BAD - 1]["loss"]
    other, _ = trainer(tmp_path, bf16=not bf16, on_spike="stop")
    assert replay(other, capture).verdict.endswith("would not have survived")
    with pytest.raises(ConfigError, match="was captured with on_spike"):
        replay(trainer(tmp_path)[0], capture)


def test_a_nan_is_captured_with_its_cause_and_repeats(tmp_path):
    run = tmp_path / "run"
    made, _ = trainer(tmp_path, math.nan, at=3, folder=run, captures=1)
    with pytest.raises(NonFiniteError) as told:
        made.train()
    record = read_run(run)
    last = record.steps[-1]
    assert (last["step"], last["loss"], last["skip_reason"]) == (3, "nan", "nonfinite_loss")
    assert last["first_cause"] == told.value.first_cause.summary
    (cause,) = record.causes
    assert (cause["step"], cause["op"]) == (3, told.value.first_cause.op)
    capture = run / "captures" / "step-00000002"
    assert replay(trainer(tmp_path)[0], capture).repeated
    damaged = capture / "values.json"
    damaged.write_text(damaged.read_text().replace("nonfinite", "infinite"))
    with pytest.raises(CheckpointError, match="do not match the manifest"):
        replay(trainer(tmp_path)[0], capture)


def test_a_folder_and_a_guard_change_no_weight(tmp_path):
    plain, _ = trainer(tmp_path)
    plain.train()
    made, _ = trainer(tmp_path, on_spike="rollback:5", folder=tmp_path / "run", captures=1)
    made.train()
    assert equal(plain.model.parameters(), made.model.parameters())
    assert len(read_run(tmp_path / "run").steps) == 34


def test_the_trainer_stops_at_a_spike_and_writes_its_last_line(tmp_path):
    made, _ = trainer(tmp_path, 300.0, on_spike="stop", folder=tmp_path / "run", captures=1)
    with pytest.raises(SpikeError):
        made.train()
    record = read_run(tmp_path / "run")
    assert record.steps[-1]["step"] == BAD
    assert [line["step"] for line in record.excluded] == [BAD]
    again, _ = trainer(tmp_path, on_spike="stop")
    assert replay(again, tmp_path / "run" / "captures" / f"step-{BAD - 1:08d}").repeated


def test_contradictions_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="stop_on_nonfinite=False"):
        trainer(tmp_path, on_spike="skip", stop_on_nonfinite=False)
    with pytest.raises(ConfigError, match="captures=2 without a folder"):
        trainer(tmp_path, captures=2)
    plain = Ordered(bert(), TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True))
    with pytest.raises(ConfigError, match="without attach"):
        replay(plain, tmp_path)
