"""halfstep.Precision over ranks: what is not finite on one of them is skipped, or refused, by all.

The grid: every layout, every kind of optimizer, inf and NaN, on either rank; from within the
backward of that rank, before any sum over ranks, and in its finished gradient, after all of them.
The oracle is the same loop without the broken steps, under a scale that stands still where the
loop's comes back to: the same bits come out.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from distributed import grid
from distributed.parity import fingerprint, whole
from halfstep.errors import HalfstepError
from halfstep.precision.agreement import MARK
from halfstep.precision.masters.local_part import is_sharded, local_part
from halfstep.precision.step import Precision

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

SCALE = 256.0
GROWS = f"init_scale={SCALE:g},growth_interval=1"
STANDS = f"scale=static,init_scale={SCALE:g}"
LAYOUTS = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("ddp tied", "data=2 tied") else name
    for name in (*grid.OWN_LOOP, *grid.STRATEGIES)
]
VALUES = list(itertools.product((math.inf, math.nan), (0, 1)))


class Loop:
    """One rank of a training under Precision, in any layout."""

    def __init__(self, rank, layout, policy, name):
        self.rank, self.layout = rank, layout
        ours = layout in grid.STRATEGIES
        self.model, self.strategy = (
            grid.place(layout, policy) if ours else (grid.build(layout, rank), None)
        )
        optimizer = grid.optimizer_of(name, self.model.parameters())
        ranks = self.strategy.ranks if ours else None
        self.precision = Precision(policy, self.model, optimizer, ranks=ranks)
        if ours:
            self.strategy.attach_(self.precision)

    def backward(self, step, broken=None):
        """``broken``: the value that this rank's backward is to meet, or None."""
        forward = self.model if broken is None else grid.breaking(self.model, broken)
        ours = self.strategy is not None
        with self.strategy.micro_batch(last=True) if ours else nullcontext():
            with self.precision.autocast():
                loss = grid.loss_of(self.layout, forward, step, self.rank)
            self.precision.backward(loss)
        if ours:
            self.strategy.finish()

    def whole(self):
        """Name to the whole weight, from all ranks' parts."""
        found = {}
        for name, p in self.model.named_parameters():
            part = local_part(p).detach()
            if getattr(p, MARK, False):
                parts = [torch.empty_like(part) for _ in range(2)]
                dist.all_gather(parts, part.contiguous())
                found[name] = torch.cat(parts, dim=int(name == "down"))
            else:
                found[name] = whole(p, part) if is_sharded(p) else part.clone()
        return found


def outcome(loop):
    """What a step says, or how it is refused: numbers and words that every rank must have alike."""
    try:
        result = loop.precision.step()
    except HalfstepError as error:
        parameters, cause = getattr(error, "parameters", ()), getattr(error, "cause", None)
        return {
            "error": type(error).__name__,
            "cause": cause,
            "names": parameters,
            "all": repr(error),
        }
    return {
        "error": None,
        "applied": result.applied,
        "reason": result.reason,
        "scales": (result.loss_scale, result.next_loss_scale),
        "names": result.nonfinite_parameters,
        "all": repr(result),
    }


def cells(rank, layout, policy, still, name, when):
    """A good step, and for each cell a broken one and a good one; the same without the broken.

    Returns what the good and the broken steps tell, and the whole weights in the end.
    """
    loop, oracle = Loop(rank, layout, policy, name), Loop(rank, layout, still, name)
    broken_name, parameter = grid.last_matrix(loop.model)
    bad, good, cell = [], [], [(0.0, None), *VALUES]
    for number, (value, where) in enumerate(cell):
        here = rank == where
        if where is not None:
            loop.backward(90 + number, value if here and when == "backward" else None)
            if here and when == "gradient":
                grid.break_gradient(loop.model, value)
            before = fingerprint(loop.model, loop.precision)
            found = outcome(loop)
            found["unchanged"] = fingerprint(loop.model, loop.precision) == before
            found["cleared"] = all(p.grad is None for p in loop.model.parameters())
            found["names"] = [n.removeprefix("module.") for n in found["names"]]
            found["named"] = found["names"] == [broken_name]
            bad.append(found)
        known = local_part(parameter).detach().clone()
        for each in (loop, oracle):
            each.backward(number)
        found, wanted = outcome(loop), outcome(oracle)
        assert wanted["error"] is None
        assert wanted["applied"]
        assert not torch.equal(local_part(parameter), known)
        found["as if it had not been"] = grid.same(grid.held(loop.model), grid.held(oracle.model))
        good.append(found)
    return bad, good, loop.whole()


