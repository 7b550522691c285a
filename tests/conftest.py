"""Shared by all tests: one small corpus, and a cache that no test shares with the user."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

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


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared tokens go to a folder of this test session, those of child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFSTEP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import from benchmarks/, whose modules have names that other folders have too."""
    folder = Path(__file__).parents[1] / "benchmarks"
    names = {path.stem for path in folder.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    monkeypatch.syspath_prepend(str(folder))
    yield
    for name in names & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function runs by a compiled kernel: what is compared bit by bit is torch's own."""
    monkeypatch.setattr("halfstep.kernels.library.loaded", lambda: "off in this test")


@pytest.fixture
def no_synchronisation() -> Callable[[], AbstractContextManager[None]]:
    """A context in which a call that waits for the GPU raises RuntimeError."""

    @contextmanager
    def context() -> Iterator[None]:
        torch.cuda.synchronize()
        with warnings.catch_warnings(action="ignore"):  # the mode is a prototype, torch says
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture(autouse=True)
def own_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning leaves the address of its ranks in the environment; its port may be taken now."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


RANKS = "ranks"
PROGRAMS = ("tests/cli/", "tests/trainer/", "tests/integrations/", "tests/strangers/")
"""Rooms whose files hold few tests that take long, each a whole program or a training."""


class Rooms(LoadScopeScheduling):
    """Keeps a file's tests in one process, and all tests of ranks in another.

    The pools of ranks take seconds to start, and two of them side by side would share the same
    cores. (pytest 9.2 does not hand on the marks of `--dist loadgroup`.)
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        alone = path.endswith("gpu.py")  # tests share nothing there, and a GPU's minutes are few
        return RANKS if path.startswith("tests/distributed/") else nodeid if alone else path

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Hand out what takes longest first, so that no process is left alone with it at the end.

        xdist orders files by how many tests they have, which says little of how long they take.
        """
        first = min(self.workqueue, key=_urgency)
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def _urgency(scope: str) -> int:
    """0 for the ranks, which take longest of all; 1 for files of whole programs; 2 for others."""
    return 0 if scope == RANKS else 1 if scope.startswith(PROGRAMS) else 2


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Rooms:
    """Hand tests out by :class:`Rooms`."""
    return Rooms(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests marked ``covering``, leave each value of each parameter to the quick tier.

    A product of layouts, optimizers and formats asks one question many times over: the tests that
    see no new value are marked slow, and `make test-all` runs them. ``covering(ends=True)`` leaves
    only the first and the last of those that see one.
    """
    products: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):  # torch's warnings are of its version and of the card
            item.add_marker(pytest.mark.filterwarnings("ignore"))
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in products.values():
        several = [case for case in cases if hasattr(case, "callspec")]
        kept = covering(case.callspec.params for case in several)
        if kept and cases[0].get_closest_marker("covering").kwargs.get("ends"):
            kept = {min(kept), max(kept)}
        for number, case in enumerate(several):
            if number not in kept:
                case.add_marker(pytest.mark.slow)


def covering(cases: Iterable[Mapping[str, object]]) -> set[int]:
    """The numbers of cases that have each value of each parameter at least once.

    Cases whose parameters differ from each other come first: of a policy before and a policy
    after, the pairs that are equal are those in which the least can go wrong.
    """
    values = {
        number: {(name, repr(value)) for name, value in case.items()}
        for number, case in enumerate(cases)
    }
    kept: set[int] = set()
    left = set().union(*values.values())
    while left:

        def worth(number: int, left: set[tuple[str, str]] = left) -> tuple[bool, int, int]:
            new = len(values[number] & left)
            return new > 0, len({value for _, value in values[number]}), new

        best = max((number for number in values if number not in kept), key=worth)
        kept.add(best)
        left = left - values[best]
    return kept
