"""The recipe of CONTRIBUTING.md for an optimizer, followed."""

from __future__ import annotations

from typing import Literal

import torch
from tests.trainer.runs import opened_run

import halfstep.optim
from halfstep.cli.commands import parser_of
from halfstep.cli.main import main
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.rules import Algorithm
from halfstep.trainer import step as steps
from halfstep.trainer.config import run as names


def sign_of_momentum(w, g, m, v, c):
    m = m * c[0] + g * c[1]
    return w - torch.sign(m) * c[2], m, v


class Signum(LowPrecisionOptimizer):
    algorithm = Algorithm(
        "signum",
        ("momentum_buffer",),
        lambda group, step: (group["momentum"], 1 - group["momentum"], group["lr"]),
        sign_of_momentum,
    )

    def __init__(self, params, lr, momentum=0.9, *, update=None, moments=None, seed=0):
        options = {"lr": lr, "momentum": momentum, "weight_decay": 0.0}
        super().__init__(params, options, update=update, moments=moments, seed=seed)


def test_an_optimizer_trains_without_a_kernel_of_its_own(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "OptimizerName", Literal["adamw", "signum"])
    monkeypatch.setitem(steps.OWN, "signum", "Signum")
    monkeypatch.setattr(halfstep.optim, "Signum", Signum, raising=False)
    parser_of.cache_clear()
    words = ["train", "--config", "gpt-tiny", "--data", str(corpus), "--model.n-layer", "1",
             "--model.n-embd", "32", "--model.block-size", "16", "--tokenizer", "bytes", "--quiet",
             "--optimizer.name", "signum", "--precision", "bf16-split,moments=8bit",
             "--max-steps", "2", "--output-dir", str(tmp_path / "r")]  # fmt: skip
    assert main(words) == 0
    parser_of.cache_clear()
    model = opened_run(tmp_path / "r").model
    assert all(bool(p.isfinite().all()) for p in model.parameters())
