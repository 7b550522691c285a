"""Ranks begin alike or not at all, and one that cannot step takes the others along."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep.distributed.world import World
from halfstep.errors import ConfigError, PrecisionError
from halfstep.precision.step import Precision

pytestmark = pytest.mark.distributed


def compare(rank, values):
    world = World.around_group()
    try:
        world.require_same(dict(values[rank]))
    except ConfigError as error:
        return str(error)
    return ""


def test_the_first_difference_is_named_on_every_rank(pool4):
    same = {"version": "1", "data": "abc", "seed": "7"}
    assert pool4.run(compare, values=[same] * 4) == [""] * 4
    values = [same, same, {**same, "data": "abd", "seed": "8"}, same]
    found = pool4.run(compare, values=values)
    assert all("rank 2 has another data than rank 0" in text for text in found)
    assert all("'abd' and 'abc'" in text for text in found)


def step_on_some(rank, able):
    model = nn.Linear(3, 1)
    precision = Precision("fp32", model, torch.optim.SGD(model.parameters(), lr=0.1))
    if rank in able:
        precision.backward(model(torch.ones(2, 3)).sum())
    try:
        precision.step()
    except PrecisionError as error:
        return str(error)
    return "stepped"


def test_a_rank_that_cannot_step_takes_the_others_along(pool2):
    one, other = pool2.run(step_on_some, able=[0])
    assert "1 of 2 ranks could not take this step" in one
    assert "step() without backward()" in other
    assert pool2.run(step_on_some, able=[0, 1]) == ["stepped"] * 2  # and the group is as before
