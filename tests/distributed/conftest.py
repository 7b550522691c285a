"""Two and four processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.pool import Pool


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    """Two ranks over gloo."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four ranks over gloo."""
    pool = Pool(4)
    yield pool
    pool.close()
