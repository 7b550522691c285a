"""Sharded tensors as optimizers see them, and Precision in loops that know no strategy of ours."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.reference.adam import U32, assert_near
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from distributed import loops
from distributed.parity import same_bits
from halfstep.precision.masters.local_part import (
    local_gradient,
)

pytestmark = pytest.mark.covering(ends=True)
distributed = pytest.mark.distributed


def gradients_as_their_weights(rank):
    """A gradient that lies otherwise than its weight: unsummed, or whole."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]))
    mine = torch.arange(24.0).reshape(4, 6) + 100 * rank
    found = []
    for how in (Partial(), Replicate(), Shard(1), Shard(0)):
        local = mine if how.is_partial() else torch.arange(24.0).reshape(4, 6)
        if how.is_shard():
            local = local.chunk(2, how.dim)[rank]
        weight.grad = DTensor.from_local(local, mesh, [how], run_check=False)
        found.append(local_gradient(weight))
    return found


@distributed
def test_gradients_are_summed_and_placed_as_their_weights(pool2):
    whole = torch.arange(24.0).reshape(4, 6)
    for rank, (summed, *others) in enumerate(pool2.run(gradients_as_their_weights)):
        assert torch.equal(summed, (2 * whole + 100).chunk(2)[rank])
        for other in others:
            assert torch.equal(other, whole.chunk(2)[rank])


# Loops of somebody's own.


def near(many, one, policy="fp32"):
    """Where parts are updated by torch's fused kernel.

    It takes whole vectors of 8 or 16 numbers with fused multiply-adds and the rest of a tensor
    without, so that the last bit of an update depends on where a tensor was cut, and on the CPU.
    """
    if policy == "fp32":
        assert many[0]["losses"] == pytest.approx(one["losses"], rel=32 * U32)
        rates = [loops.RATE] * 4
        longest = max(one["norms"])
        assert_near(many[0]["weights"], one["weights"], rates, max_norm=longest, betas=(0.9, 0.999))
    else:  # a weight that is another in its last bit may be rounded to the other bf16 number
        assert many[0]["losses"] == pytest.approx(one["losses"], rel=2.0**-8)


def agree(many):
    for key in ("losses", "norms", "applied", "scales", "names", "looks"):
        assert str(many[0][key]) == str(many[1][key]), key
    same_bits(many[0]["weights"], many[1]["weights"])
    same_bits(many[0]["averages"], many[1]["averages"])


@distributed
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        *itertools.product(("fp32", "bf16-mixed"), ("foreach", "fused", "loop", "sgd")),
        ("fp8,simulate=yes", "foreach"),
        ("bf16-mixed,recipe=bf16/bf16/mxfp8,simulate=yes", "sgd"),
    ],
)
def test_torchs_own_wrappers_train_as_one_device(pool2, kind, optimizer, policy):
    """They average where one device adds halves: powers of two, so bit for bit."""
    one = loops.train(0, "one", policy, optimizer=optimizer)
    many = pool2.run(loops.train, kind=kind, policy=policy, optimizer=optimizer)
    agree(many)
    # without ranks= the default group is asked
    assert many[0]["losses"][0] == one["losses"][0]
    if (kind, optimizer) == ("fsdp", "fused"):
        near(many, one, policy)
        return
    assert many[0]["losses"] == one["losses"]
    same_bits(many[0]["weights"], one["weights"])
    # norms of parts are added in another order: some units of 2^-24
    assert many[0]["norms"] == pytest.approx(one["norms"], rel=8 * 2.0**-24)


@distributed
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_averages_follow_parts_and_are_put_in_and_taken_out(pool2, kind):
    """A forward inside leaves gathered averages in FSDP2's root, where training would go on."""
    one = loops.train(0, "one", ema=True)
    many = pool2.run(loops.train, kind=kind, ema=True)
    agree(many)
    assert many[0]["looks"] == one["looks"]
    assert many[0]["losses"] == one["losses"]
    same_bits(many[0]["averages"], one["averages"])
    same_bits(many[0]["weights"], one["weights"])
    apart = [n for n, w in one["weights"].items() if not torch.equal(w, one["averages"][n])]
    assert len(apart) == len(one["weights"])
