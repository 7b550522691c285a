"""On CUDA outcomes are read a step late and batches are made a step ahead; the run is the same.

The device is played by a stand-in that decides about a step at once, and tells when it is asked.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.distributed.layout import Layout
from halfstep.distributed.world import World
from halfstep.errors import NonFiniteError
from halfstep.precision.masters.stepping import Decision, DevicePath
from halfstep.precision.scaling.gradients import clip_factor
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.loop import train
from halfstep.trainer.session import Session
from halfstep.trainer.step import Ahead, Judge, MicroBatches, mean_loss
from halfstep.trainer.tasks.classify import classifier_scores
from halfstep.trainer.trainer import ModuleTask, Trainer
from trainer.runs import assert_same_tensors, metrics, newest, overflowing, small_config, start


class Device(DevicePath):
    """Decides as the host would; ``seen`` has what was done in which order."""

    def __init__(self, session: Session) -> None:
        self.steps, self.seen, self.session = session.precision._steps, [], session
        super().__init__([], lambda: torch.no_grad())
        session.precision.path = self.steps._path = self
        update, loss_sum = self.steps._update, session.loss_sum
        self.steps._update = lambda g, decided: decided.broken or update(g, decided.factor)

        def forward(batch):
            self.seen.append(("forward", session.step + 1))
            return loss_sum(batch)

        session.loss_sum = forward

    def decide(self, loss, gradients, max_norm):
        return Decided(self, self.steps.judge(loss, gradients), gradients, max_norm)


class Decided:
    def __init__(self, device, judged, gradients, max_norm) -> None:
        self.device, self.judged, self.number = device, judged, device.session.step + 1
        self.broken = judged.broken
        self.factor = 1.0 if self.broken else clip_factor(judged.norm, max_norm)
        wrong = {p: g for p, g in gradients.items() if not g.isfinite().all()}
        self.bad = {p: bool(g.isnan().any()) for p, g in wrong.items()}

    def read(self) -> Decision:
        self.device.seen.append(("read", self.number))
        return Decision(self.judged.loss, self.judged.norm, self.bad)


def run(config, path, late):
    session, lock = start(config, path)
    device = Device(session) if late else None
    with lock:
        return session, device, [*train(session, path)]


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_a_run_read_late_is_the_same(corpus, tmp_path, policy):
    often = {"run__max_steps": 12, "run__eval_every": 5, "run__health_every": 0}
    config = small_config(corpus, overflowing(policy), **often)  # health looks at its steps at once
    (session, _, ticks), (other, device, late) = (
        run(config, tmp_path / name, name == "late") for name in ("at-once", "late")
    )
    assert [t.record.step for t in late] == [t.record.step for t in ticks] == [*range(1, 13)]
    assert metrics(tmp_path / "late") == metrics(tmp_path / "at-once")
    assert [(t.evaluation, t.verdicts, t.stopped_by) for t in late] == [
        (t.evaluation, t.verdicts, t.stopped_by) for t in ticks
    ]
    assert_same_tensors(newest(tmp_path / "late").weights, newest(tmp_path / "at-once").weights)
    assert other.applied == session.applied
    skipped = [t for t in ticks if not t.record.applied]
    assert bool(skipped) == (policy == "fp16-mixed")
    at = device.seen.index
    for step in (2, 3, 6):  # no evaluation, no checkpoint: read while the next forward is under way
        assert at(("forward", step + 1)) < at(("read", step))
    for step in (4, 5, 8, 10):
        assert at(("read", step)) < at(("forward", step + 1))


def test_callbacks_see_the_state_after_their_step(corpus, tmp_path):
    session, lock = start(small_config(corpus, run__max_steps=3, run__eval_every=0), tmp_path / "r")
    Device(session)
    session.followed = True
    with lock:
        for tick in train(session, tmp_path / "r"):
            assert session.step == tick.record.step


@pytest.mark.parametrize("step", [1, 3, 4, 12])
def test_an_error_names_its_own_step(corpus, tmp_path, step):
    """Step 3 is read late, step 4 ends with a checkpoint, and step 12 is the last."""
    said = []
    for name in ("at-once", "late"):
        often = {"run__max_steps": 12, "run__eval_every": 0, "run__health_every": 0}
        session, lock = start(small_config(corpus, **often), tmp_path / name)
        if name == "late":
            Device(session)
        loss_sum = session.loss_sum

        def wrapped(batch, session=session, loss_sum=loss_sum):
            total, count = loss_sum(batch)
            return (total * float("nan") if broken(batch) else total), count

        bad = session.micro_batches(step - 1).batches[0][0]

        def broken(batch, bad=bad):
            return torch.equal(batch[0], bad)

        session.loss_sum = wrapped
        with lock, pytest.raises(NonFiniteError) as raised:
            [*train(session, tmp_path / name)]
        said.append(str(raised.value).replace(f"/{name}", ""))
        assert raised.value.first_cause is not None  # found with the batch of its own step
        assert [line["step"] for line in metrics(tmp_path / name)] == [*range(1, step + 1)]
    assert said[0] == said[1]
    assert said[0].startswith(f"step {step}: ")
    assert metrics(tmp_path / "late") == metrics(tmp_path / "at-once")


# Batches


class Stream:
    """A stream of copies, which says what waits for it."""

    def __init__(self, *_: object) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> None:
        self.seen.append("copying")

    def __exit__(self, *_: object) -> None:
        self.seen.append("copied")

    def wait_stream(self, other) -> None:
        self.seen.append("waits")
        other.seen.append("awaited")


def test_batches_are_copied_a_step_ahead_and_owned_by_both_streams(monkeypatch):
    main, made, recorded = Stream(), [], []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: recorded.append((t, s)))
    monkeypatch.setattr("halfstep.trainer.step.to_device", lambda batch, device: batch)

    def make(step):
        made.append((step, threading.get_ident()))
        return MicroBatches([(torch.full((2,), step),)], [7], 2.0)

    ahead = Ahead(make, torch.device("cuda"))
    first = ahead.take(0)  # nothing was made ahead, as after a resume
    ahead.prepare(1)
    assert [step for step, _ in made] == [0, 1]
    assert ahead._copies.seen == ["copying", "copied", "awaited", "copying", "copied"]
    second = ahead.take(1)
    assert [step for step, _ in made] == [0, 1]
    assert (first.batches[0][0].tolist(), second.batches[0][0].tolist()) == ([0, 0], [1, 1])
    assert [(t.tolist(), s is main) for t, s in recorded] == [([0, 0], True), ([1, 1], True)]
    ahead.prepare(2)
    assert ahead.take(5).batches[0][0].tolist() == [5, 5]  # another step than the one foreseen
    # by the thread that trains, whose random numbers a user's dataset draws in order
    assert {thread for _, thread in made} == {threading.get_ident()}

    here = Ahead(make, torch.device("cpu"))  # where nothing is made ahead
    here.prepare(8)
    assert made[-1][0] == 5
    assert here.take(8).batches[0][0].tolist() == [8, 8]


# Evaluations


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU: reading a number, or a size that depends."""

    WAIT = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "equal", "index.Tensor")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        self.count += name.startswith(self.WAIT)
        return func(*args, **(kwargs or {}))


