"""The page of claims maps what tutorials say to what shows it: what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import halfstep
from halfstep.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = ("docs/claims.md", "docs/claims.zh.md", "docs/concepts.md", "docs/concepts.zh.md")
EXPERIMENTS = {f"lab/{path.name}" for path in (ROOT / "lab").glob("*.py")} - {"lab/course.py"}


def code(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    folder = ROOT / "tests"
    for name in code(page):
        if name.startswith(("tests/", "examples/", "benchmarks/", "lab/")):
            folder = (ROOT / name).parent
            assert (ROOT / name).is_file(), name
        elif name.startswith("test_") and (folder / name).suffix == ".py":
            # "`tests/a/test_b.py`, `test_c.py`" means its neighbour; the texts have a test.py too.
            assert (folder / name).is_file(), name


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_a_page_names_exist(page):
    told = [name.split()[1:] for name in code(page) if name.startswith("halfstep ")]
    assert len(told) > 5
    for words in told:
        assert any(" ".join(words).startswith(command) for command in COMMANDS), words


def test_a_page_names_every_experiment():
    for page in PAGES:
        assert {*code(page)} >= EXPERIMENTS, page


@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-mixed"])
def test_a_function_with_casts_of_its_own_trains_as_it_says(policy):
    seen: list[torch.dtype] = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = halfstep.Precision(policy, model, optimizer)
    before = model.weight.detach().clone()
    with precision.autocast():
        h = torch.nn.functional.linear(torch.ones(2, 4), model.weight, model.bias)
        loss = Square.apply(h).mean()
    assert h.dtype == precision.policy.compute_dtype
    assert precision.step(loss).applied
    assert seen == [torch.float32]
    # d loss / d W = 2 h x / 6, summed over two equal rows; |h| < 1 and the gradient are rounded to
    # 16 bits, which bf16 does to 2^-9 each
    expected = before - 0.1 * (2 * h[0].detach().float() / 3)[:, None].expand(3, 4)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=0.1 * 2**-8)
