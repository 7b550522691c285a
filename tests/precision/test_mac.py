"""A Mac's GPU, on which fp32 alone is honoured; on patched devices."""

import pytest
import torch

import halfstep
from halfstep.precision.policy.policy import POLICIES

MPS = torch.device("mps")


@pytest.fixture
def mac(monkeypatch):
    """Pretend to have a Mac's GPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("mac")
def test_fp32_alone_is_native_and_what_auto_takes():
    for name in POLICIES:
        found = halfstep.support(name, MPS)
        assert (found.status, found.nearest) == (
            ("native", "") if name == "fp32" else ("refused", "fp32")
        )
    assert str(halfstep.parse_policy("auto", MPS)) == "fp32"
    assert halfstep.support("auto", MPS).status == "native"
