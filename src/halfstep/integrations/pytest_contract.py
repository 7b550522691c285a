"""A pytest fixture that holds a training step to the dtypes of a file.

pytest imports this at every start of everybody who has halfstep, so it imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the files."""
    text = "write the files of precision_contract instead of comparing with them"
    parser.getgroup("halfstep").addoption("--contract-update", action="store_true", help=text)


@pytest.fixture
def precision_contract(
    request: pytest.FixtureRequest,
) -> Callable[[str | Path], AbstractContextManager[Any]]:
    """Compare the dtypes of the training steps in a ``with`` block with a file.

    The path is relative to pytest's root folder. A difference fails the test, with the rows that
    went and came; ``pytest --contract-update`` writes the file.

    Example::

        def test_dtypes(precision_contract):
            with precision_contract("contracts/train.json"):
                train(steps=2)
    """
    update = request.config.getoption("--contract-update")
    root = request.config.rootpath

    @contextmanager
    def compared(path: str | Path) -> Iterator[Any]:
        library = importlib.import_module("halfstep.diagnostics.contract")
        file = root / path
        before = None if update else library.Contract.read(file)
        with library.contract() as seen:
            yield seen
        now = seen.recorded()
        if before is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            now.write(file)
            return
        found = before.differences(now)
        if found:
            text = library.difference_text(before, now, found, f"{path} and this test")
            pytest.fail(f"{text}\n do: if that is meant: pytest --contract-update", pytrace=False)

    return compared
