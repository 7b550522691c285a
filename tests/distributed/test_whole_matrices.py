"""Optimizers that need whole tensors, over ranks: gathered, the same on all, or refused by name."""

from __future__ import annotations

import contextlib
import functools
import sys

import pytest
import torch

import halfstep
from distributed import parity
from distributed.parity import same_bits
from halfstep.errors import PrecisionError
from halfstep.precision.agreement import MARK

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


@functools.cache
def one_device(policy, micro=1):
    return parity.run(0, "data=1", policy, micro=micro, kind="muon")


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-split,moments=8bit"])
@pytest.mark.parametrize("layout", ["data=2", "shard=2"])
@pytest.mark.parametrize("divided", [False, True])
def test_ranks_that_share_a_batch_orthogonalize_as_one_device(pool2, layout, policy, divided):
    """Gathered momentum is the same matrix, and so is its direction, whichever rank computes it."""
    if layout == "shard=2" and policy.startswith("bf16-split"):
        pytest.skip("a rank's 8-bit blocks and random bits are those of its part")
    one = one_device(policy, micro=2)
    first, second = pool2.run(
        parity.run, layout=layout, policy=policy, kind="muon", divided=divided
    )
    assert first["losses"] == second["losses"] == one["losses"]
    for many in (first, second):
        same_bits(many["weights"], one["weights"])


# The distance of two runs, relative to how far one has come. Measured: 2 % over tensor ranks, whose
# sums of gradients are in another order and tip roundings to bf16, which the iteration enlarges;
# 36 % with other random bits in 8-bit momentum; 66 % where each part is orthogonalized by itself.
@pytest.mark.parametrize(("policy", "most"), [("fp32", 0.05), ("bf16-split,moments=8bit", 0.5)])
@pytest.mark.parametrize("layout", ["tensor=2", "shard=2"])
def test_parts_of_a_matrix_move_with_the_whole(pool2, layout, policy, most):
    one = one_device(policy, micro=2 if layout == "shard=2" else 1)
    first, second = pool2.run(parity.run, layout=layout, policy=policy, kind="muon")
    same_bits(first["weights"], second["weights"])
    start = {n: p.detach() for n, p in parity.prepare("data=1", "fp32")[1].named_parameters()}
    for name, weight in one["weights"].items():
        if weight.dim() != 2 or "embedding" in name:
            continue
        ours, wanted = first["weights"][name] - start[name], weight - start[name]
        apart = (ours - wanted).norm() / wanted.norm()
        assert apart < most, (name, float(apart))


@contextlib.contextmanager
def counted():
    """The shapes of the matrices that this rank orthogonalizes."""
    seen, muon = [], sys.modules["halfstep.optim.muon"]
    whole, muon.newton_schulz = muon.newton_schulz, lambda x, *_: seen.append(x.shape) or whole(x)
    try:
        yield seen
    finally:
        muon.newton_schulz = whole


def iterated(rank, layout, shapes):
    """Which of these matrices a rank orthogonalizes in a step, and what it makes of all of them."""
    weights = [torch.nn.Parameter(torch.ones(*shape)) for shape in shapes]
    optimizer = halfstep.optim.Muon(weights, lr=0.1)
    if layout == "divided":
        optimizer.ranks = torch.distributed.group.WORLD
    for number, weight in enumerate(weights):
        generator = torch.Generator().manual_seed(number)
        weight.grad = torch.randn(weight.shape, generator=generator)
    weights[-1].grad = weights[-1].grad.t().contiguous().t()  # another memory order
    with counted() as seen:
        optimizer.step()
    return [tuple(shape) for shape in seen], {str(i): w.detach() for i, w in enumerate(weights)}


def test_each_rank_computes_its_share(pool2):
    """Matrices of like cost in one turn; the odd one is the first rank's."""
    shapes = [(4, 6), (12, 5), (8, 8), (5, 12), (30, 20)]
    every, one = pool2.run(iterated, layout="alone", shapes=shapes)[0]
    assert sorted(every) == sorted(shapes)
    (first, mine), (second, theirs) = pool2.run(iterated, layout="divided", shapes=shapes)
    assert (first, second) == ([(30, 20), (12, 5), (4, 6)], [(8, 8), (5, 12)])
    same_bits(mine, one)
    same_bits(theirs, one)


def lopsided(rank):
    """A step in which each rank has the gradient of another matrix."""
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = halfstep.optim.Muon(weights, lr=0.1)
    optimizer.ranks = torch.distributed.group.WORLD
    weights[rank].grad = torch.eye(4)
    try:
        optimizer.step()
    except PrecisionError as error:
        return str(error), all(bool((w == 1).all()) for w in weights), len(optimizer.state)
    return None


def test_ranks_with_gradients_of_different_matrices_are_refused(pool2):
    """They have like shapes, so that one's direction would move the other, unseen."""
    for words, unchanged, states in pool2.run(lopsided):
        assert "gradients of 1 of 2 parameters, and another rank of others" in words
        assert unchanged
        assert not states


@pytest.mark.parametrize("layout", ["data=2", "shard=2", "tensor=2"])
def test_a_step_that_one_rank_cannot_take_changes_nothing_on_any(pool2, layout):
    policy = "fp16-mixed,init_scale=256"
    first, second = pool2.run(
        parity.run, layout=layout, policy=policy, kind="muon", divided=True, poison=((1, 0),)
    )
    assert first["applied"] == second["applied"] == [True, False, True]
    assert first["unchanged"] == second["unchanged"] == [False, True, False]
    same_bits(first["weights"], second["weights"])


def test_parts_by_hand_are_refused():
    p = torch.nn.Parameter(torch.ones(4, 4))
    setattr(p, MARK, True)
    with pytest.raises(PrecisionError, match=r"\(4, 4\) is marked tensor_model.*AdamW or Li"):
        halfstep.optim.Muon([p])
    halfstep.optim.Muon([{"params": [p], "use_muon": False}])
