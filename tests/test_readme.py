"""The sentences of the READMEs that code can check."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import halfstep
from halfstep.cli.grammar import read_words
from halfstep.precision.explain import bytes_per_parameter
from halfstep.precision.policy.policy import ALIASES, POLICIES

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "README.zh.md")
READMES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMANDS = [
    line.partition("#")[0].strip()
    for text in READMES.values()
    for block in text.split("```")[1::2]
    for line in block.splitlines()
    if line.startswith("halfstep ")
]


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one(line):
    words = [word for word in shlex.split(line)[1:] if word != "..."]
    name, _ = read_words(words)
    assert name.split()[0] == words[0]


@pytest.mark.parametrize("name", READMES)
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)\)", READMES[name]):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def rows(text):
    """Name and last column of the policies' table."""
    section = re.split(r"^## (?:Policies|策略)$", text, flags=re.MULTILINE)[1].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([^`]+)`", cells[0])
        if len(cells) == 4 and names and set(names) <= set(POLICIES):
            yield names, cells[3]


@pytest.mark.parametrize("name", READMES)
def test_the_bytes_of_every_policy_are_those_of_explain(name):
    seen = set()
    for names, told in rows(READMES[name]):
        seen |= set(names)
        plain = re.sub(r"8(-bit| 位)", "", told)
        numbers = [float(number) for number in re.findall(r"\d+\.?\d*", plain)]
        for i, policy in enumerate(names):
            assert sum(bytes_per_parameter(POLICIES[policy]).values()) in numbers, (policy, told)
            if plain != told:  # and with 8-bit moments
                less = halfstep.parse_policy(f"{policy},moments=8bit")
                eight = sum(bytes_per_parameter(less).values())
                assert numbers[len(names) + i] == pytest.approx(eight, abs=0.005)
    assert seen == set(POLICIES)


@pytest.mark.parametrize("name", READMES)
def test_versions_are_those_of_the_package(name):
    least = next(r for r in PROJECT["dependencies"] if r.startswith("torch")).removeprefix(
        "torch>="
    )
    python = PROJECT["requires-python"].removeprefix(">=")
    assert f"Python {python}" in READMES[name]
    assert f"torch {least}" in READMES[name]


@pytest.mark.parametrize("name", ["README.md", "docs/limits.md", "docs/policies.md"])
def test_the_pages_claim_no_run_on_a_mac(name):
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    assert "was never run on a Mac" in text


def test_the_aliases_are_those_of_the_page():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    for alias, name in ALIASES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"`{alias}`" in row, alias


def fences(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


BLOCKS = [  # those of docs/ are tried in tests/docs/test_blocks.py
    pytest.param(page, number, block, id=f"{page}-{number}")
    for page in NAMES
    for number, block in enumerate(fences(page))
]


def what_users_have(block):
    """Model, data and the like of a reader, who has them under the names that the pages use."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    x, y = torch.randn(6, 4, requires_grad=True), torch.randint(3, (6,))
    data = torch.utils.data.TensorDataset(x.detach(), y)
    have = {
        "halfstep": halfstep, "torch": torch, "AdamW": halfstep.optim.AdamW, "model": model, "x": x,
        "y": y, "batches": [(x.detach(), y)] * 3, "criterion": functional.cross_entropy,
        "loss_fn": functional.cross_entropy, "train_data": data, "val_data": data,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    if "precision." in block and "precision =" not in block:
        precision = halfstep.Precision("bf16-mixed", model, have["optimizer"])
        have["precision"] = precision
        if "first" in block:
            with precision.autocast():
                loss = functional.cross_entropy(model(x), y)
            have |= {"first": loss, "second": loss * 2}
    return have


def test_there_are_blocks_to_run():
    assert len(BLOCKS) > 5


@pytest.mark.parametrize(("page", "number", "block"), BLOCKS)
def test_a_block_of_python_runs(page, number, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.toml").write_text('base = "fp16-mixed"\ninit_scale = 1024\n')
    have = what_users_have(block)
    before = [p.detach().clone() for p in have["model"].parameters()]
    model = have["model"]
    exec(compile(block, f"{page}, block {number}", "exec"), have)
    if "precision.step(" in block:  # a loop that trains nothing would run as well
        assert any(
            not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)
        )
