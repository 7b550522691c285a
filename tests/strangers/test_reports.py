"""What was reported of other stacks trains here under every policy as in fp32."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

import halfstep
from every import every
from strangers.loops import POLICIES as SPELLED
from strangers.reports import REPORTS, ROWS, D, Parts
from strangers.test_idioms import QUICK

STEPS = 4


@cache
def losses_of(name: str, policy: str) -> list[float]:
    torch.manual_seed(0)
    model = Parts(**REPORTS[name].parts)
    own = halfstep.parse_policy(policy).needs_own_optimizer
    sgd = halfstep.optim.SGD if own else torch.optim.SGD
    precision = halfstep.Precision(policy, model, sgd(model.parameters(), lr=0.05))
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(ROWS, D, generator=generator) for _ in range(2))
        torch.manual_seed(step)
        with precision.autocast():
            loss = REPORTS[name].loss(model, x, y)
        assert loss.dtype == torch.float32
        result = precision.step(loss)
        assert result.applied
        losses.append(result.loss)
    return losses


def require_equal(name: str, policy: str) -> None:
    exact, found = losses_of(name, "fp32"), losses_of(name, policy)
    # A result goes through some 16 roundings one after another, each of at most u = 2^-9 (bf16) or
    # 2^-12 (fp16) of it, forward and backward in each of 4 steps: 16 * 2 * 4 u.
    unit = torch.finfo(halfstep.parse_policy(policy).compute_dtype).eps / 2
    for wanted, got in zip(exact, found, strict=True):
        assert abs(got - wanted) <= 128 * unit * max(1.0, abs(wanted)), (exact, found)


pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def test_reports():
    """Layers and derivatives; a sweep of torch's functions and the night have the others."""
    every(itertools.product([*REPORTS][-10:], QUICK[1:3]), require_equal)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch\'s, of its own tensors
@pytest.mark.slow
def test_reports_under_the_other_policies():
    every(itertools.product(REPORTS, SPELLED), require_equal)
