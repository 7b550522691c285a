"""Gradients summed over the ranks of torch's DDP: against one process, and against the definition.

A sum of two numbers has the same bits whoever adds them. So two ranks of DDP, whose means are sums
of halves, train bit for bit as one process that takes both ranks' micro-batches.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import halfstep
from every import every
from halfstep.distributed.strategy import ParallelPlan, choose_strategy
from halfstep.errors import PrecisionError
from halfstep.precision.masters.reduction import start_sum
from halfstep.precision.policy.spelling import parse_policy

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """A tied matrix, a frozen layer, and one that only some batches use."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.frozen = nn.Linear(8, 16, bias=False), nn.Linear(16, 16)
        self.norm, self.spare = nn.LayerNorm(16), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x, spare=True):
        x = self.norm(self.frozen(torch.tanh(self.up(x))))
        return F.linear(x + self.spare(x) if spare else x, self.up.weight.t())


def batch(rank, number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))


def precision_of(policy, model, trained, **options):
    """fp16 has a scale that no loss here overflows."""
    policy += ",init_scale=4096" if policy.startswith("fp16") and "init" not in policy else ""
    own = [p for p in trained.parameters() if p.requires_grad]
    makes = halfstep.optim.AdamW if parse_policy(policy).needs_own_optimizer else torch.optim.AdamW
    return halfstep.Precision(policy, model, makes(own, lr=0.01, eps=1e-4), **options)


def backward(precision, called, rank, number, share, spare=True):
    with precision.autocast():
        loss = called(batch(rank, number), spare).float().square().mean() * share
    precision.backward(loss)


def told(precision, results):
    masters = {n.removeprefix("module."): v.clone() for n, v in precision.masters.items()}
    return [(r.loss, r.grad_norm) for r in results], masters


# Loops of a user's own.

WRAPPERS = {
    "before": {},
    "before, and Precision has the module inside": {},
    "after": {},
    "without no_sync": {},
    "many buckets": {"bucket_cap_mb": 0.001},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "replicate": {},
    "replicate after": {},
    "static": {"static_graph": True},  # with which torch's own no_sync fails in the first step
}


def user_loop(rank, policy, how, micro, spare=(True, True)):
    """Four steps under DDP; ``spare``: which ranks use that layer in a step's last micro-batch."""
    model = Net()
    wrap = replicate if "replicate" in how else DistributedDataParallel
    early = "after" not in how
    called = wrap(model, **WRAPPERS[how]) if early else model
    precision = precision_of(policy, model if "inside" in how else called, model)
    if not early:
        called = wrap(model, **WRAPPERS[how])
    results = []
    for step in range(4):
        for number in range(micro):
            last = number == micro - 1
            quiet = not last and how not in ("static", "without no_sync")
            if "replicate" in how:
                called.set_requires_gradient_sync(not quiet)
                quiet = False
            with called.no_sync() if quiet else nullcontext():
                use = spare[rank] or not last
                backward(precision, called, rank, step * micro + number, 1 / micro, use)
        results.append(precision.step(max_norm=0.5))
    found = told(precision, results)
    precision.close()
    return found


def one_process(policy, micro, spare=(True, True)):
    model = Net()
    precision, results = precision_of(policy, model, model), []
    for step in range(4):
        for rank, number in itertools.product((0, 1), range(micro)):
            use = spare[rank] or number < micro - 1
            backward(precision, model, rank, step * micro + number, 0.5 / micro, use)
        results.append(precision.step(max_norm=0.5))
    return told(precision, results)


def apart(policy, micro):
    """How far weights may be from those of one process.

    A sum of more than two numbers depends on their order, of ranks and of micro-batches; weights
    that are stored, or gradients that are sent, in 16 bits differ in their last bits.
    """
    if "pure" in policy or "=bf16" in policy:
        return 0.0 if micro == 1 and "=" not in policy else 2e-2
    return 0.0 if micro == 1 else 1e-6


def assert_same(found, wanted, last_bits):
    """Both ranks have the weights of one process, and its losses and norms."""
    (one, masters), (other, others) = found
    assert one == other
    for name, value in wanted[1].items():
        assert torch.equal(masters[name], others[name]), name
        assert (masters[name] - value).abs().max() <= last_bits, name
    assert torch.tensor(one) == pytest.approx(torch.tensor(wanted[0]), rel=max(last_bits, 1e-6) * 2)


POLICIES = ("bf16-split", "bf16-master", "fp16-master", "bf16-mixed", "bf16-pure", "fp16-pure",
            "bf16-mixed,reduce=bf16", "bf16-master,keep_fp32=type:LayerNorm")  # fmt: skip
QUICK = [("bf16-split", "before", 2), ("fp16-master", "before", 3), (POLICIES[-1], "static", 1)]
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
    for case in itertools.product(POLICIES, WRAPPERS, (1, 2, 3))
]


@pytest.mark.parametrize(("policy", "how", "micro"), CASES)
def test_ddp_trains_as_one_process(pool2, policy, how, micro):
    found = pool2.run(user_loop, policy=policy, how=how, micro=micro)
    assert_same(found, one_process(policy, micro), apart(policy, micro))


