"""Shared by the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def known_rate() -> Iterator[None]:
    """Runs here do not time products of large matrices, which takes longer than their steps.

    test_environment.py holds the measurement.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfstep.trainer.loop.gemm_flops_per_second", lambda *_: 1e9)
        yield
