"""The public Trainer: a module, data, loss, optimizer and schedule that are the user's own."""

import random
from collections import UserDict
from contextlib import contextmanager

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.trainer.runs import assert_same_tensors, metrics, newest
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import halfstep
from halfstep.cli.main import main
from halfstep.errors import ConfigError, PrecisionError
from halfstep.trainer.checkpoint import list_checkpoints
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.run import OptimizerConfig
from halfstep.trainer.step import make_optimizer, to_device


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def pairs(count, seed=1):
    """Points and the class that a fixed linear map gives them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return [(row, row[:3].argmax()) for row in x]


def cross_entropy(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def scores(model, batch):
    logits = model(batch[0])
    return {
        "loss": functional.cross_entropy(logits, batch[1]),
        "accuracy": (logits.argmax(1) == batch[1]).float().mean(),
    }


def trainer(path, model=None, data=None, **settings):
    settings = {
        "precision": "fp32", "batch_size": 8, "max_steps": 12, "save_every": 4, "keep": 9,
        "learning_rate": 1e-2, "device": "cpu", "quiet": True, "output_dir": str(path), **settings,
    }  # fmt: skip
    return halfstep.Trainer(model or net(), data or pairs(40), cross_entropy, **settings)


def assert_same_state(a, b):
    first, second = newest(a), newest(b)
    assert_same_tensors(first.weights, second.weights)
    assert_same_tensors(first.optimizer, second.optimizer)


def test_ten_lines_train_evaluate_and_keep_the_best(tmp_path):
    trained = trainer(
        tmp_path / "r", data=pairs(200), val_data=pairs(30, seed=2), evaluate=scores,
        best_by="accuracy", max_steps=60, eval_every=20, precision="bf16-mixed",
    ).train()  # fmt: skip
    assert trained.step == 60
    assert trained.stopped_by == ""
    assert trained.best.measures["accuracy"] > 0.6  # by chance: 1 of 3
    told = [r for r in metrics(trained.folder) if "val_loss" in r]
    assert [r["step"] for r in told] == [20, 40, 60]
    assert max(r["val_measures"]["accuracy"] for r in told) == trained.best.measures["accuracy"]
    # another process loads the best state and measures the same
    model = net()
    safetensors.torch.load_model(model, trained.folder / "model" / "model.safetensors")
    model.eval()
    x, y = (torch.stack(column) for column in zip(*pairs(30, seed=2), strict=True))
    accuracy = float((model(x).argmax(1) == y).float().mean())
    # bf16 may judge a point on the border otherwise than fp32: at most 2 of 30 points
    assert abs(accuracy - trained.best.measures["accuracy"]) <= 2 / 30


def test_fp32_steps_are_those_of_a_hand_written_loop(tmp_path):
    model = nn.Linear(6, 3)
    other = nn.Linear(6, 3)
    other.load_state_dict(model.state_dict())
    data = pairs(8)
    trainer(
        tmp_path / "r", model, data, max_steps=3, max_norm=0, weight_decay=0,
        schedule=lambda step: 1 / (1 + step),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    ).train()  # fmt: skip
    x, y = (torch.stack(column) for column in zip(*data, strict=True))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    for step in range(3):  # an epoch is one batch of all items
        optimizer.param_groups[0]["lr"] = 0.5 / (1 + step)
        optimizer.zero_grad()
        functional.cross_entropy(other(x), y).backward()
        optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        # the items come in another order: sums of 8 terms near 1, 3 steps, 6e-8 each
        torch.testing.assert_close(one, two, rtol=0, atol=3 * 8 * 6e-8)


class Noisy(Dataset):
    """Items with augmentation by all three generators, as real pipelines have."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        x, y = self.items[index]
        return x + 0.1 * torch.rand(6) + 0.1 * random.random() + 0.1 * np.random.rand(), y


@pytest.mark.parametrize(
    ("precision", "workers", "settings"),
    [
        ("bf16-mixed", 0, {"ema_decay": 0.9}),
        ("bf16-split,keep_fp32=type:BatchNorm1d", 1, {}),
        ("fp16-mixed", 0, {}),
    ],
)
def test_a_resume_is_bit_for_bit(tmp_path, precision, workers, settings):
    def make(path, **more):
        return trainer(
            path, data=Noisy(pairs(40)), val_data=pairs(20), precision=precision, grad_accum=2,
            num_workers=workers, eval_every=6, warmup_ratio=0.25, **settings, **more,
        )  # fmt: skip

    make(tmp_path / "whole").train()

    def stop(tick):
        if tick.record.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "cut", callbacks=[stop]).train()
    again = make(tmp_path / "cut").train(resume=True)
    assert again.step == 12
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert_same_state(tmp_path / "cut", tmp_path / "whole")
    kept = newest(tmp_path / "whole").optimizer
    assert "1.running_mean/buffer" in kept
    assert kept["1.num_batches_tracked/buffer"] == 24
    assert ("0.weight/ema" in kept) == ("ema_decay" in settings)