def text_batches(count):
    tokens = torch.randint(9, (count, 2, 4), generator=torch.Generator().manual_seed(0))
    return [(row, row.roll(1)) for row in tokens]


def evaluations(count):
    """Each kind of evaluation, of ``count`` batches: a function without arguments."""
    model = nn.Linear(4, 3)
    cpu = torch.device("cpu")
    judge = Judge(lambda b: (b[0].sum().float(), (b[1] >= 0).sum()), nullcontext, cpu)
    rows = [(torch.randn(5, 4), None, torch.randint(3, (5,))) for _ in range(count)]
    rows[-1][2][2:] = -100
    scores = SimpleNamespace(logits=lambda batch: model(batch[0]))
    given = Trainer(
        model,
        [1],
        lambda m, b: m(b).mean(),
        val_data=[torch.ones(4)] * count,
        evaluate=lambda m, b: {"loss": m(b).square().mean(), "share": 0.25},
    )
    config = config_from_table({"task": "module", "run": {"batch_size": 1, "max_steps": 1}})
    task = ModuleTask(given, config, World(), Layout())
    return {
        "text": lambda: mean_loss(text_batches(count), judge),
        "classifier": lambda: classifier_scores(scores, rows, ["a", "b", "c"], judge),
        "module": lambda: task.evaluate(judge),
    }


@pytest.mark.parametrize("kind", ["text", "classifier", "module"])
def test_an_evaluation_waits_for_the_device_as_often_for_many_batches_as_for_few(kind):
    found = []
    for count in (2, 9):
        evaluate = evaluations(count)[kind]
        with Reads() as reads:
            evaluate()
        found.append(reads.count)
    assert found[0] == found[1] <= 4  # at the end: the first of them waits
