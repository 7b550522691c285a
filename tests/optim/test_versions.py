"""Autograd's in-place guard notices a step of every kernel, as it notices torch's optimizers."""

import pytest
import torch
from torch import nn

from halfstep.optim.optimizers import SGD, AdamW, Lion

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
