"""A run over several ranks against one device that takes the same micro-batches one by one.

What may differ, and by how much, follows from arithmetic alone: two numbers have one sum, whoever
adds them, so two ranks with different data give the bits of one device; everything else is a
rounding that can be named.
"""

from __future__ import annotations

import functools

import pytest
import torch
from tests.reference.adam import U32, assert_near
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed import parity
from distributed.parity import same_bits
from halfstep.distributed.layout import Layout
from halfstep.precision.policy.devices import cpu_has_bf16
from halfstep.precision.policy.spelling import parse_policy

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-split",
            "bf16-split24", "bf16-kahan", "bf16-sr", "bf16-pure", "fp16-pure",
            "mxfp8,simulate=yes")  # fmt: skip
# fp16-pure unscales each backward's gradients in fp16: on one device before they are added up, over
# shards after FSDP2 has added them.
EXACT_SHARDED = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-pure", "mxfp8,simulate=yes")  # fmt: skip
# Unit roundoffs of bf16 and fp16: half the gap between 1 and the next number.
UBF16, U16 = 2.0**-8, 2.0**-11
STEPS, RATE = 3, 1e-2  # those of parity.run
# An Adam update is at most the learning rate where (1 - beta1) <= sqrt(1 - beta2), as here
# (0.1 < 0.22): Kingma and Ba 2015, section 2.1. Two runs whose smallest gradients have opposite
# signs part by twice that a step; weight decay of 0.1 takes 1e-3 of a weight (below 1.1) a step.
ADAM_APART = 2 * STEPS * RATE * 1.01


def cases(every, short):
    """All of them, and those outside of the short set of tests marked slow."""
    return [pytest.param(*c, marks=() if short(*c) else pytest.mark.slow) for c in every]


# One policy a mechanism: casts with and without a scale, masters, remainders, none of them.
SHORT = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split", "bf16-pure",
         "mxfp8,simulate=yes")  # fmt: skip


def policies(names):
    return cases([(name,) for name in names], lambda name: name in SHORT)


def pool_of(request, size):
    return request.getfixturevalue(f"pool{size}")


@functools.cache
def one_device(policy, micro=1, **options):
    return parity.run(0, "data=1", policy, micro=micro, **options)


def same_run(many, one, *, norms=True):
    """Losses, scales and every bit of what is trained, on all ranks."""
    assert all(one["applied"])
    for rank in many:
        assert rank["losses"] == one["losses"]
        assert rank["scales"] == one["scales"]
        assert rank["applied"] == one["applied"]
        same_bits(one["weights"], rank["weights"])
        if norms:
            assert rank["norms"] == one["norms"]
        else:
            # a rank's norm is summed in fp32 over its own part: 2 to 3 roundings of sums of squares
            assert rank["norms"] == pytest.approx(one["norms"], rel=4 * U32)


def ranks_agree(many):
    """All ranks tell the same story, and have the same whole weights."""
    for rank in many[1:]:
        for key in ("losses", "norms", "applied", "scales", "names", "reasons"):
            assert str(rank[key]) == str(many[0][key]), key  # NaN too; str gives a float's bits
        same_bits(many[0]["weights"], rank["weights"])


def near(many, one):
    """The weights of fp32 runs that took their sums in another order."""
    longest = max(one["norms"])
    assert_near(many[0]["weights"], one["weights"], [RATE] * STEPS, max_norm=longest)


def apart(many, one):
    """The largest distances of losses and of weights."""
    loss = max(abs(a - b) for a, b in zip(many[0]["losses"], one["losses"], strict=True))
    weights = many[0]["weights"]
    return loss, max(float((weights[n] - w).abs().max()) for n, w in one["weights"].items())


@pytest.mark.parametrize("policy", policies(POLICIES))
def test_two_data_ranks_are_one_device_bit_for_bit(pool2, policy):
    many = pool2.run(parity.run, layout="data=2", policy=policy)
    ranks_agree(many)
    same_run(many, one_device(policy, 2))


