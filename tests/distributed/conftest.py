"""Two and four processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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


@pytest.fixture(params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Pool:
    """Each of them in turn."""
    return request.getfixturevalue(f"pool{request.param}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is compared with the workers, bit for bit, runs on one thread as they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
