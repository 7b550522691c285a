"""What ``compile`` means: that a run compiles once, and by block where it must."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import halfstep
from halfstep.distributed.layout import Layout
from halfstep.trainer.session import compiled_
from trainer.runs import run, small_config

# Dynamo warns about what it does itself while it traces.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
ONE = Layout()


@pytest.fixture
def traced(monkeypatch):
    """``torch.compile`` without making code: the traces are the same, and take a second."""
    made, compiler = [], torch.compile
    torch._dynamo.reset()
    counters.clear()

    def fast(function, **options):
        made.append(function)
        return compiler(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", fast)
    yield made
    torch._dynamo.reset()


def test_a_run_compiles_once_and_goes_on_as_it_began(corpus, tmp_path, traced):
    config = small_config(corpus, "fp32", run__compile="yes", run__eval_batches=0)
    session, _ = run(config, tmp_path / "r", until=4)
    graphs = counters["stats"]["unique_graphs"]
    later, ticks = run(session.config, tmp_path / "r")
    assert later.config.run.compile == "yes"
    assert len(ticks) == 4
    assert not counters["graph_break"]
    assert graphs >= 1


class Texts(nn.Module):
    """Rows of different lengths, as a classifier of texts has them."""

    by_block = False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 3)

    def loss_sum(self, batch):
        ids_BT, mask_BT, labels_B = batch
        mean_BC = (self.table(ids_BT) * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
        losses = nn.functional.cross_entropy(self.head(mean_BC), labels_B, reduction="sum")
        return losses, (labels_B != -100).sum()


def test_three_graphs_are_for_every_length_and_for_a_smaller_last_batch(traced):
    task = Texts()
    loss_sum = compiled_(task, None, ONE)
    for rows, length in ((8, 5), (8, 7), (7, 7), (8, 31), (5, 12), (8, 5)):
        ids = torch.randint(16, (rows, length))
        batch = ids, torch.ones(rows, length, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
        total, count = loss_sum(batch)
        total.backward()
        assert int(count) == rows
        assert torch.equal(total, task.loss_sum(batch)[0])
    assert counters["stats"]["unique_graphs"] <= 3


def test_blocks_are_compiled_where_ranks_shard_and_the_hooks_around_them_are_not(traced):
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(12)])
    seen = []
    layers[0].register_forward_pre_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    task = Texts()
    task.loss_sum = lambda x: [x := layer(x) for layer in layers][-1]
    loss = compiled_(task, halfstep.distributed.ParallelPlan(blocks=tuple(layers)), Layout(shard=2))
    graphs = []
    for rows in (3, 3, 5, 7, 9):
        loss(torch.ones(rows, 4))
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(traced) == 12
    assert seen == [False] * 5
    # for all twelve one graph, one for an input without a gradient, and again for rows that vary
    assert graphs == [2, 2, 4, 4, 4]
