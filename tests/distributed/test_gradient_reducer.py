"""Sums of gradients over ranks against their definition, for every way that gradients are kept."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distributed.reduction import (
    BIG,
    DTYPES,
    Branches,
    gradients,
    make,
    packed,
    reduced,
    share,
    unpacked,
)
from every import every
from halfstep.distributed.reducer import GradientReducer, broadcast_
from halfstep.errors import PrecisionError

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

POLICIES = ("fp32", "bf16-mixed", "bf16-master", "fp16-master", "bf16-split", "bf16-sr",
            "bf16-kahan", "bf16-pure")  # fmt: skip


def kept_as(policy, reduce):
    """The dtype in which a policy keeps finished sums."""
    low = policy in ("bf16-split", "bf16-sr", "bf16-kahan")
    return torch.bfloat16 if policy == "bf16-pure" else DTYPES[reduce if low else "fp32"]


def definition(parts, reduce, kept=torch.float32):
    """fp32: added; 16 bits: each rounded once, added in fp32 by rank, and rounded once."""
    wire = DTYPES[reduce]
    total = parts[0].to(wire).float()
    for part in parts[1:]:
        total = total + part.to(wire).float()
    return total.to(wire).to(kept)


def assert_sums(found, shares, policy, reduce):
    """Bit for bit the definition, on every rank."""
    kept = kept_as(policy, reduce)
    for rank_found in found:
        assert list(rank_found) == list(shares[0])
        for name, (dtype, numbers) in rank_found.items():
            expected = definition([s[name] for s in shares], reduce, kept)
            assert dtype == str(kept), name
            assert torch.equal(torch.from_numpy(numbers), expected.float()), name


def same_on_all(found):
    for other in found[1:]:
        assert list(other) == list(found[0])
        for name, (dtype, numbers) in other.items():
            assert dtype == found[0][name][0]
            assert numbers.tobytes() == found[0][name][1].tobytes(), name


SUMS = [
    (2, "fp32", {"steps": 2, "micro_batches": 3}),
    (2, "fp32", {"micro_batches": 2, "overlap": False, "bucket_bytes": 300}),
    (2, "bf16", {"micro_batches": 2}),
    (4, "bf16", {"steps": 2, "bucket_bytes": 700}),
    (4, "fp16", {"steps": 2, "bucket_bytes": 700}),
    (2, "fp32", {"steps": 2, "spare": (True, False)}),
    (2, "bf16", {"steps": 2, "spare": (False, False), "bucket_bytes": 1}),
]


@pytest.mark.parametrize(
    ("policy", "ranks", "reduce", "options"),
    [
        (policy, *how)
        for policy in POLICIES
        for how in SUMS
        if not (policy.startswith("fp16") and how[1] == "fp16")  # whose wire is scaled
    ],
    ids=str,
)
def test_ranks_get_the_sum_of_their_shares(request, policy, ranks, reduce, options):
    """A parameter that one rank has not used counts as zeros; none of all has no gradient."""
    found = request.getfixturevalue(f"pool{ranks}").run(
        reduced, policy=policy, reduce=reduce, **options
    )
    same_on_all(found)
    used, micro = options.get("spare", (True,) * ranks), options.get("micro_batches", 1)
    shares = [share(policy, r, micro_batches=micro, spare=used[r]) for r in range(ranks)]
    assert all(("spare.weight" in s) == u for s, u in zip(shares, used, strict=True))
    for name, g in shares[0].items():
        shares[-1].setdefault(name, torch.zeros_like(g))
    assert_sums(found, shares, policy, reduce)


def test_only_earlier_micro_batches_reach_a_parameter(pool2):
    """Its bucket is never full in the last one, and its gradient must not be lost."""
    found = pool2.run(early_only)
    for numbers in found:
        assert numbers == [2.0, 3.0]  # of (1, 2) on rank 0, doubled to (1, 1) on rank 1


def early_only(rank):
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))])
    precision = make("fp32", model)
    reducer = GradientReducer(precision, dist.group.WORLD, torch.float32)
    precision.backward((model[0] + model[1] * (2 - rank)).sum())
    with reducer.last():
        precision.backward((model[1] * 0).sum())
    reducer.finish()
    return [float(p.grad) for p in model]


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_ranks_may_finish_gradients_in_any_order(pool4, reduce):
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2], [2, 3, 1, 5, 0, 4]]
    answers = pool4.run(branches, orders=orders, reduce=reduce)
    assert len({tuple(finished) for finished, *_ in answers}) == 4
    assert all(during == len(finished) for finished, during, _ in answers)  # while it runs
    found = [grads for *_, grads in answers]
    same_on_all(found)
    shares = branch_shares(orders)
    for name, got in unpacked(found[0]).items():
        parts = torch.stack([s[name] for s in shares])
        if reduce == "bf16":
            assert torch.equal(got, definition(list(parts), "bf16"))
        else:
            bound = 3 * 2.0**-24 * parts.double().abs().sum(0) * (1 + 1e-6)  # as above
            assert bool(((got.double() - parts.double().sum(0)).abs() <= bound).all())


def branch_input(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def branch_shares(orders):
    """Each rank's own gradients."""
    shares = []
    for rank, order in enumerate(orders):
        model = Branches()
        model(branch_input(rank), order).backward()
        shares.append({name: p.grad for name, p in model.named_parameters()})
    return shares


