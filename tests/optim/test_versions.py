"""Autograd's in-place guard notices a step of every kernel, as it notices torch's optimizers."""

import pytest
import torch
from torch import nn

from halfstep.optim.optimizers import SGD, AdamW, Lion
from halfstep.precision.masters.rounding import ROUNDING

MAKERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw, 8 bits": lambda p: AdamW(p, lr=0.1, moments="8bit"),
    "sgd": lambda p: SGD(p, lr=0.1),
    "lion": lambda p: Lion(p, lr=0.1, moments="bf16"),
}


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_between_a_forward_and_its_backward_is_an_error(name):
    """The classic mistake with two losses: the second backward needs the weights of before."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = MAKERS[name]([*first.parameters(), *second.parameters()])
    hidden = first(torch.ones(2, 3))
    loss, other = second(hidden).sum(), second(hidden * 2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("update", ROUNDING)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_every_tensor_that_a_step_writes_counts_it(update, moments):
    weight = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    still = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = AdamW([weight, still], update=update, moments=moments)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    written = [weight, *(v for k, v in optimizer.state[weight].items() if k != "step")]
    assert len(written) == 3 + 2 * (moments == "8bit") + (ROUNDING[update].bytes > 0)
    before = [tensor._version for tensor in written]
    unwritten = still._version, weight.grad._version
    optimizer.step()
    assert all(t._version > b for t, b in zip(written, before, strict=True))
    assert (still._version, weight.grad._version) == unwritten