@pytest.mark.parametrize("policy", ["bf16-split", "fp16-master", "bf16-mixed,reduce=bf16"])
def test_a_layer_that_one_rank_leaves_out_counts_as_zeros_there(pool2, policy):
    use = (True, False)
    found = pool2.run(user_loop, policy=policy, how="unused", micro=2, spare=use)
    assert_same(found, one_process(policy, 2, use), apart(policy, 2))


def hooked(rank, policy):
    """What a user's hooks see in the second of two micro-batches, and ``p.grad`` after each."""
    model = nn.Linear(8, 4)
    nn.init.constant_(model.weight, 0.5)
    wrapper = DistributedDataParallel(model)
    precision, seen = precision_of(policy, wrapper, model), {}
    model.weight.register_hook(lambda g: seen.update(hook=g.float().tolist()))
    model.weight.register_post_accumulate_grad_hook(
        lambda p: seen.update(added=p.grad.float().tolist())
    )
    for last in (False, True):
        with nullcontext() if last else wrapper.no_sync(), precision.autocast():
            precision.backward(wrapper(torch.full((1, 8), 1.0 + rank)).sum())
        seen[f"grad {last}"] = model.weight.grad.unique().tolist()
    precision.discard()
    precision.close()
    assert not wrapper._comm_hooks
    told = dict(seen)
    wrapper(torch.full((1, 8), 1.0 + rank, dtype=model.weight.dtype)).sum().backward()
    return told, model.weight.grad.unique().tolist()


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
def test_hooks_see_true_gradients_and_close_gives_ddp_back(pool2, policy):
    for rank, (seen, after) in enumerate(pool2.run(hooked, policy=policy)):
        own = 1.0 + rank
        assert seen["hook"] == [[own] * 8] * 4
        assert seen["added"] == [[2 * own] * 8] * 4
        assert seen["grad False"] == [own]
        assert seen["grad True"] == [3.0]  # the mean of 2 and 4
        assert after == [1.5]


# Sums: of the trainer's strategy, and of bare numbers.


def definition(parts, reduce):
    """fp32: added; 16 bits: each rounded once, added in fp32 by rank, and rounded once."""
    wire = DTYPES[reduce]
    total = parts[0].to(wire).float()
    for part in parts[1:]:
        total = total + part.to(wire).float()
    return total.to(wire).float()


def strategy_of(policy, ranks):
    model = Net()
    strategy = choose_strategy(f"data={ranks}", policy, "cpu")
    strategy.place_(model, ParallelPlan(blocks=()))
    precision = precision_of(policy, model, model, ranks=strategy.ranks)
    strategy.attach_(precision)
    return model, strategy, precision


def strategy_sums(rank, policy, ranks, spare, micro):
    """In a worker: the gradients of the second of two equal steps; the first uses all layers."""
    model, strategy, precision = strategy_of(policy, ranks)
    for use in (True, spare[rank]):
        precision.discard()
        for number in range(micro):
            with strategy.micro_batch(last=number == micro - 1):
                backward(precision, model, rank, number, 1 / 16, use or number < micro - 1)
        strategy.finish()
    return {n: (str(p.grad.dtype), p.grad.float()) for n, p in model.named_parameters()
            if p.grad is not None}  # fmt: skip


SUMS = [
    pytest.param(policy, reduce, *how, marks=[pytest.mark.slow] * (reduce == "fp16"))
    for policy in ("fp32", "bf16-mixed", "bf16-master", "fp16-master", "bf16-split", "bf16-pure")
    for reduce in DTYPES
    for how in ((2, (True, True), 2), (2, (True, False), 1), (2, (True, False), 2),
                (2, (False, False), 1), (4, (True,) * 4, 1))
    if not (policy == "fp16-master" and reduce == "fp16")  # whose wire is scaled
]  # fmt: skip


@pytest.mark.parametrize(("policy", "reduce", "ranks", "spare", "micro"), SUMS)
def test_ranks_get_the_sum_of_their_shares(request, policy, reduce, ranks, spare, micro):
    """A parameter that one rank has not used counts as zeros; none of all has no gradient."""
    found = request.getfixturevalue(f"pool{ranks}").run(
        strategy_sums, policy=f"{policy},reduce={reduce}", ranks=ranks, spare=spare, micro=micro
    )
    shares = []
    for rank in range(ranks):
        model = Net()
        precision = precision_of(policy, model, model)
        for number in range(micro):
            use = spare[rank] or number < micro - 1
            backward(precision, model, rank, number, 1 / 16, use)
        shares.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for mine in found:
        for name, (dtype, got) in mine.items():
            parts = [torch.zeros_like(got) if s[name] is None else s[name].float() for s in shares]
            expected = definition(parts, reduce)
            if policy == "bf16-pure":
                assert dtype == "torch.bfloat16"
                expected = expected.bfloat16().float()
            if ranks == 4 and reduce == "fp32":  # gloo's ring adds in an order of its own
                bound = 4 * 2.0**-24 * torch.stack(parts).double().abs().sum(0)
                assert bool(((got.double() - expected.double()).abs() <= bound).all()), name
            else:
                assert torch.equal(got, expected), name
        assert ("spare.weight" in mine) == (any(spare) or micro > 1)
        assert all(torch.equal(got, mine[name][1]) for name, (_, got) in found[0].items())


