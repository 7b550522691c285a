"""Programs that nobody here wrote need packages that only ``make test-strangers`` installs."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent / "packages"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Look into ``packages`` only where its marker is asked for: there a missing one is an error.

    A run that selects other tests, or all, must not need them; a folder or file of it that is
    named on the command line is collected as well.
    """
    wanted = config.getoption("markexpr") == "strangers"
    return True if collection_path == PACKAGES and not wanted else None
