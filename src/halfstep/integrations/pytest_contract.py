"""A pytest fixture that holds a training step to the dtypes of a file.

pytest imports this at every start of everybody who has halfstep, so it imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the files."""
    text = "write the files of precision_contract instead of comparing with them"
    parser.getgroup("halfstep").addoption("--contract-update", action="store_true", help=text)


@pytest.fixture
def precision_contract(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Compare the dtypes of the training steps in a ``with`` block with a file.

    ``with precision_contract("contracts/train.json"): ...`` fails the test where they differ, with
    the rows that went and came. The path is relative to pytest's root folder.
    """
    library = importlib.import_module("halfstep.diagnostics.contract")

    @contextmanager
    def compared(path: str) -> Iterator[Any]:
        file = request.config.rootpath / path
        update = request.config.getoption("--contract-update")
        before = None if update else library.Contract.read(file)
        with library.contract() as seen:
            yield seen
        if before is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            seen.recorded().write(file)
        elif before.differences(seen.recorded()):
            text = before.text(seen.recorded(), f"{path} and this test")
            pytest.fail(f"{text}\n do: if that is meant, pytest --contract-update", pytrace=False)

    return compared
