"""The recipes of CONTRIBUTING.md, followed: a family of models, and an optimizer with its rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import nn

from halfstep.cli.grammar import parser_of, read_words
from halfstep.cli.main import main
from halfstep.errors import ConfigError
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.rules import Algorithm
from halfstep.trainer import step as optimizer
from halfstep.trainer.config import run as names, tasks
from halfstep.trainer.config.config import config_from_table, config_to_table, load_config
from halfstep.trainer.models.cross_entropy import linear_cross_entropy_sum
from halfstep.trainer.models.language_model import LanguageModel, generate
from halfstep.trainer.models.shapes import GPTConfig
from halfstep.trainer.tasks import text
from halfstep.trainer.tasks.text_model import load_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class BigramConfig:
    """The next token from this one alone."""

    FAMILY: ClassVar[str] = "bigram"

    n_embd: int
    """Width."""
    block_size: int
    """Longest sequence."""
    vocab_size: int = 0
    """Token ids."""

    @property
    def parameters(self) -> int:
        return 2 * self.vocab_size * self.n_embd


class Bigram(LanguageModel):
    def __init__(self, config, *, seed=0):
        super().__init__()
        self.config = config
        g = torch.Generator().manual_seed(seed)
        size = config.vocab_size, config.n_embd
        self.table = nn.Parameter(torch.randn(size, generator=g))
        self.head = nn.Parameter(torch.randn(size, generator=g))

    def forward(self, tokens_BT):
        return (self.table[tokens_BT] @ self.head.T).float()

    def loss_sum(self, batch):
        tokens_BT, targets_BT = batch
        x_NC = self.table[tokens_BT].flatten(0, 1)
        return linear_cross_entropy_sum(x_NC, self.head, targets_BT.flatten())


@pytest.fixture
def family(monkeypatch):
    """What the recipe's three files hold."""
    monkeypatch.setattr(tasks, "Shape", GPTConfig | BigramConfig)
    monkeypatch.setitem(text.FAMILIES, BigramConfig, text.Family(Bigram))
    parser_of.cache_clear()
    yield
    parser_of.cache_clear()


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


FILE = """
precision = "fp32"
[model]
family = "bigram"
n_embd = 8
block_size = 12
[data]
tokenizer = "bytes"
[schedule]
warmup_steps = 1
[run]
max_steps = 6
batch_size = 4
device = "cpu"
"""


@pytest.fixture
def words(tmp_path):
    """The start of a command line that trains a bigram."""
    (tmp_path / "t.txt").write_text("one word follows another. " * 200)
    (tmp_path / "bigram.toml").write_text(FILE)
    run = tmp_path / "r"
    return ["train", "--config", str(tmp_path / "bigram.toml"), "--data", str(tmp_path / "t.txt"),
            "--output-dir", str(run), "--quiet"], run  # fmt: skip


def test_a_family_trains_resumes_and_is_used(family, words, tmp_path, capsys):
    start, run = words
    assert main([*start, "--model.n-embd", "16"]) == 0
    assert main(["train", "--resume", "--output-dir", str(run), "--max-steps", "8", "--quiet"]) == 0
    capsys.readouterr()
    model, _, config = load_trained(run)
    assert type(model) is Bigram
    assert (config.model.n_embd, config.run.max_steps) == (16, 8)
    assert load_config(str(run / "config.toml")).model == config.model
    tokens = torch.tensor([[1, 2, 3]])
    greedy = generate(model, tokens, max_new_tokens=15, temperature=0)  # without any cache
    assert all(
        greedy[0, t + 1] == model(greedy)[0, t].argmax() for t in range(2, greedy.shape[1] - 1)
    )
    assert main(["generate", "--run", str(run), "--prompt", "one", "--max-new-tokens", "3"]) == 0
    assert main(["evaluate", "--run", str(run)]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(["export", "--run", str(run), "--to", "hf", "--output", str(tmp_path / "o")]) == 2
    assert "has no Hugging Face folders" in capsys.readouterr().err
    same = ["train", "--resume", "--output-dir", str(run), "--config", "gpt-tiny", "--quiet"]
    assert main([*same, "--data", start[4]]) == 2
    assert "model.family='gpt' (the run has 'bigram')" in capsys.readouterr().err


def test_a_file_says_which_family_it_means(family):
    shape = {"n_embd": 8, "block_size": 12}
    config = config_from_table({"model": {"family": "bigram", **shape}})
    assert config.model == BigramConfig(**shape)
    assert config_from_table(config_to_table(config)) == config
    gpt = {"n_layer": 1, "n_head": 1, **shape}
    for table in (gpt, {"family": "gpt", **gpt}):  # the first family needs no name
        config = config_from_table({"model": table})
        assert config.model == GPTConfig(**gpt)
        assert "family" not in config_to_table(config)["model"]
    with pytest.raises(ConfigError, match=r"key model\.family: 'bigam', did you mean 'bigram'"):
        config_from_table({"model": {"family": "bigam", **shape}})
    with pytest.raises(ConfigError, match=r"unknown key model\.n_layer"):
        config_from_table({"model": {"family": "bigram", **gpt}})
    with pytest.raises(ConfigError, match=r"unknown key run\.family"):
        config_from_table({"model": gpt, "run": {"family": "gpt"}})
    _, request = read_words(["train", "--model.family", "bigram", "--model.n-layer", "3"])
    assert request.given == {"model.family": "bigram", "model.n_layer": "3"}


@pytest.mark.parametrize("policy", ["fp32", "bf16-split,moments=8bit"])
def test_an_optimizer_trains_without_a_kernel_of_its_own(policy, monkeypatch, words, capsys):
    monkeypatch.setattr(names, "OptimizerName", Literal["adamw", "signum"])
    monkeypatch.setitem(optimizer.OWN, "signum", Signum)
    parser_of.cache_clear()
    start, run = words
    start[2] = "gpt-tiny"
    shape = ["--model.n-layer", "1", "--model.n-embd", "32", "--model.block-size", "16"]
    start += [*shape, "--tokenizer", "bytes", "--precision", policy, "--max-steps", "2"]
    assert main([*start, "--optimizer.name", "signum"]) == 0
    parser_of.cache_clear()
    model, *_ = load_trained(run)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_rule_without_a_kernel_is_its_definition():
    weight = torch.linspace(-1, 1, 300).requires_grad_()
    before, momentum = weight.detach().clone(), torch.zeros(300)
    signum = Signum([weight], lr=0.125)
    for step in range(3):
        gradient = torch.sin(torch.arange(300.0) + step)
        weight.grad = gradient.clone()
        signum.step()
        momentum = momentum * 0.9 + gradient * (1 - 0.9)
        before = before - torch.sign(momentum) * 0.125
    assert torch.equal(weight.detach(), before)
