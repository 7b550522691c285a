"""A run that is not finite names the first cause by itself, and is otherwise as it was."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep.cli.main import main
from halfstep.errors import NonFiniteError
from halfstep.trainer.config.config import shipped_configs
from halfstep.trainer.loop import train
from halfstep.trainer.run import first_cause
from halfstep.trainer.run.first_cause import CauseSearch
from trainer.runs import (
    assert_same_tensors,
    metrics,
    newest,
    overflowing,
    small_config,
    start,
)


def causes(path):
    file = path / "causes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def strict(path):
    """The lines of metrics.jsonl, refusing the NaN that is not JSON."""

    def refuse(word):
        raise AssertionError(word)

    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def broken_at(session, step, how=lambda total: total * float("nan")):
    """Break the loss of one step, however often it is computed."""
    loss_sum = session.loss_sum

    def wrapped(batch):
        total, count = loss_sum(batch)
        return (how(total) if session.step + 1 == step else total), count

    session.loss_sum = wrapped


# The sample


def train_rows(path, broken, **settings):
    """Rows of 6 numbers in 24 items; one number of item 5 is replaced."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator)
    x[5, 2] = broken
    items = [(row, row[3:].argmax()) for row in x]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))
    seen = []

    def loss(model, batch):
        seen.append(batch[0])
        return F.cross_entropy(model(batch[0]), batch[1])

    trainer = halfstep.Trainer(
        model, items, loss, batch_size=8, grad_accum=2, max_steps=6, device="cpu", quiet=True,
        output_dir=str(path), **settings,
    )  # fmt: skip
    return trainer, seen


@pytest.mark.parametrize(
    ("broken", "precision", "cause_class", "op"),
    [
        (float("nan"), "fp32", "data not finite", "aten.addmm.default"),
        (float("inf"), "bf16-mixed", "data not finite", "aten._to_copy.default"),
        (1e6, "fp16-mixed", "overflow in a cast", "aten._to_copy.default"),
    ],
)
def test_one_broken_row_is_named_by_micro_batch(tmp_path, broken, precision, cause_class, op):
    trainer, seen = train_rows(tmp_path / "r", broken, precision=precision)
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    cause = error.value.first_cause
    assert (cause.cause_class, cause.op, cause.module) == (cause_class, op, "0")
    assert cause.micro_batches == 2
    step = len(metrics(tmp_path / "r"))
    x = seen[2 * (step - 1) + cause.micro_batch - 1]
    assert not torch.isfinite(x).all() or x.abs().max() == broken
    message = str(error.value)
    assert f"micro-batch {cause.micro_batch} of 2" in message
    assert f"to do: {cause.remedy}" in message
    (line,) = causes(tmp_path / "r")
    assert (line["step"], line["cause_class"]) == (step, cause_class)
    last = strict(tmp_path / "r")[-1]
    assert last["first_cause"] == cause.summary
    assert last["loss"] in ("nan", "inf")


# What a search leaves


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-split", "fp16-mixed,init_scale=256"])
@pytest.mark.filterwarnings("ignore:.*on_nonfinite=:UserWarning")
def test_a_run_that_goes_on_is_bit_for_bit_the_one_without_a_search(
    corpus, tmp_path, monkeypatch, policy
):
    config = small_config(
        corpus, policy, run__on_nonfinite="skip:1", model__dropout=0.1, run__eval_every=0,
        run__grad_accum=2,
    )  # fmt: skip
    found = []
    for name in ("searched", "not"):
        if name == "not":
            monkeypatch.setattr(CauseSearch, "_look", lambda *_: None)
        session, folder = start(config, tmp_path / name)
        broken_at(session, 5)
        ticks = list(train(session, folder.path))
        folder.close()
        found.append(newest(tmp_path / name))
        assert [t.record.applied for t in ticks].count(False) == 1
    assert_same_tensors(found[0].weights, found[1].weights)
    assert_same_tensors(found[0].optimizer, found[1].optimizer)
    (cause,) = causes(tmp_path / "searched")
    assert (cause["step"], cause["cause_class"]) == (5, "literal not finite")
    assert not causes(tmp_path / "not")
    a, b = metrics(tmp_path / "searched"), metrics(tmp_path / "not")
    assert "literal not finite" in a[4].pop("first_cause")
    assert a == b


