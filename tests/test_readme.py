"""The sentences of the READMEs, and of pages they lead to, that code can check."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from tests.docs.blocks import reader

import halfstep
from every import every
from halfstep.cli.commands import read_words
from halfstep.precision.explain import bytes_per_parameter
from halfstep.precision.policy.policy import POLICIES

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "README.zh.md")
READMES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
COMMANDS = [
    line.partition("#")[0].strip()
    for text in READMES.values()
    for block in text.split("```")[1::2]
    for line in block.splitlines()
    if line.startswith("halfstep ")
]


def pictures(text):
    """The files of the pictures on a page, of Markdown and of HTML."""
    return re.findall(r"""(?:!\[[^\]]*\]\(|<img src=")([^)"]+)""", text)


def test_every_command_is_one():
    def check(line):
        words = [word for word in shlex.split(line)[1:] if word != "..."]
        name, _ = read_words(words)
        assert name.split()[0] == words[0]

    assert len(COMMANDS) > 15
    every(COMMANDS, check)


@pytest.mark.parametrize("name", READMES)
def test_every_link_leads_somewhere(name):
    for target in [*re.findall(r"\]\(([^)#]+)\)", READMES[name]), *pictures(READMES[name])]:
        assert target.startswith("https://") or (ROOT / target).exists(), target


def policy_rows():
    """Names and bytes of the table of policies in docs/policies.md."""
    for line in (ROOT / "docs" / "policies.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([^`]+)`", cells[0])
        if len(cells) == 5 and names and set(names) <= set(POLICIES):
            yield names, cells[4]


def test_the_bytes_of_every_policy_are_those_of_explain():
    seen = set()
    for names, told in policy_rows():
        seen |= set(names)
        plain = told.replace("8-bit", "").replace("bf16", "")
        numbers = [float(number) for number in re.findall(r"\d+\.?\d*", plain)]
        for policy in names:
            assert sum(bytes_per_parameter(POLICIES[policy]).values()) == numbers[0], policy
            if "8-bit" in told:
                less = halfstep.parse_policy(f"{policy},moments=8bit")
                eight = sum(bytes_per_parameter(less).values())
                assert numbers[-1] == pytest.approx(eight, abs=0.005)  # two digits are told
    assert seen == set(POLICIES)


def newest(name):
    path = max((ROOT / "benchmarks" / "results").glob(f"{name}-20*.json"))
    return json.loads(path.read_text(encoding="utf-8"))


PEERS = [newest(f"peers-{model}")["rows"] for model in ("gpt-14m", "gpt2-124m")]
BEST = "bare autocast, compiled, tuned malloc"
OURS = ("halfstep.Precision bf16-mixed, their model", "halfstep train bf16-mixed",
        "halfstep train bf16-split, 8-bit moments")  # fmt: skip


@pytest.mark.parametrize("name", READMES)
def test_the_table_of_peers_is_that_of_the_results(name):
    table = READMES[name].split("svg")[-1]
    found = [re.findall(r"\d\.\d\d", line) for line in table.splitlines() if line.startswith("|")]
    for told, row in zip(found[2:5], OURS, strict=True):
        speeds = [
            rows[row]["tokens_per_second"] / rows[BEST]["tokens_per_second"] for rows in PEERS
        ]
        sizes = [rows[row]["peak_mb"] / rows[BEST]["peak_mb"] for rows in PEERS]
        assert told == [f"{ratio:.2f}" for ratio in (*speeds, *sizes)], row
        # a peer that is faster than the one called the best would make the table a lie
    for rows in PEERS:
        theirs = [row["tokens_per_second"] for name, row in rows.items() if "halfstep" not in name]
        assert max(theirs) == rows[BEST]["tokens_per_second"]


MEASURED = {name: (ROOT / "docs" / name).read_text("utf-8") for name in
            ("measured.md", "measured.zh.md")}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_the_measured_peers_are_those_of_the_results(name):
    page = re.sub(r"<!-- gpu: .*?<!-- /gpu -->", "", MEASURED[name], flags=re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)[1:3]
    for table, rows in zip(tables, PEERS, strict=True):
        told = sorted(
            re.findall(r"\| ([\d,]+) \| ([\d,]+) \D+ ([\d,]+) \| (\S+) \| ([\d,]+) \|", table)
        )
        best = rows[BEST]["tokens_per_second"]
        assert told == sorted(
            (*(f"{value:,.0f}" for value in (row["tokens_per_second"], *row["quartiles"])),
             f"{row['tokens_per_second'] / best:.2f}", f"{row['peak_mb']:,.0f}")
            for row in rows.values()
        )  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_the_measured_losses_are_those_of_the_results(name):
    told = dict(re.findall(r"^\| `(\S+)` \| (\d\.\d{4} \| \S+%) \|", MEASURED[name], re.MULTILINE))
    found = newest("quality-cpu")["policies"]
    assert told == {policy: f"{run['val_loss']:.4f} | {run['relative_to_fp32']:+.2%}"
                    for policy, run in found.items()}  # fmt: skip


def test_the_diff_trains_on_both_sides():
    """The lines that go and the lines that come, each with the lines that stay."""
    (diff,) = re.findall(r"```diff\n(.*?)```", READMES["README.md"], re.DOTALL)
    lines = diff.splitlines()
    for sign in "-+":
        block = "\n".join(line[1:] for line in lines if line[0] in f"{sign} ")
        have = {**reader(""), "device": "cpu"}
        before = [p.detach().clone() for p in have["model"].parameters()]
        exec(compile(block, f"README.md, {sign}", "exec"), have)
        after = have["model"].parameters()
        assert any(not torch.equal(p, old) for p, old in zip(after, before, strict=True))
