"""Kernels to run tests with."""

import pytest

from halfstep.optim import base
from halfstep.optim.kernels.cpu import NativeKernel, native_kernel


@pytest.fixture(params=["the kernel of this machine", "torch operations"])
def each_kernel(request, monkeypatch):
    """The test runs twice: compiled where that is possible, and in torch operations."""
    if request.param == "torch operations":
        monkeypatch.setattr(base, "native_kernel", lambda: "the test asks for torch")


@pytest.fixture(scope="session")
def kernel() -> NativeKernel:
    found = native_kernel()
    if isinstance(found, str):
        pytest.skip(f"no compiled kernel here: {found}")
    return found
