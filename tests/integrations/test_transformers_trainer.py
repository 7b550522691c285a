"""halfstep inside the Transformers Trainer: the same bits, right skips, true logs, a stop."""

import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep import ConfigError, NonFiniteError, PrecisionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from halfstep.integrations.hf_trainer import attach  # noqa: E402

INF, NAN = math.inf, math.nan
STEPS, BATCH = 6, 4


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        ids = torch.randint(1, 50, (8,), generator=draw)
        return {"input_ids": ids, "labels": int(ids[0] > 25)}


def bert(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


class Break(TrainerCallback):
    """Multiplies the classifier's gradient by a number in some steps, counted from 0."""

    def __init__(self, steps, value=INF):
        self.steps, self.value, self.rates, self.skips = steps, value, [], []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.state = state

        def hook(gradient):
            return gradient * self.value if state.global_step in self.steps else None

        self.handle = model.classifier.weight.register_hook(hook)

    def on_train_end(self, args, state, control, **kwargs):
        self.handle.remove()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.skips.append(optimizer.step_was_skipped)

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr()[0])


def made(tmp_path, *, model=None, callbacks=(), trainer=Trainer, extra=None, **arguments):
    settings = {
        "output_dir": str(tmp_path / "out"), "use_cpu": True, "report_to": [], "max_steps": STEPS,
        "per_device_train_batch_size": BATCH, "logging_steps": 1, "save_strategy": "no",
        "learning_rate": 1e-2, "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 3,
    }  # fmt: skip
    return trainer(
        bert() if model is None else model,
        TrainingArguments(**{**settings, **arguments}),
        train_dataset=Data(),
        callbacks=list(callbacks),
        **(extra or {}),
    )


class AlwaysNaN(nn.Module):
    def __init__(self, broken=lambda call: True):
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self.calls = 0
        self.broken = broken

    def forward(self, input_ids, labels):
        logits = self.linear(input_ids.float())
        if self.broken(self.calls):
            logits = logits * 3e38 * 3e38  # inf, and cross entropy makes inf - inf of it
        self.calls += 1
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def bits(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry and "loss" in entry]


# The same training


