"""Two and four processes that all tests of a session share; what needs four runs nightly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distributed.pool import Pool

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of four ranks slow: `make test` starts one pool, of two."""
    for item in items:
        if item.path.is_relative_to(HERE) and isinstance(item, pytest.Function):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if "pool4" in item.fixturenames or 4 in map(params.get, ("pool", "size", "ranks")):
                item.add_marker(pytest.mark.slow)


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
