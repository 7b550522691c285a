"""``halfstep.watch`` over ranks: each counts its own numbers, and rank 0 writes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep

pytestmark = pytest.mark.distributed


def loop(rank, path, kind):
    """Two steps of a torch loop; what this rank has counted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    wrapped = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    with halfstep.watch(wrapped, optimizer, every=2, to=path / f"{rank}.jsonl") as watched:
        for _ in range(2):
            rows = slice(4 * rank, 4 * rank + 4)
            F.cross_entropy(wrapped(x[rows]), torch.arange(8)[rows] % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched.report()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_counts_its_own_and_rank_0_writes(pool2, tmp_path, kind):
    reports = pool2.run(loop, path=tmp_path, kind=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]
    (_, written) = halfstep.load_numerics(tmp_path / "0.jsonl").steps
    assert written == reports[0]
    for report in reports:
        assert report.step == 2
        held = {one.name: one.elements for one in report.of("weight")}
        assert held["0.weight"] == 32 * 16 // (2 if kind == "fsdp" else 1)
        assert {one.name: one.elements for one in report.of("activation")}["0"] == 4 * 32
