"""The sentences of the READMEs that code can check."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

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
