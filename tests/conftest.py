"""Shared by all tests: one small corpus, and a cache that no test shares with the user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Child processes (the command line under test) must not touch the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# One thread, in child processes too, where nobody asks for more: sums that are compared bit for bit
# are then cut alike in all of them, whoever starts pytest.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1").split(",")[0]))

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "box", "wizards")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of some 60 kB with structure that a tiny model learns something of."""
    state = 12345
    lines = []
    for _ in range(1200):
        line = []
        for _ in range(9):
            state = (1103515245 * state + 12345) % 2**31
            line.append(WORDS[(state >> 16) % len(WORDS)])
        lines.append(" ".join(line) + ".\n")
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared tokens go to a folder of this test session."""
    base = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("HALFSTEP_CACHE", str(base))


@pytest.fixture(autouse=True)
def own_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning leaves the address of its ranks in the environment; its port may be taken now."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
