"""Shared by all tests: one small corpus, and a cache that no test shares with the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

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


class Rooms(LoadScopeScheduling):
    """Keeps a file's tests in one process, and all tests of ranks in another.

    Their pools take seconds to start, and two of them side by side would share the same cores.
    (pytest 9.2 does not hand on the marks of `--dist loadgroup`.)
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "ranks" if path.startswith("tests/distributed/") else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Rooms:
    """Hand tests out by :class:`Rooms`."""
    return Rooms(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of products, leave the short half in the quick tier."""
    _thin_out(items)


def _thin_out(items: list[pytest.Item]) -> None:
    """Of tests marked ``covering``, leave each value of each parameter once to the quick tier.

    A product of layouts, optimizers and formats asks one question many times over: the tests that
    see no new value are marked slow, and `make test-all` runs them.
    """
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in products.values():
        values = {
            case: {(name, repr(v)) for name, v in case.callspec.params.items()}  # type: ignore[attr-defined]
            for case in cases
            if hasattr(case, "callspec")
        }
        left = set().union(*values.values())
        while left:
            best = max(values, key=lambda case: len(values[case] & left))
            left -= values.pop(best)
        for case in values:  # those that are left
            case.add_marker(pytest.mark.slow)
