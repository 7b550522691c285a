"""The programs of ``programs.py`` do what was recorded: exactly, on a kind of CPU that was.

On another, words are compared exactly and numbers nearly. Other processors and versions of torch
add in another order, which moves the last bits of fp32 and flips roundings to 16 bits; where those
of one step differ, all later ones are drawn anew, and a step may then overflow that did not.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "programs.json").read_text(encoding="utf-8"))
QUICK = ("commands", "resumed", "loops", "scalers", "examples")
# Hashes; which gradients overflowed; the width of a table's columns.
UNLIKE = re.compile(r"sha256 \w+| in [\w., ]+\b(?=\",?$)|(?<= ) +|-{2,}")
# The two recorded kinds differ by 2 % at most, in a loss near 0 after 60 steps, and by 5 %
# where a share is printed without decimals.
RATIO, LEAST = 0.05, 1e-3
NUMBER = re.compile(r"(?<![\w.])-?(?:0x[\da-f.]+p[+-]\d+|\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)")


def run(groups: tuple[str, ...]) -> dict:
    """Let a process of its own run groups, so that no other test's settings reach them."""
    program = [sys.executable, "-W", "ignore", str(HERE / "programs.py"), *groups]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def quick() -> dict:
    """What the quick groups do."""
    return run(QUICK)


def spelled(seen: dict, *, exact: bool) -> list[str]:
    """Spell what was seen, an item a line; what another kind of CPU may draw anew left out."""
    if not exact:
        seen = {name: did for name, did in seen.items() if not name.startswith("generate")}
    lines = json.dumps(seen, indent=1, ensure_ascii=False).splitlines()
    return lines if exact else [UNLIKE.sub("", line) for line in lines]


def close(old: str, new: str) -> bool:
    """Tell whether lines have the same words and nearly the same numbers."""
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    return all(abs(value(a) - value(b)) <= LEAST + RATIO * abs(value(a)) for a, b in pairs)


def value(text: str) -> float:
    """Read a number, which may be hexadecimal or have commas."""
    return float.fromhex(text) if "x" in text else float(text.replace(",", ""))


def assert_as_recorded(group: str, found: dict) -> None:
    """Show every difference of a group at once."""
    kind, bf16 = found["kind"], "no bf16" not in found["kind"]
    exact = group in RECORDED.get(kind, {})
    likest = [one for one in RECORDED if ("no bf16" not in one) == bf16]
    old = spelled(RECORDED[kind if exact else likest[0]][group], exact=exact)
    new = spelled(found[group], exact=exact)
    if not exact and len(old) == len(new):
        new = [a if close(a, b) else b for a, b in zip(old, new, strict=True)]
    told = [*difflib.unified_diff(old, new, "recorded", "found", n=1, lineterm="")]
    assert not told, "\n".join([f"{group} on {kind}:", *told])


@pytest.mark.parametrize("group", QUICK)
def test_programs_do_what_they_did(quick, group):
    assert_as_recorded(group, quick)


@pytest.mark.slow
def test_engines_do_what_they_did():
    assert_as_recorded("engines", run(("engines",)))