@pytest.mark.parametrize("policy", EXACT_SHARDED)
def test_two_shards_are_one_device_bit_for_bit(pool2, policy):
    many = pool2.run(parity.run, layout="shard=2", policy=policy)
    ranks_agree(many)
    same_run(many, one_device(policy, 2), norms=False)


@pytest.mark.parametrize(
    "policy", policies(["bf16-master", "fp16-master", "bf16-split", "bf16-kahan", "bf16-sr"])
)
def test_sharded_sums_are_those_of_one_device_rounded_once_more(pool2, policy):
    """FSDP2 adds in fp32 and rounds to the weights' format: that bit for bit, and no more."""
    low = torch.float16 if policy.startswith("fp16") else torch.bfloat16
    scale = parse_policy(policy).loss_scale.init_scale if low == torch.float16 else 1.0
    one = parity.first_gradients(0, "data=1", policy, micro=2)
    for found in pool2.run(parity.first_gradients, layout="shard=2", policy=policy):
        # they are rounded with the scale, and unscaled when the backward has ended
        rounded = {name: (g * scale).to(low).float() / scale for name, g in one.items()}
        wide = {name: gradient.float() for name, gradient in found.items()}
        if low == torch.float16:
            # one device adds the two uses of the tied embedding in fp32, FSDP2 in fp16: half a gap
            # of the larger one on each rank, and of their sum
            ours, theirs = rounded.pop("wte.weight"), wide.pop("wte.weight")
            assert (ours - theirs).abs().max() <= 4 * U16 * ours.abs().max()
        same_bits(rounded, wide)


TWO_D = ("data=2,tensor=2", "shard=2,tensor=2")
LOW = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-split", "bf16-master", "bf16-sr")


