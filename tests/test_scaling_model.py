"""The scaling model's arithmetic by hand, its bytes against the program's, and its page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from halfstep.distributed import Layout, choose_strategy
from halfstep.distributed.plan import plan_of
from halfstep.optim import AdamW
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.trainer.models.gpt.gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "distributed.md"


@pytest.fixture(scope="module")
def scaling():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import scaling_model
    yield scaling_model
    del sys.modules["scaling_model"]


def section(title):
    """The page's text from a heading to the next."""
    return PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]


def toy(scaling, **config):
    """1,000 parameters in blocks and 600 outside; 10 tokens a rank."""
    shape = GPTConfig(
        **{"n_layer": 2, "n_head": 8, "n_embd": 8, "block_size": 5, "vocab_size": 9} | config
    )
    return scaling.Shape("toy", shape, 1000, 600, 10)


def test_a_sharded_cell_by_hand(scaling):
    found = scaling.cell(toy(scaling), parse_policy("bf16-split"), Layout(shard=16), 50e9)
    # 2 bytes of blocks twice and of the rest once; 4 bytes of gradients; 15/16 of each is sent
    assert found.sent.parameters == (2 * 1000 * 2 + 2 * 600) * 15 // 16 == 4875
    assert found.sent.gradients == 4 * 1600 * 15 // 16 == 6000
    # a ring leaves a machine by 8 ports of 50 GB/s, which is less than NVLink's 450
    assert found.in_forward == pytest.approx(3000 / 400e9)
    assert found.in_backward == pytest.approx((1875 + 6000) / 400e9)
    assert found.compute == pytest.approx(6 * 1600 * 10 / (0.4 * 989e12))
    forward, backward = max(found.compute / 3, 7.5e-9), max(found.compute * 2 / 3, 19.6875e-9)
    assert found.efficiency == pytest.approx(found.compute / (forward + backward))
    assert found.bound == pytest.approx(found.compute / (found.compute + 27.1875e-9))


def test_a_tensor_parallel_cell_by_hand(scaling):
    found = scaling.cell(toy(scaling), parse_policy("fp32"), Layout(data=4, tensor=8), 50e9)
    # 200 numbers a rank, summed with one rank of each of 3 other machines by its own port
    assert found.sent.gradients == 2 * 3 * 200 * 4 // 4 == 1200
    assert found.in_backward == pytest.approx(1200 / 50e9)
    # 4 all-reduces in each of 2 blocks, of 80 tokens 8 wide in 4 bytes, over NVLink
    assert found.sent.activations == 8 * (2 * 7 * 80 * 8 * 4 // 8) == 35840
    assert found.waited_for == pytest.approx(35840 / 450e9)
    assert found.compute == pytest.approx(6 * 1600 * 10 / (0.4 * 67e12))


def test_a_16_bit_sum_between_machines_by_hand(scaling):
    found = scaling.cell(
        toy(scaling), parse_policy("bf16-mixed,reduce=bf16"), Layout(data=16), 50e9
    )
    assert found.sent.gradients == 2 * 2 * 1600 * 15 // 16 == 6000
    # within the machine 2 x 7/8 of 3200 bytes; an eighth of them is summed with the other machine's
    assert found.in_backward == pytest.approx(5600 / 450e9 + 400 / 50e9)
    inside = scaling.cell(
        toy(scaling), parse_policy("bf16-mixed,reduce=bf16"), Layout(data=8), 50e9
    )
    assert inside.in_backward == pytest.approx(inside.sent.gradients / 450e9)


@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        ("fp32", Layout(data=8)),
        ("bf16-mixed,reduce=bf16", Layout(data=8)),
        ("bf16-mixed", Layout(shard=8)),
        ("bf16-mixed,reduce=bf16", Layout(shard=8)),
        ("bf16-module", Layout(shard=8)),
        ("bf16-split", Layout(shard=8)),
    ],
    ids=str,
)
def test_bytes_are_those_that_the_program_counts(scaling, policy, layout):
    config = GPTConfig(n_layer=2, n_head=8, n_embd=64, block_size=16, vocab_size=64)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        strategy = choose_strategy(layout, policy, torch.device("cpu"))
        model = GPT(config)
        strategy.place_(model, plan_of(model))
        optimizer = AdamW(model.parameters())
        strategy.attach_(Precision(policy, model, optimizer, ranks=strategy.ranks))
        counted, _ = strategy.traffic(1)
    finally:
        dist.destroy_process_group()
    found = scaling.cell(scaling.shape("small", config, 1), parse_policy(policy), layout, 50e9)
    # flat buffers are filled up to whole cache lines
    assert found.sent.gradients == pytest.approx(counted.gradients, rel=0.01)
    assert found.sent.parameters == counted.parameters


def test_the_page_shows_what_the_script_prints(scaling):
    text = section("Weak scaling, on paper")
    assert scaling.step_table(scaling.shapes()[1], "InfiniBand") in text
    assert scaling.end_table() in text
    assert "nothing in it is measured on GPUs" in text
    for rate in (scaling.NVLINK / 1e9, scaling.LINKS["InfiniBand"] * 8 / 1e9, 989, 67):
        assert f"{rate:.0f} " in text


def test_the_page_shows_the_measured_losses(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import reduce_quality

    newest = max((ROOT / "benchmarks" / "results").glob("reduce-quality-*.json"))
    summary = json.loads(newest.read_text(encoding="utf-8"))["summary"]
    assert reduce_quality.table(summary) in section("Half the communication")
    for name in ("reduce_quality", "common"):
        sys.modules.pop(name, None)


def test_the_figure_says_what_it_is(scaling, tmp_path):
    measured = tmp_path / "ranks.json"
    points = {f"{axis}=2 fp32": {"efficiency": 0.81} for axis in ("data", "shard")}
    measured.write_text(json.dumps({"weak_scaling": points}))
    with_points, without = tmp_path / "a.svg", tmp_path / "b.svg"
    scaling.draw(with_points, scaling.measured_points(measured))
    scaling.draw(without, scaling.measured_points(None))
    assert "MEASURED, 2 CPU ranks, data=2: 81 %" in with_points.read_text()
    assert "No measured CPU point" not in with_points.read_text()
    assert "No measured CPU point" in without.read_text()
    for path in (with_points, without, ROOT / "docs" / "scaling.svg"):
        assert "nothing is measured on GPUs" in path.read_text()
        assert path.stat().st_size < 100_000
