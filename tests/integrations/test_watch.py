"""``halfstep.watch`` in the loops of Accelerate, the Transformers Trainer and Lightning."""

from __future__ import annotations

import contextlib

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from halfstep import load_numerics, watch  # noqa: E402
from halfstep.integrations.hf_trainer import attach  # noqa: E402
from halfstep.integrations.lightning import HalfstepPrecision, StepLog  # noqa: E402

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
         "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}  # fmt: skip


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int):
        ids = torch.randint(50, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": i % 2}


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = bert()

    def training_step(self, batch, index):
        return self.net(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=64, max_position_embeddings=16)
    )  # fmt: skip


def watched_or_not(model, path, source=None):
    return contextlib.nullcontext() if path is None else watch(model, source, every=2, to=path)


def by_accelerate(path, precision):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.utils.data.DataLoader(Rows(), batch_size=4)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    with watched_or_not(model, path, optimizer):
        for batch in rows:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return model


def by_lightning(path, **precision):
    module = Module()
    trainer = pl.Trainer(**QUIET, accumulate_grad_batches=2, **precision)
    with watched_or_not(module, path):
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=4))
    return module


def check(loop, path, prefix=""):
    plain, watched = loop(None), loop(path)
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    steps = load_numerics(path)
    assert [step.step for step in steps] == [1, 2, 4]
    name = f"{prefix}bert.encoder.layer.0.output.dense"
    for step in steps:
        assert step.applied
        found = {(one.kind, one.name): one.elements for one in step.tensors}
        assert found["activation", name] == 2 * 4 * 8 * 32  # two micro-batches
        assert found["activation_gradient", name] == 2 * 4 * 8 * 32
        for kind in ("weight", "gradient"):
            assert found[kind, f"{name}.weight"] == 64 * 32
    return steps


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(tmp_path, precision):
    check(lambda path: by_accelerate(path, precision), tmp_path / "n.jsonl")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("own", [False, True])
def test_lightning(tmp_path, own):
    def loop(path):
        if own:
            return by_lightning(path, plugins=[HalfstepPrecision("bf16-mixed")])
        return by_lightning(path, precision="bf16-mixed")

    check(loop, tmp_path / "n.jsonl", "net.")


GROWING = "bert.encoder.layer.0.output.dense"


def grow(model, step):
    if step >= 40:
        with torch.no_grad():
            model.get_submodule(GROWING).weight.mul_(1.3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_and_the_transformers_trainer_warn_of_a_layer(tmp_path):
    class Growing(Module):
        def on_train_batch_end(self, *_):
            grow(self.net, self.global_step)

    class Grow(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            grow(model, state.global_step)

    log = StepLog(health_every=1)
    made = {"callbacks": [log], "plugins": [HalfstepPrecision("fp32")]}
    rows = torch.utils.data.DataLoader(Rows(), batch_size=4)
    with pytest.warns(UserWarning, match=f"layer health: net.{GROWING}: largest weight"):
        pl.Trainer(**{**QUIET, "max_epochs": 8}, **made).fit(Growing(), rows)
    assert log._measuring == []
    options = {"output_dir": str(tmp_path), "use_cpu": True, "num_train_epochs": 8, "report_to": []}
    options |= {"per_device_train_batch_size": 4, "disable_tqdm": True, "save_strategy": "no"}
    trainer = Trainer(bert(), TrainingArguments(**options), train_dataset=Rows())
    callback = attach(trainer, health_every=1)
    trainer.add_callback(Grow())
    with pytest.warns(UserWarning, match=f"layer health: {GROWING}: largest weight"):
        trainer.train()
    assert callback.health.alarms[0].layer == GROWING