@pytest.mark.parametrize(
    ("layout", "size", "policy"),
    [*cases([("tensor=2", 2, p) for p in LOW], lambda *c: c[2] in LOW[:3]),
     *((t, 4, p) for t in (*TWO_D, "data=2,shard=2", "data=4", "shard=4")
       for p in LOW if t in TWO_D or p in LOW[:2])],
)  # fmt: skip
def test_ranks_train_as_one_device(request, layout, size, policy):
    """More than two numbers are added in another order than one after the other: last bits differ.

    Of weights too, after a step; in 16 bits some of these are then rounded to the other side.
    """
    many = pool_of(request, size).run(parity.run, layout=layout, policy=policy)
    ranks_agree(many)
    fp32, split = policy == "fp32", Layout.parse(layout).tensor
    one = one_device(policy, size // split)
    loss, weights = apart(many, one)
    u = {"fp32": U32, "fp16-mixed": U16}.get(policy, UBF16)
    assert loss < (32 * u if fp32 else u)  # 2.4e-7 is one ulp of 3.9; measured up to two
    assert weights < ADAM_APART
    if fp32:
        near(many, one)
    if fp32 or split == 1:  # a tensor rank rounds its part of a sum before any loss
        assert many[0]["losses"][0] == pytest.approx(one["losses"][0], rel=8 * U32)
        assert many[0]["norms"][0] == pytest.approx(one["norms"][0], rel=64 * U32)
    assert many[0]["norms"] == pytest.approx(one["norms"], rel=(64 if fp32 else 4) * u)
    assert many[0]["scales"] == one["scales"]


@pytest.mark.parametrize(
    ("layout", "size", "policy"),
    [("tensor=2", 2, "bf16-mixed"), *((t, 4, p) for t in TWO_D for p in LOW[1::2])],
)
def test_blocks_compile_to_one_graph_once(request, layout, size, policy):
    if not cpu_has_bf16():  # torch compiles nothing around a simulation
        policy = "fp32"
    pool = pool_of(request, size)
    eager = pool.run(parity.run, layout=layout, policy=policy)
    for rank in pool.run(parity.run, layout=layout, policy=policy, compiled=True):
        assert rank["losses"] == eager[0]["losses"]
        assert rank["graphs"] == [1, 1, 1]  # which both blocks run


class Sums(TorchDispatchMode):
    """The dtypes that DDP and FSDP2 add in."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and "reduce" in function.__name__:
            SUMMED.update(x.dtype for x in tree_leaves(args) if torch.is_tensor(x))
        return function(*args, **(kwargs or {}))


SUMMED = set()


def summed_in(rank, layout, policy):
    strategy, model, precision = parity.prepare(layout, policy)
    SUMMED.clear()
    with Sums():
        parity.backward_all(strategy, model, precision, 0)
    return SUMMED - {torch.float64}  # the count of targets


@pytest.mark.parametrize(
    ("layout", "policy"), [(t, p) for t in TWO_D for p in ("bf16-split", "fp16-master")]
)
def test_gradients_of_16_bit_weights_are_added_in_fp32(pool4, layout, policy):
    assert pool4.run(summed_in, layout=layout, policy=policy)[0] - {torch.float64} == {
        torch.float32
    }


# Overflow and NaN on one rank only.

SCALED, UNSCALED = "fp16-mixed,init_scale=256", "bf16-mixed"
LAYOUTS = [("data=2", 2), ("shard=2", 2), ("tensor=2", 2), ("data=2,tensor=2", 4),
           ("data=2,shard=2", 4), ("shard=2,tensor=2", 4)]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "size", "policy"),
    cases(
        [(*where, policy) for where in LAYOUTS for policy in (SCALED, UNSCALED)],
        lambda layout, size, policy: (
            (size, policy) == (2, SCALED) or (layout, policy) == ("data=2,shard=2", UNSCALED)
        ),
    ),
)
def test_a_loss_that_is_nan_on_one_rank_takes_all_the_same_way(request, layout, size, policy):
    many = pool_of(request, size).run(
        parity.run, layout=layout, policy=policy, bad_loss=[(1, size - 1)],
        on_nonfinite="skip:1",
    )  # fmt: skip
    for rank in many:
        assert rank["applied"] == [True, False, True]
        assert rank["reasons"] == [None, "nonfinite_loss", None]
        assert rank["unchanged"] == [False, True, False]
        assert rank["scales"] == ([256] * 3 if policy == SCALED else [1] * 3)
        assert [str(x) for x in rank["losses"]] == [str(x) for x in many[0]["losses"]]
        same_bits(many[0]["weights"], rank["weights"])


def masters_at_the_start(rank, layout, policy):
    """Before any step: what each policy trains, whole."""
    _, model, precision = parity.prepare(layout, policy)
    found = {n: parity.whole(p, m) for n, p, m in parity.masters(model, precision)}
    return found, {str(p.dtype) for p in model.parameters()}


# What weight and remainder hold of an fp32 number, relative to it: all; 24 of its bits, the last
# one rounded either way; two bf16 numbers, each to half a gap; one bf16 number, rounded either way.
KEPT = {"bf16-master": 0.0, "fp16-master": 0.0, "bf16-split": 0.0, "bf16-split24": 2.0**-15,
        "bf16-kahan": 2.0**-16, "bf16-sr": 2.0**-7}  # fmt: skip


@pytest.mark.parametrize("layout", ["data=1", "data=2", "shard=2", "tensor=2"])
@pytest.mark.parametrize("policy", KEPT)
def test_masters_start_from_the_weights_before_they_were_cast(pool2, layout, policy):
    """Not from what 16 bits have left of them, though the cast comes before the sharding."""
    exact = dict(parity.GPT(parity.GPTConfig(**parity.SHAPE), seed=1).named_parameters())
    alone = layout == "data=1"
    ranks = [masters_at_the_start(0, layout, policy)] if alone else pool2.run(
        masters_at_the_start, layout=layout, policy=policy
    )  # fmt: skip
    for found, stored in ranks:
        assert stored == {"torch.float16" if "fp16" in policy else "torch.bfloat16"}
        for name, weight in exact.items():
            off = (found[name] - weight.detach()).abs()
            assert bool((off <= KEPT[policy] * weight.detach().abs()).all()), name