def test_the_average_is_evaluated_and_handed_out(tmp_path):
    trained = trainer(
        tmp_path / "r",
        nn.Linear(6, 3),
        val_data=pairs(20),
        ema_decay=0.5,
        max_steps=4,
        eval_every=4,
    ).train()
    saved = newest(trained.folder)
    model = nn.Linear(6, 3)
    safetensors.torch.load_model(model, trained.folder / "model" / "model.safetensors")
    assert torch.equal(model.weight, saved.optimizer["weight/ema"])
    assert not torch.equal(model.weight, saved.weights["weight"])
    x, y = (torch.stack(column) for column in zip(*pairs(20), strict=True))
    loss = functional.cross_entropy(model(x), y).item()
    assert trained.best.loss == pytest.approx(loss, rel=1e-5)  # sums of 8 and of 20 rows


def test_a_micro_batch_without_a_target_adds_nothing(tmp_path):
    ends = []
    for count in (8, 4):  # of each step's 8 rows, targets stand in the first 4
        data = [
            (x, y if n < 4 else torch.tensor(-100)) for n, (x, y) in enumerate(pairs(8)[:count])
        ]
        model = nn.Linear(6, 3)
        nn.init.constant_(model.weight, 0.1), nn.init.zeros_(model.bias)
        halfstep.Trainer(
            model, data, cross_entropy, targets=lambda batch: int((batch[1] >= 0).sum()),
            precision="fp32", batch_size=count, grad_accum=count, max_steps=4, device="cpu",
            quiet=True, output_dir=str(tmp_path / f"{count}"),
        ).train()  # fmt: skip
        ends.append(model.weight)
    # the same four rows in another order: fp32 rounding
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)


def test_a_callback_ends_the_run_with_a_checkpoint(tmp_path):
    def watch(tick):
        if tick.record.step == 3:
            made.stop()

    made = trainer(tmp_path / "r", callbacks=[watch], val_data=pairs(9))
    trained = made.train()
    assert (trained.step, trained.stopped_by) == (4, "stop")
    assert trained.evaluation is not None
    assert list_checkpoints(trained.folder / "checkpoints")[-1].name == "step-00000004"


def test_the_model_is_a_plain_one_afterwards(tmp_path):
    model = plain()
    trainer(tmp_path / "r", model, precision="bf16-split", max_steps=2).train()
    assert not any(module._forward_pre_hooks for module in model.modules())
    torch.save(model, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=False)[0].weight.dtype == torch.bfloat16


def test_a_batch_of_any_kind_goes_to_the_device():
    batch = UserDict({"x": [torch.ones(2)], "name": "a"})  # as transformers makes
    found = to_device(batch, torch.device("meta"))
    assert found["x"][0].is_meta
    assert found["name"] == "a"


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_a_policy_that_needs_it_gets_our_own_optimizer(name):
    policy = halfstep.parse_policy("bf16-split")
    made = make_optimizer(net(), OptimizerConfig(name=name, beta1=0.7), policy, seed=5)
    assert type(made).__module__.startswith("halfstep.optim")
    group = made.param_groups[0]
    assert group.get("momentum", group.get("betas", (0,))[0]) == 0.7


@contextmanager
def refused(*words):
    with pytest.raises((ConfigError, PrecisionError)) as caught:
        yield
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batchsize": 4}, ["batchsize", "did you mean 'batch_size'", "max_steps"]),
        ({"optimizer": "adamv"}, ["optimizer.name", "adamv", "adamw"]),
        ({"model": plain}, ["a torch.nn.Module"]),
        ({"optimizer": lambda _: torch.optim.SGD(net().parameters())}, ["does not have"]),
        ({"precision": "bf16-split", "optimizer": "adam"}, ["bf16-split", "halfstep.optim"]),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_do(tmp_path, change, words):
    parts = {"model": plain(), "train_data": pairs(16), "loss": cross_entropy, "val_data": pairs(8)}
    settings = {"batch_size": 8, "max_steps": 1, "device": "cpu", "quiet": True}
    with refused(*words):
        halfstep.Trainer(**parts | settings | {"output_dir": str(tmp_path / "r")} | change).train()


def test_a_finished_run_is_neither_overwritten_nor_the_commands_to_go_on_with(tmp_path, capsys):
    path = tmp_path / "r"
    trainer(path, max_steps=1).train()
    config = load_config(str(path / "config.toml"))
    assert config.TASK == "module"
    assert config.run.max_steps == 1
    with refused("holds a run already"):
        trainer(path, max_steps=1).train()
    with refused("seed=7 (the run has 1337)"):
        trainer(path, max_steps=2, seed=7).train(resume=True)
    assert main(["train", "--resume", "--output-dir", str(path)]) == 2
    assert f"Trainer(output_dir='{path}', ...).train(resume=True)" in capsys.readouterr().err
    assert main(["generate", "--run", str(path), "--prompt", "x"]) == 2
    assert "a run of halfstep.Trainer, for which there is no generate" in capsys.readouterr().err
