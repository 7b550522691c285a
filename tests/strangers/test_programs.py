"""Random programs of ordinary actions train what the policy's definition says, in plain torch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from every import every
from strangers.programs import cells
from strangers.test_idioms import QUICK

TESTS = Path(__file__).parents[1]
NIGHTLY, BATCH = 500, 100


def require_equal(seed: int) -> None:
    assert {cell[0]: cell[1:] for cell in cells(seed, QUICK) if cell[1] != "equal"} == {}


@pytest.mark.filterwarnings("ignore:the step is left out:UserWarning")
def test_programs():
    every(range(10, 20), require_equal)


def outcomes(first: int) -> list[tuple[int, str, str, str]]:
    """Of a batch in a process of its own, whose end by a signal is a finding too."""
    command = [sys.executable, "-X", "faulthandler", "-m", "strangers.programs", str(first)]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, str(BATCH)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        lines.append([lines[-1][0] if lines else first, "", "ended", done.stderr[-2000:]])
    return lines


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_programs_that_were_never_run_before():
    """Other ones each night; to see one again: ``python -m strangers.programs SEED 1 POLICY``."""
    start = random.SystemRandom().randrange(10**9)
    found = [line for first in range(start, start + NIGHTLY, BATCH) for line in outcomes(first)]
    assert len({seed for seed, *_ in found}) == NIGHTLY
    wrong = [line for line in found if line[2] not in ("", "equal")]
    beyond = {seed for seed, _, kind, _ in wrong if kind == "silent"}
    told = "\n".join(map(str, wrong))
    assert {kind for _, _, kind, _ in wrong} <= {"silent"}, told
    assert len(beyond) <= NIGHTLY / 100, told