@pytest.mark.parametrize(
    ("optim", "arguments"),
    [
        ("adamw_torch_fused", {"max_grad_norm": 0.1, "gradient_accumulation_steps": 3}),
        ("sgd", {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0}),
    ],
)
def test_where_nothing_overflows_the_bits_are_the_same(tmp_path, optim, arguments):
    arguments = {"optim": optim, "weight_decay": 0.1, **arguments}
    plain = made(tmp_path, **arguments)
    plain.train()
    for scaler in (False, True):
        trainer = made(tmp_path, **arguments)
        options = {"init_scale": 2.0**12, "growth_interval": 2} if scaler else {}
        callback = attach(trainer, scaler=scaler, lost_updates_every=1, **options)
        trainer.train()
        assert same(bits(trainer), bits(plain))
        for key in ("loss", "grad_norm", "learning_rate"):
            assert logged(trainer, key) == logged(plain, key)
        if scaler:
            assert callback.scaler.get_scale() == 2.0**15
            assert logged(trainer, "loss_scale") == [
                2.0 ** (12 + (n + 1) // 2) for n in range(STEPS)
            ]


# Skips


@pytest.mark.parametrize(
    ("optim", "value", "reason"),
    [("adamw_torch_fused", INF, "overflow"), ("adamw_torch", NAN, "nan_gradients")],
)
def test_a_skip_is_told_holds_the_schedule_and_leaves_the_weights(tmp_path, optim, value, reason):
    held = []

    class Weights(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            held.append(model.bert.pooler.dense.weight.detach().clone())

    broken = Break({2, 3}, value)
    trainer = made(tmp_path, callbacks=[broken, Weights()], optim=optim)
    attach(trainer, scaler=True, init_scale=2.0**12)
    trainer.train()
    assert broken.skips == [False, False, True, True, False, False]
    assert broken.rates[1] == broken.rates[2] == broken.rates[3]
    # the linear schedule is where four steps have brought it
    assert broken.rates[-1] == pytest.approx(1e-2 * (STEPS - 4) / STEPS, rel=1e-12)
    assert torch.equal(held[1], held[3])
    assert not torch.equal(held[3], held[4])
    assert logged(trainer, "skipped_steps") == [0, 0, 1, 2, 2, 2]
    assert logged(trainer, "loss_scale") == [2.0**e for e in (12, 12, 11, 10, 10, 10)]
    steps = [e["step"] for e in trainer.state.log_history if "skip_reason" in e]
    assert steps == [3, 4]
    assert set(logged(trainer, "skip_reason")) == {reason}
    assert all(map(math.isfinite, logged(trainer, "loss")))


# NaN


@pytest.mark.parametrize("scaler", [False, True])
def test_a_nan_loss_is_shown_and_stops_before_the_step(tmp_path, scaler):
    model = AlwaysNaN(lambda call: call == 5)
    trainer = made(tmp_path, model=model, gradient_accumulation_steps=2)
    attach(trainer, scaler=scaler)
    held = []
    trainer.add_callback(keep(held))
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert caught.value.cause == "forward"
    message = str(caught.value)
    assert message.startswith("step 3: the loss is nan in micro-batch 2 of 2: the forward pass or")
    assert "the weights are those after step 2" in message
    assert math.isnan(logged(trainer, "loss")[-1])
    assert len(logged(trainer, "loss")) == 3
    assert same(bits(trainer), held[-1])
    assert len(held) == 2
    model.broken = lambda call: False
    trainer.train()  # and it can be used again
    assert same(bits(trainer), held[-1])
    assert trainer.state.global_step == STEPS


def keep(held):
    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            held.append([p.detach().clone() for p in model.parameters()])

    return Keep()


class OneRow(AlwaysNaN):
    """Breaks rows whose first token is 3, of which there is one in the second batch."""

    def forward(self, input_ids, labels):
        steep = (input_ids[:, :1] == 3) * 200.0
        logits = self.linear(input_ids.float()) + steep.exp()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_the_row_that_breaks_a_batch_is_named(tmp_path):
    trainer = made(tmp_path, model=OneRow())
    seen = []
    callback = attach(trainer)
    step = callback.training_step
    trainer.training_step = lambda model, inputs, *more: (
        seen.append(inputs["input_ids"]), step(model, inputs, *more))[1]  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"\nfirst cause: overflow: aten\.exp") as e:
        trainer.train()
    rows = (seen[-1][:, 0] == 3).nonzero().view(-1).tolist()
    assert list(e.value.first_cause.samples) == rows


@pytest.mark.parametrize(("value", "clip"), [(INF, 1.0), (NAN, 0.0)])
def test_without_a_scaler_broken_gradients_stop_the_run(tmp_path, value, clip):
    held = []
    trainer = made(tmp_path, callbacks=[Break({2}, value), keep(held)], max_grad_norm=clip)
    attach(trainer)
    with pytest.raises(NonFiniteError, match="step 3: the norm of the gradients is") as caught:
        trainer.train()
    assert caught.value.cause == "gradients"
    assert caught.value.parameters == ("classifier.weight",)  # not all that clipping has spread to
    assert logged(trainer, "grad_norm")[-1] == pytest.approx(value, nan_ok=True)
    assert same(bits(trainer), held[-1])


# Checkpoints


@pytest.mark.parametrize("optimizer", ["theirs", "ours"])
def test_a_resumed_run_is_the_same_run(tmp_path, optimizer):
    def run(resume=None):
        ours = (halfstep.optim.AdamW, {"lr": 1e-2, "moments": "8bit"})
        broken = Break({1, 4})
        trainer = made(
            tmp_path, model=bert(dropout=0.1), callbacks=[broken], save_strategy="steps",
            save_steps=3, extra={"optimizer_cls_and_kwargs": ours} if optimizer == "ours" else {},
        )  # fmt: skip
        callback = attach(trainer, scaler=True, init_scale=2.0**12, growth_interval=2)
        trainer.train(resume_from_checkpoint=resume)
        return bits(trainer), callback.scaler.state_dict(), trainer.state.log_history[-3:-1]

    whole = run()
    resumed = run(str(tmp_path / "out" / "checkpoint-3"))
    assert same(whole[0], resumed[0])
    assert whole[1:] == resumed[1:]
    assert whole[1]["halfstep"]["skipped_total"] == 2


# Lost updates and 16-bit weights


@pytest.mark.parametrize("bf16", [False, True])
def test_accidental_pure_bf16_is_refused_before_the_first_step(tmp_path, bf16):
    model = bert().bfloat16()
    trainer = made(tmp_path, model=model, bf16=bf16)
    count = sum(p.numel() for p in model.parameters())
    attach(trainer)
    text = rf"bf16 with nothing behind them.*bert\.embeddings.*\({2 * count} bytes more"
    with pytest.raises(PrecisionError, match=text):
        trainer.train()


# Mistakes


def test_attach_refuses_what_it_cannot_do(tmp_path, monkeypatch):
    trainer = made(tmp_path)
    attach(trainer)
    with pytest.raises(ConfigError, match="already"):
        attach(trainer)

    trainer = made(tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(ConfigError, match=r"after train\(\)"):
        attach(trainer)

    trainer = made(tmp_path)
    with pytest.raises(ConfigError, match="got init_scale, but there is no loss scale"):
        attach(trainer, init_scale=8.0, ranks=halfstep.OneRank())
    trainer = made(tmp_path)
    attach(trainer, lost_updates_every=1)
    for _ in range(2):  # trials of a search for hyperparameters, each with its own Accelerator
        trainer.create_accelerator_and_postprocess()
        trainer.train()
        assert all(0 <= lost < 0.1 for lost in logged(trainer, "lost_updates"))
        assert trainer.accelerator.clip_grad_norm_.__self__.__class__.__name__ == "NumericsCallback"

    trainer = made(tmp_path)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(PrecisionError, match="DeepSpeed, which scales the loss"):
        attach(trainer)