def branches(rank, orders, reduce):
    """In what order gradients were finished, the sums begun within the backward, and the sums."""
    model = Branches()
    precision = make("fp32", model)
    reducer = GradientReducer(precision, dist.group.WORLD, DTYPES[reduce], bucket_bytes=1)
    finished = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: finished.append(name))
    with reducer.last():
        precision.backward(model(branch_input(rank), orders[rank]))
    during = reducer._next
    reducer.finish()
    return finished, during, packed(gradients(precision))


SPECIAL = [
    [1.0, 70000.0, 40000.0, float("inf"), float("inf"), float("nan"), -float("inf"), 2.0**-30],
    [2.0, 1.0, 40000.0, 1.0, -float("inf"), 1.0, -1.0, 2.0**-30],
]


@pytest.mark.parametrize("reduce", ["fp32", "bf16", "fp16"])
def test_inf_and_nan_stay_what_they_are(pool2, reduce):
    inf, nan = float("inf"), float("nan")
    for numbers in pool2.run(given, values=SPECIAL, reduce=reduce):
        got = torch.tensor(numbers)
        expected = torch.tensor([3.0, 70001.0, 80000.0, inf, nan, nan, -inf, 2.0**-29])
        if reduce == "bf16":
            expected = expected.bfloat16().float()
        if reduce == "fp16":  # largest number 65504; smallest 2^-24
            expected[1], expected[2], expected[7] = inf, inf, 0.0
        assert torch.equal(got.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert torch.equal(got.isnan(), expected.isnan())


def given(rank, values, reduce):
    """The sum of gradients that are ``values``."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(len(values[rank])))])
    precision = make("fp32", model)
    reducer = GradientReducer(precision, dist.group.WORLD, DTYPES[reduce])
    with reducer.last():
        (model[0] * torch.tensor(values[rank])).sum().backward()
        reducer.finish()
    return model[0].grad.tolist()


@pytest.mark.parametrize("reduce", ["bf16", "fp16"])
def test_random_numbers_of_all_sizes_are_added_by_rank(pool4, reduce):
    generator = torch.Generator().manual_seed(3)
    # 1000 numbers: no multiple of ranks or alignment; from below the smallest to the largest
    values = torch.randn(4, 1000, generator=generator)
    values *= 2.0 ** torch.randint(-30, 15, (4, 1000), generator=generator)
    # beside 2^14, fp32 loses 2^-12: what is left depends on the order
    for column in range(0, 1000, 2):
        shuffled = torch.randperm(4, generator=generator)
        values[:, column] = torch.tensor([2.0**14, 2.0**-12, -(2.0**14), 2.0**-12])[shuffled]
    expected = definition(list(values), reduce)
    for first in (1, 2, 3):
        assert not torch.equal(definition(list(values.roll(-first, 0)), reduce), expected)
    for numbers in pool4.run(given, values=values.tolist(), reduce=reduce):
        assert torch.equal(torch.tensor(numbers), expected)


def test_an_overflow_on_the_wire_skips_the_step_on_both_ranks(pool2):
    for applied, reason, same in pool2.run(overflow):
        assert (applied, reason, same) == (False, "overflow", True)


def overflow(rank):
    model = nn.Linear(4, 2)
    precision = make("fp16-mixed", model)
    before = model.weight.detach().clone()
    reducer = GradientReducer(precision, dist.group.WORLD, torch.float16)
    with precision.autocast():
        # times the loss scale 2^16: finite in fp32, beyond fp16 on rank 0 alone
        loss = model.weight.sum() * (2.0 if rank == 0 else 0.5)
    with reducer.last():
        precision.backward(loss)
    reducer.finish()
    result = precision.step()
    return result.applied, result.reason, torch.equal(model.weight, before)


def test_broadcast_gives_all_what_the_first_has(pool4):
    first, *others = pool4.run(spread)
    assert first == spread(0, alone=True)
    assert all(other == first for other in others)


def spread(rank, alone=False):
    generator = torch.Generator().manual_seed(rank)
    model = nn.BatchNorm1d(5)
    model.half_weight = nn.Parameter(torch.randn(3, 4, generator=generator).bfloat16().t())
    model.register_buffer("mask", torch.rand(7, generator=generator) > 0.5)
    model.register_buffer("scalar", torch.tensor(1.5 + rank, dtype=torch.float64))
    model.register_buffer("holes", torch.randn(4, 6, generator=generator)[:, ::2])
    model.register_buffer("empty", torch.zeros(0))
    model.running_mean.fill_(float("nan") if rank == 0 else rank)
    model.num_batches_tracked.fill_(2**60 + rank)
    model.frozen = nn.Parameter(torch.full((2,), -0.0 if rank == 0 else 1.0), requires_grad=False)
    if not alone:
        broadcast_(model, dist.group.WORLD)
    state = model.state_dict()
    return {n: t.contiguous().reshape(-1).view(torch.uint8).tolist() for n, t in state.items()}


CASES = {
    "a sparse gradient": "the gradient of weight is sparse",
    "frozen later": "other parameters are trained.*bias",
    "replaced later": "the same names, but other tensors",
    "last twice": r"call finish\(\) once",
    "backward twice": "got a gradient after its bucket was on its way",
    "float64": "reduce=fp64; allowed: fp32, bf16, fp16",
    "nothing": "no trainable parameter",
}


def test_what_cannot_be_summed_is_refused(pool2):
    def check(case):
        for message in pool2.run(refused, case=case):
            assert message is not None, "nothing was refused"
            assert re.search(CASES[case], message), message

    every(CASES, check)


def refused(rank, case):
    model = nn.Linear(4, 4)
    dtype, size = torch.float32, 1 if case == "backward twice" else BIG
    if case == "a sparse gradient":
        model = nn.Embedding(5, 4)
    precision = make("fp32", model)
    if case == "float64":
        dtype = torch.float64
    if case == "nothing":
        precision.optimizers[0].param_groups.clear()
    try:
        reducer = GradientReducer(precision, dist.group.WORLD, dtype, bucket_bytes=size)
        if case == "frozen later":
            model.bias.requires_grad_(False)
        if case == "replaced later":
            model.bias = nn.Parameter(torch.zeros(4))
            precision.optimizers[0].param_groups[0]["params"][1] = model.bias
        with reducer.last():
            if case == "a sparse gradient":
                F.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()
            else:
                model(torch.ones(2, 4)).sum().backward()
            if case == "backward twice":
                model(torch.ones(2, 4)).sum().backward()
        if case == "last twice":
            with reducer.last():
                pass
        reducer.finish()
    except PrecisionError as error:
        return str(error)
    return None
