"""A run that is not finite names the first cause by itself, and is otherwise as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep.errors import NonFiniteError
from halfstep.report.findings import verdict
from halfstep.report.record import read_run
from halfstep.trainer.loop import CauseSearch, train
from trainer.runs import (
    assert_same_tensors,
    metrics,
    newest,
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
    rows = (~torch.isfinite(x) | (x == broken)).any(-1).nonzero().view(-1).tolist()
    assert list(cause.samples) == rows != []
    message = str(error.value)
    assert f"micro-batch {cause.micro_batch} of 2" in message
    lines = message.splitlines()
    assert lines[1:3] == [f"first cause: {cause.summary}", f"to do: {cause.remedy}"]
    assert lines[3].startswith("try: ")
    (line,) = causes(tmp_path / "r")
    assert (line["step"], line["cause_class"]) == (step, cause_class)
    last = strict(tmp_path / "r")[-1]
    assert last["first_cause"] == cause.summary
    assert last["loss"] in ("nan", "inf")


def test_an_exploded_run_has_four_lines_and_a_learning_rate_to_type(tmp_path):
    trainer, _ = train_rows(tmp_path / "r", 0.0, precision="fp32", learning_rate=1e12)
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    what, first, to_do, typed = str(error.value).splitlines()
    assert what.startswith("step ")
    assert first.startswith("first cause: ")
    assert to_do.startswith("to do: lower the learning rate: the loss rose from ")
    assert typed == f"try: Trainer(learning_rate=8e+10, output_dir='{tmp_path}/r-2', ...).train()"
    (line,) = causes(tmp_path / "r")
    assert line["remedy"] == to_do.removeprefix("to do: ")
    assert "\ntry: Trainer(learning_rate=8e+10, output_dir=" in verdict(read_run(tmp_path / "r"))


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
        ticks = list(train(session, Path(folder.name).parent))
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
    ticks = list(train(session, Path(folder.name).parent))
    folder.close()
    told = [t.record.step for t in ticks if t.record.first_cause]
    assert told == [3]
    (cause,) = causes(tmp_path / "r")
    assert (cause["cause_class"], cause["op"]) == ("own autograd.Function", "aten.div.Tensor")
    assert "gradcheck" in ticks[2].verdicts[0]
