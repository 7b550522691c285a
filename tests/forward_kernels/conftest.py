"""The kernels need a compiler; without one there is nothing here to test."""

import pytest

from halfstep.kernels.library import loaded


@pytest.fixture(autouse=True, scope="session")
def kernels():
    found = loaded()
    if isinstance(found, str):
        pytest.skip(f"no compiled kernels: {found}")
