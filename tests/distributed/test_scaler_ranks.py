"""halfstep.GradScaler over ranks: what is not finite on one of them is skipped by all.

The grid: every layout, every kind of optimizer, inf and NaN, on either rank. The oracle is the same
loop without a scaler in which the broken steps are left out: with powers of two and fp32 the same
bits come out.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from distributed import grid
from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.integrations.grad_scaler import GradScaler
from halfstep.integrations.loop_scaler import FiniteGuard, LoopScaler
from halfstep.precision.masters.local_part import is_sharded

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

LAYOUTS = [
    pytest.param(name, marks=pytest.mark.slow) if name == "ddp tied" else name
    for name in grid.OWN_LOOP
]
BROKEN = {1: "first", 3: "second"}  # by step


def without_scaler(rank, layout, name):
    """Steps 0, 2 and 4 alone."""
    model = grid.build(layout, rank)
    optimizer = grid.optimizer_of(name, model.parameters())
    parts = [p for p in model.parameters() if is_sharded(p)]
    for step in range(5):
        grid.loss_of(layout, model, step, rank).backward()
        if step not in BROKEN:
            every = [(p, p.grad) for p in model.parameters()]
            for kind in (True, False) if parts else (False,):  # torch takes one kind at a time
                for p, gradient in every:
                    p.grad = gradient if is_sharded(p) is kind else None
                optimizer.step()
        optimizer.zero_grad()
    return grid.held(model)


def cell(rank, layout, name, value, where, unscale):
    model = grid.build(layout, rank)
    optimizer = grid.optimizer_of(name, model.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=1, names=model.named_parameters())
    seen = []
    for step in range(5):
        scaler.scale(grid.loss_of(layout, model, step, rank)).backward()
        here = rank == (where if BROKEN.get(step) == "first" else 1 - where)
        if step in BROKEN and here:
            grid.break_gradient(model, value)
        before = grid.held(model)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        result = scaler.last_step
        assert grid.same(before, grid.held(model)) is not result.applied
        if step in BROKEN and here:  # names are those that this rank found
            (found,) = result.nonfinite_parameters
            assert found.removeprefix("module.") == grid.last_matrix(model)[0]
            assert result.reason == ("overflow" if value == math.inf else "nan_gradients")
        seen.append((result.applied, result.next_loss_scale, result.skipped_total))
    return seen, grid.held(model)


def cells(rank, layout, name):
    oracle = without_scaler(rank, layout, name)
    found = []
    for value, where, unscale in itertools.product((math.inf, math.nan), (0, 1), (False, True)):
        seen, weights = cell(rank, layout, name, value, where, unscale)
        assert grid.same(weights, oracle), (value, where, unscale)
        found.append(seen)
    return found


@pytest.mark.parametrize("name", ["single", "foreach", "fused"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everyone_steps_or_nobody_does(pool2, layout, name):
    if layout == "tp" and name in ("foreach", "fused"):  # torch's own refusal, as without a scaler
        with pytest.raises(AssertionError, match=r"got mixed torch\.Tensor and DTensor"):
            pool2.run(cells, layout=layout, name=name)
        return
    first, second = pool2.run(cells, layout=layout, name=name)
    assert first == second
    scales = [2.0**9, 2.0**8, 2.0**9, 2.0**8, 2.0**9]
    told = [(s not in BROKEN, scales[s], sum(b <= s for b in BROKEN)) for s in range(5)]
    assert first == [told] * 8


def losses_and_floor(rank):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0, strict=True)
    told = []
    for _ in range(2):
        scaler.scale((weight * (math.inf if rank else 1.0)).sum()).backward()
        scaler.step(optimizer)
        try:
            scaler.update()
        except NonFiniteError as error:
            told.append((error.cause, "another rank's" in str(error)))
        optimizer.zero_grad()
    return told, scaler.get_scale(), weight.tolist()


def test_the_floor_stops_every_rank(pool2):
    first, second = pool2.run(losses_and_floor)
    assert first == ([("loss_scale_floor", True)], 1.0, [1.0, 1.0])
    assert second == ([("loss_scale_floor", False)], 1.0, [1.0, 1.0])


def guarded(rank, value):
    """In step 1 the loss of rank 0 is broken."""
    weight = nn.Parameter(torch.ones(2))
    optimizer, told = torch.optim.SGD([weight], lr=1.0), []
    guard = FiniteGuard("cpu")
    guard.bind(lambda: [optimizer], lambda: [("weight", weight)])
    for step in range(3):
        guard.scale(weight.sum() * (value if (step, rank) == (1, 0) else 1.0)).backward()
        try:
            guard.step(optimizer)
            guard.update()
        except NonFiniteError as error:
            return told, error.cause, str(error).startswith("rank 0's loss is"), weight.tolist()
        optimizer.zero_grad()
        told.append(guard.last_step.applied)
    return told


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_broken_loss_of_one_rank_stops_all_without_a_scale(pool2, value):
    assert pool2.run(guarded, value=value) == [([True], "forward", True, [0.0, 0.0])] * 2


BOTH = pytest.mark.parametrize("scaler_class", [GradScaler, LoopScaler])


def without_gradient(rank, scaler_class, unscale):
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight])
    scaler = scaler_class("cpu")
    loss = scaler.scale(weight * 2)
    if rank == 0:
        loss.backward()
    try:
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    except (PrecisionError, AssertionError) as error:
        return type(error).__name__, float(weight)
    return "stepped"


@BOTH
@pytest.mark.parametrize("unscale", [False, True])
def test_a_rank_without_gradients_keeps_nobody_waiting(pool2, scaler_class, unscale):
    found = pool2.run(without_gradient, scaler_class=scaler_class, unscale=unscale)
    assert found == [("PrecisionError", 1.0), ("AssertionError", 1.0)]


def partial_sum(rank):
    """A gradient that is a sum over ranks still, finite in each part and not in all."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([weight], lr=1.0, foreach=False)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    largest = torch.finfo(torch.float32).max
    weight.grad = DTensor.from_local(torch.tensor([1.0, 2.0, largest]), mesh, [Partial()])
    scaler.step(optimizer)
    first = scaler.last_step.applied
    scaler.update()
    weight.grad = DTensor.from_local(torch.tensor([1.0, 2.0, 3.0]), mesh, [Partial()])
    scaler.step(optimizer)
    return first, scaler.last_step.applied, weight.to_local().tolist()


def test_partial_sums_are_added_up_before_they_are_judged(pool2):
    # scale 1, then 0.5: (2, 4, 6) / 0.5 are subtracted from 1
    assert pool2.run(partial_sum) == [(False, True, [-3.0, -7.0, -11.0])] * 2