@pytest.mark.filterwarnings("ignore:.*on_nonfinite=:UserWarning")
def test_a_search_that_fails_says_so_and_the_run_goes_on(corpus, tmp_path):
    config = small_config(corpus, run__on_nonfinite="skip:1", run__eval_every=0)
    session, folder = start(config, tmp_path / "r")
    loss_sum, calls = session.loss_sum, []

    def wrapped(batch):
        calls.append(0)
        if len(calls) == 4:
            raise ValueError("only once")
        total, count = loss_sum(batch)
        return (total * float("nan") if len(calls) == 3 else total), count

    session.loss_sum = wrapped
    ticks = list(train(session, folder.path))
    folder.close()
    assert len(ticks) == 8
    assert ticks[2].verdicts == ("looking for the first cause failed (ValueError: only once)",)
    assert not causes(tmp_path / "r")


def test_a_resumed_run_keeps_the_causes_up_to_its_checkpoint(corpus, tmp_path):
    session, folder = start(small_config(corpus), tmp_path / "r")
    lines = [json.dumps({"step": step}) + "\n" for step in (2, 4, 5)]
    (tmp_path / "r" / "causes.jsonl").write_text("".join(lines))
    session.step = 4
    with CauseSearch(session, tmp_path / "r"):
        assert [cause["step"] for cause in causes(tmp_path / "r")] == [2, 4]
    folder.close()


# Skips


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp16-master"])
def test_a_scale_that_searches_for_its_level_is_no_fault(corpus, tmp_path, policy):
    session, folder = start(small_config(corpus, overflowing(policy)), tmp_path / "r")
    ticks = list(train(session, folder.path))
    folder.close()
    assert sum(not t.record.applied for t in ticks) >= 3  # else nothing was searched
    assert not causes(tmp_path / "r")
    assert not any(t.verdicts for t in ticks)


class Pole(torch.autograd.Function):
    """The identity, whose gradient no loss scale makes finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 0


def test_a_fault_that_no_scale_cures_is_told_at_the_third_skip(corpus, tmp_path):
    session, folder = start(small_config(corpus, "fp16-mixed"), tmp_path / "r")
    loss_sum = session.loss_sum

    def wrapped(batch):
        total, count = loss_sum(batch)
        return Pole.apply(total), count

    session.loss_sum = wrapped
    ticks = list(train(session, folder.path))
    folder.close()
    told = [t.record.step for t in ticks if t.record.first_cause]
    assert told == [3]
    (cause,) = causes(tmp_path / "r")
    assert (cause["cause_class"], cause["op"]) == ("own autograd.Function", "aten.div.Tensor")
    assert "gradcheck" in ticks[2].verdicts[0]


# The command, and the one that it names


def stopped(words, capsys):
    assert main(words) == 3
    return capsys.readouterr().err


def test_the_command_names_the_cause_and_a_command_that_runs(corpus, tmp_path, capsys):
    tiny = [
        "--data", str(corpus), "--tokenizer", "bytes", "--quiet", "--model.n_layer", "1",
        "--model.n_embd", "32", "--model.n_head", "2", "--model.block_size", "32", "--max-steps",
        "12", "--schedule.warmup_steps", "0", "--eval-every", "0", "--batch-size", "4", "--device",
        "cpu",
    ]  # fmt: skip
    words = ["train", "--config", "gpt-tiny", *tiny, "--precision", "fp16-pure", "--optimizer.eps",
             "1e-4", "--learning-rate", "30", "--max-norm", "0",
             "--output-dir", str(tmp_path / "r")]  # fmt: skip
    told = stopped(words, capsys)
    assert "first cause: weights diverged: aten." in told
    assert "lower the learning rate" in told
    command = told.strip().partition("try: halfstep ")[2]
    rate = tomllib.loads(shipped_configs()["gpt-tiny"])["optimizer"]["learning_rate"]
    assert command.endswith(f"--learning-rate {rate:g}")  # lower than a tenth of 30
    assert main([*shlex.split(command), "--quiet"]) == 0


def test_a_rate_is_lowered_tenfold_and_to_the_packages_own_at_least(corpus):
    shipped = tomllib.loads(shipped_configs()["gpt-tiny"])["optimizer"]["learning_rate"]
    config = small_config(corpus)

    def lower(name, rate):
        own = replace(config, name=name, optimizer=replace(config.optimizer, learning_rate=rate))
        return first_cause._lower_rate(own)

    assert lower("gpt-tiny", 5.0) == shipped
    assert lower("gpt-tiny", 1e-5) == pytest.approx(1e-6)
    assert lower("mine", 5.0) == pytest.approx(0.5)
