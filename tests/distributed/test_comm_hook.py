"""The hook for torch's own DDP: sums, in the format of one's choice, against the full batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from distributed.reduction import DTYPES, Net, batch, packed, unpacked
from distributed.test_gradient_reducer import definition, same_on_all
from halfstep.distributed.comm_hook import sum_hook
from halfstep.errors import PrecisionError

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


def loss_of(model, rank, count):
    tokens, targets = batch(rank)
    return F.cross_entropy(model(tokens, True), targets, reduction="sum") / count


def with_ddp(rank, reduce, dtype="fp32", named_group=True):
    model = Net().to(DTYPES[dtype])
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.001)  # several buckets
    parallel.register_comm_hook(dist.group.WORLD if named_group else None, sum_hook(DTYPES[reduce]))
    for _ in range(3):  # DDP builds its buckets anew after the first
        parallel.zero_grad()
        loss_of(parallel, rank, 8).backward()
    named = model.named_parameters()
    return packed({name: p.grad for name, p in named if p.requires_grad})


def shares(ranks, dtype="fp32"):
    found = []
    for rank in range(ranks):
        model = Net().to(DTYPES[dtype])
        loss_of(model, rank, 8).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    return found


@pytest.mark.parametrize("named_group", [True, False])
def test_fp32_sums_are_the_full_batch(pool2, named_group):
    """torch's DDP alone would average them."""
    found = pool2.run(with_ddp, reduce="fp32", named_group=named_group)
    same_on_all(found)
    model = Net()
    batches = [batch(rank) for rank in range(2)]
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    (F.cross_entropy(model(tokens, True), targets, reduction="sum") / 8).backward()
    parts = shares(2)
    for name, got in unpacked(found[0]).items():
        assert torch.equal(got, parts[0][name] + parts[1][name])
        # the rounding of sums over 12 rows, of numbers up to 1
        assert torch.allclose(got, model.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduce", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sums_are_rounded_once_per_rank_and_once(pool, reduce, dtype):
    found = pool.run(with_ddp, reduce=reduce, dtype=dtype)
    same_on_all(found)
    parts = shares(pool.size, dtype)
    for name, got in unpacked(found[0]).items():
        if reduce != "fp32":
            expected = definition([p[name] for p in parts], reduce, DTYPES[dtype])
            assert torch.equal(got, expected.float()), name
            continue
        each = torch.stack([p[name].double() for p in parts])
        # one rounding to bf16, to a relative 2^-8, after three in fp32; a sum in bf16 has three
        last = 2.0**-8 if dtype == "bf16" else 2.0**-24
        bound = last * each.sum(0).abs() + 4 * 2.0**-24 * each.abs().sum(0)
        assert bool(((got.double() - each.sum(0)).abs() <= bound).all()), name


def test_other_formats_are_refused():
    with pytest.raises(PrecisionError, match="reduce=fp64; allowed: fp32, bf16, fp16"):
        sum_hook(torch.float64)
