"""What counts as trained, refused, silent or raw; each by a program in which that is planted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import PrecisionError
from strangers.loops import POLICIES
from strangers.packages.cells import beside, cell, check
from strangers.packages.hand_loop import by_hand
from strangers.packages.runs import Run

pytestmark = pytest.mark.strangers


def batch(draw):
    x = torch.randn(16, 8, generator=draw)
    return x, x[:, :1] - x[:, 1:2]


CALM = by_hand(
    "calm", "nobody", lr=1e-2, batch=batch,
    model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
)  # fmt: skip
RECORDED: dict[str, object] = {}


def spoilt(run: Run, under_policy) -> list[float]:
    return CALM.train(run) if run.policy is None else under_policy(run)


def refuse(run: Run) -> list[float]:
    raise PrecisionError("not this model")


def planted(under_policy, **changes):
    train = {"train": lambda run: spoilt(run, under_policy)}
    return dataclasses.replace(CALM, **train, **changes)


def kind_of(program, policy: str = "bf16-mixed") -> str:
    return cell(program, policy, beside(program)).kind


def test_what_is_planted_is_seen():
    assert kind_of(CALM) == "trained"
    assert kind_of(planted(lambda run: CALM.train(Run(rate=0.5)))) == "silent"
    assert kind_of(planted(lambda run: CALM.train(Run()))) == "silent"  # nothing was rounded
    assert kind_of(planted(lambda run: CALM.train(run)[:-1])) == "silent"
    assert kind_of(planted(lambda run: [1 / 0])) == "raw"
    assert kind_of(planted(refuse)) == "refused"


def test_a_program_that_hides_half_its_rate_is_no_program():
    blunt = dataclasses.replace(CALM, amplifies=1e6)
    with pytest.raises(AssertionError, match="half the learning rate"):
        check(blunt, RECORDED.__setitem__)


def test_every_policy_of_a_cpu_is_run():
    honoured = {
        name for name in halfstep.POLICIES if halfstep.support(name, "cpu").status != "refused"
    }
    assert honoured - {"bf16-module"} == {p.split(",")[0] for p in POLICIES}  # that is for FSDP2