def broken_steps(pool, layout, policy, still, name, when):
    """The grid of one layout and optimizer: what holds in every cell is checked, the rest told."""
    (bad, good, weights), others = pool.run(
        cells, layout=layout, policy=policy, still=still, name=name, when=when
    )
    assert (bad, good) == others[:2]
    assert all(step["applied"] and step["as if it had not been"] for step in good)
    assert all(step["unchanged"] and step["cleared"] and step["names"] for step in bad)
    assert when == "backward" or all(step["named"] for step in bad)
    assert weights.keys() == others[2].keys()
    for key, weight in weights.items():
        assert torch.equal(weight, others[2][key]), key
        assert weight.isfinite().all(), key
    assert len(bad) == len(VALUES)
    return zip((value for value, _ in VALUES), bad, strict=True)


def all_skip(steps, reasons):
    for value, step in steps:
        assert (step["error"], step["applied"]) == (None, False)
        assert step["scales"] == (2 * SCALE, SCALE)
        assert step["reason"] in reasons[value == math.inf]


# by whether the value is inf: of inf within a backward, inf - inf and 0 * inf may make NaN
FINISHED = {True: ("overflow",), False: ("nan_gradients",)}
ARISING = {True: ("overflow", "nan_gradients"), False: ("nan_gradients",)}


@pytest.mark.parametrize("name", grid.OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everyone_steps_or_nobody_does(pool2, layout, name):
    policies = f"fp16-mixed,{GROWS}", f"fp16-mixed,{STANDS}"
    all_skip(broken_steps(pool2, layout, *policies, name, "gradient"), FINISHED)


FEW = [n if n == "fused" else pytest.param(n, marks=pytest.mark.slow) for n in grid.OPTIMIZERS]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_it_is_where_a_value_arises_within_a_backward(pool2, layout, name):
    policies = f"fp16-mixed,{GROWS}", f"fp16-mixed,{STANDS}"
    all_skip(broken_steps(pool2, layout, *policies, name, "backward"), ARISING)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_scale_everyone_stops_with_the_same_error(pool2, layout, name):
    steps = broken_steps(pool2, layout, "bf16-mixed", "bf16-mixed", name, "gradient")
    for _, step in steps:
        assert (step["error"], step["cause"]) == ("NonFiniteError", "gradients")


@pytest.mark.parametrize(("policy", "name"), [("fp16-master", "fused"), ("bf16-split", "halfstep")])
@pytest.mark.parametrize("layout", ["plain", "data=2", "shard=2", "tensor=2", "hand"])
def test_so_it_is_with_weights_of_16_bits(pool2, layout, policy, name):
    if policy == "fp16-master":
        policies = f"{policy},{GROWS}", f"{policy},{STANDS}"
        all_skip(broken_steps(pool2, layout, *policies, name, "gradient"), FINISHED)
        return
    for _, step in broken_steps(pool2, layout, policy, policy, name, "gradient"):
        assert (step["error"], step["cause"]) == ("NonFiniteError", "gradients")


def losses_that_break(rank, values):
    """The message of a step whose loss is multiplied by each rank's value."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    precision = Precision("fp32", model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        precision.step(model(torch.ones(2, 4)).square().mean() * values[rank])
    except HalfstepError as error:
        return str(error).partition(" before any gradient")[0]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((1.0, math.inf), "rank 1's loss is inf"),
        ((math.nan, 1.0), "rank 0's loss is nan"),
        ((math.nan, math.nan), "the loss is nan on every rank"),
    ],
)
def test_the_rank_whose_loss_is_not_finite_is_named_by_all(pool2, values, told):
    assert pool2.run(losses_that_break, values=values) == [told, told]


def step_on_some(rank, able):
    model = torch.nn.Linear(3, 1)
    precision = Precision("fp32", model, torch.optim.SGD(model.parameters(), lr=0.1))
    if rank in able:
        precision.backward(model(torch.ones(2, 3)).sum())
    try:
        precision.step()
    except HalfstepError as error:
        return str(error)
    return "stepped"


def test_a_rank_that_cannot_step_takes_the_others_along(pool2):
    one, other = pool2.run(step_on_some, able=[0])
    assert "1 of 2 ranks could not take this step" in one
    assert "step() without backward()" in other
    assert pool2.run(step_on_some, able=[0, 1]) == ["stepped"] * 2  # and the group is as before