def bare(rank, values, reduce):
    flat = torch.tensor(values[rank])
    start_sum(flat, dist.group.WORLD, DTYPES[reduce])()
    return flat


@pytest.mark.parametrize("reduce", DTYPES)
def test_inf_and_nan_stay_what_they_are(pool2, reduce):
    inf, nan = float("inf"), float("nan")
    values = [[1.0, 70000.0, 40000.0, inf, inf, nan, -inf, 2.0**-30],
              [2.0, 1.0, 40000.0, 1.0, -inf, 1.0, -1.0, 2.0**-30]]  # fmt: skip
    expected = torch.tensor([3.0, 70001.0, 80000.0, inf, nan, nan, -inf, 2.0**-29])
    if reduce == "bf16":
        expected = expected.bfloat16().float()
    if reduce == "fp16":  # largest number 65504; smallest 2^-24
        expected[1], expected[2], expected[7] = inf, inf, 0.0
    for got in pool2.run(bare, values=values, reduce=reduce):
        assert torch.equal(got.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize("reduce", ["bf16", "fp16"])
def test_random_numbers_of_all_sizes_are_added_by_rank(pool4, reduce):
    generator = torch.Generator().manual_seed(3)
    # 1001 numbers: no multiple of the ranks; from below the smallest to the largest
    values = torch.randn(4, 1001, generator=generator)
    values *= 2.0 ** torch.randint(-30, 15, (4, 1001), generator=generator)
    # beside 2^14, fp32 loses 2^-12: what is left depends on the order
    for column in range(0, 1000, 2):
        shuffled = torch.randperm(4, generator=generator)
        values[:, column] = torch.tensor([2.0**14, 2.0**-12, -(2.0**14), 2.0**-12])[shuffled]
    expected = definition(list(values), reduce)
    for first in (1, 2, 3):
        assert not torch.equal(definition(list(values.roll(-first, 0)), reduce), expected)
    for got in pool4.run(bare, values=values.tolist(), reduce=reduce):
        assert torch.equal(got, expected)


def overflow(rank):
    model, strategy, precision = strategy_of("fp16-mixed,reduce=fp16,init_scale=65536", 2)
    before = model.up.weight.detach().clone()
    with strategy.micro_batch(last=True), precision.autocast():
        # times the loss scale 2^16: finite in fp32, beyond fp16 on rank 0 alone
        precision.backward(model.up.weight.sum() * (2.0 if rank == 0 else 0.5))
    strategy.finish()
    result = precision.step()
    return result.applied, result.reason, torch.equal(model.up.weight, before)


def test_an_overflow_on_the_wire_skips_the_step_on_both_ranks(pool2):
    assert pool2.run(overflow) == [(False, "overflow", True)] * 2


def averaged(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError("a user's hook, which is never called")


averaged.__annotations__ |= {
    "bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]
}  # fmt: skip


def refused(rank, case):
    """The refusal's text; and what it says to do is done, and trains."""
    hook, micro = case == "a hook of the user's", case.startswith("finish")
    if hook:
        wrapper = DistributedDataParallel(Net())
        wrapper.register_comm_hook(None, averaged)
        try:
            precision_of("bf16-split", wrapper, wrapper)
        except PrecisionError as error:
            precision_of("bf16-mixed", wrapper, wrapper)
            assert wrapper._comm_hooks
            return str(error)
    model, strategy, precision = strategy_of("fp32", 2)
    try:
        with strategy.micro_batch(last=not micro):
            backward(precision, model, rank, 0, 1.0)
            if not micro:
                backward(precision, model, rank, 1, 1.0)
        strategy.finish()
    except PrecisionError as error:
        precision.discard()
        with strategy.micro_batch(last=True):
            backward(precision, model, rank, 0, 1.0)
        strategy.finish()
        assert precision.step().applied
        return str(error)


def test_what_cannot_be_summed_is_refused(pool2):
    def check(case, words):
        for message in pool2.run(refused, case=case):
            assert words in (message or "nothing was refused")

    cases = {
        "a hook of the user's": "or use bf16-mixed",
        "finish alone": "inside micro_batch(last=True)",
        "backward twice": "call backward once",
    }
    every(cases.items(), check)


def unfrozen(rank):
    """The gradients of a layer that is frozen, and unfrozen again, between steps."""
    model, strategy, precision = strategy_of("bf16-split", 2)
    found = []
    for trains in (True, False, True):
        model.spare.requires_grad_(trains)
        with strategy.micro_batch(last=True):
            backward(precision, model, rank, 0, 1.0)
        strategy.finish()
        found.append(None if model.spare.bias.grad is None else model.spare.bias.grad.tolist())
        precision.discard()
    return found


def test_what_is_unfrozen_is_summed(pool2):
    (one, frozen, again), other = pool2.run(unfrozen)
    assert (frozen, other) == (None, [one, None, again])
    assert one == again
