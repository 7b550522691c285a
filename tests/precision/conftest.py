"""Tensors here have a few dozen elements: a second thread only waits for its turn."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function runs by a compiled kernel: what is compared bit by bit is torch's own."""
    monkeypatch.setattr("halfstep.precision.casting.native_ops.may_run", lambda: False)
