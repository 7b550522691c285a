"""What ``compile`` means: when a run compiles, what it says, and that it compiles once."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import halfstep
from halfstep.distributed.layout import Layout
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer import session as making
from halfstep.trainer.session import WORTHWHILE, compiled_, tune_, with_choice
from trainer.runs import run, small_config

# Dynamo warns about what it does itself while it traces.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
CUDA, CPU, ONE = torch.device("cuda"), torch.device("cpu"), Layout()


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


def chosen(monkeypatch, asked="auto", device=CUDA, steps=WORTHWHILE, triton=True, status="native"):
    config = small_config("text.txt", run__compile=asked, run__max_steps=steps)
    monkeypatch.setattr(making, "has_triton", lambda: triton)
    found = halfstep.support("fp32", "cpu")
    found = dataclasses.replace(found, status=status)
    monkeypatch.setattr(making, "support", lambda *_: found)
    return with_choice(config, parse_policy("bf16-mixed"), device).run.compile


def test_auto_compiles_on_cuda_where_a_run_is_long_enough_and_triton_works(monkeypatch):
    assert chosen(monkeypatch) == "yes"
    assert chosen(monkeypatch, steps=WORTHWHILE - 1) == "no"
    assert chosen(monkeypatch, triton=False) == "no"
    assert chosen(monkeypatch, status="simulated") == "no"
    assert chosen(monkeypatch, device=CPU) == "no"
    assert chosen(monkeypatch, "no") == "no"
    assert chosen(monkeypatch, "yes", device=CPU, steps=2) == "yes"


def test_a_run_compiles_once_and_goes_on_as_it_began(corpus, tmp_path, traced):
    config = small_config(corpus, "fp32", run__compile="yes", run__eval_batches=0)
    session, _ = run(config, tmp_path / "r", until=4)
    graphs = counters["stats"]["unique_graphs"]
    later, ticks = run(session.config, tmp_path / "r")
    assert later.config.run.compile == "yes"
    assert len(ticks) == 4
    assert not counters["graph_break"]
    assert graphs >= 1


def test_what_auto_came_to_is_in_the_run(corpus, tmp_path):
    config = small_config(corpus, run__max_steps=4)
    assert config.run.compile == "auto"
    run(config, tmp_path / "r")
    state = next((tmp_path / "r").glob("checkpoints/*4/state.json"))
    assert json.loads(state.read_text())["config"]["run"]["compile"] == "no"


class Texts(nn.Module):
    """Rows of different lengths, as a classifier of texts has them."""

    lengths_vary, by_block = True, False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 3)

    def loss_sum(self, batch):
        ids_BT, mask_BT, labels_B = batch
        mean_BC = (self.table(ids_BT) * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
        losses = nn.functional.cross_entropy(self.head(mean_BC), labels_B, reduction="sum")
        return losses, (labels_B != -100).sum()


def test_one_graph_is_for_every_length_and_for_a_smaller_last_batch(traced):
    task = Texts()
    loss_sum = compiled_(task, None, ONE)
    for rows, length in ((8, 5), (8, 7), (7, 7), (8, 31), (5, 12), (8, 5)):
        ids = torch.randint(16, (rows, length))
        batch = ids, torch.ones(rows, length, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
        total, count = loss_sum(batch)
        total.backward()
        assert int(count) == rows
        assert torch.equal(total, task.loss_sum(batch)[0])
    assert counters["stats"]["unique_graphs"] == 1


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


def test_convolutions_on_cuda_are_laid_out_as_they_run_fastest():
    model, mixed = nn.Sequential(nn.Conv2d(3, 8, 3)), parse_policy("bf16-mixed")
    assert tune_(model, mixed, CPU) == tune_(nn.Linear(2, 2), mixed, CUDA) == []
    (tf32,) = tune_(model, parse_policy("fp32"), CUDA)
    assert tf32.startswith("TF32 is off, also in convolutions")
    assert model[0].weight.is_contiguous()
    assert tune_(model, mixed, CUDA) == ["images are laid out as channels_last"]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert tune_(nn.Linear(2, 2), parse_policy("tf32"), CUDA) == ["TF32 is on"]


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-split", "bf16-split,moments=8bit"])
def test_channels_last_is_only_a_layout_to_optimizer_and_checkpoint(tmp_path, policy, monkeypatch):
    """Nearly, not exactly: the sums of a convolution come in another order."""
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data, found = [(x[i], i % 4) for i in range(16)], []
    for device in (CPU, CUDA):
        torch.manual_seed(1)
        flat = (nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 4))
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *flat)
        tune_(model, parse_policy("bf16-mixed"), device)
        trainer = halfstep.Trainer(
            model, data, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), val_data=data,
            precision=policy, max_steps=3, batch_size=8, device="cpu", quiet=True,
            output_dir=str(tmp_path / f"{device.type}"),
        )  # fmt: skip
        found.append(trainer.train().evaluation.loss)
        weight = model[0].weight
        assert weight.is_contiguous(memory_format=torch.channels_last) == (device == CUDA)
        assert trainer.train(resume=True).step == 3
    assert found[0] == pytest.approx(found[1], rel=2e-2)
