"""Bytes per parameter that are really allocated, between micro-batches and during a step."""

import pytest
import torch
from torch import nn

from halfstep.optim.optimizers import SGD, AdamW, Lion

SHAPES = [(1024, 256), (512, 16, 4, 4), (128 * 1000,)]  # each a whole number of blocks of 128
COUNT = 1024 * 256 + 512 * 256 + 128000
# Weight 2, gradient 2, remainder, first moment, second moment; a top is 1 byte in 128.
CASES = [
    (AdamW, "split", "8bit", 8 + 2 / 128),
    (AdamW, "split", "bf16", 10),
    (AdamW, "split", "fp32", 14),
    (AdamW, "split24", "8bit", 7 + 2 / 128),
    (AdamW, "kahan", "8bit", 8 + 2 / 128),
    (AdamW, "stochastic", "8bit", 6 + 2 / 128),
    (AdamW, "nearest", "fp32", 12),
    (SGD, "split", "8bit", 7 + 1 / 128),
    (Lion, "split24", "8bit", 6 + 1 / 128),
]


def made(cls, update, moments):
    """Parameters, one of them channels_last, with gradients, and their optimizer."""
    weights = []
    for shape in SHAPES:
        value = torch.randn(shape).to(torch.bfloat16)
        if len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        weights.append(nn.Parameter(value))
    for p in weights:
        p.grad = torch.ones_like(p)
    return weights, cls(weights, update=update, moments=moments)


def storages(weights, optimizer) -> int:
    """Bytes of all storages of weights, gradients and state, each counted once."""
    tensors = [*weights, *(p.grad for p in weights)]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert len(found) == len(tensors)
    return sum(found.values())


@pytest.mark.parametrize(("cls", "update", "moments", "wanted"), CASES)
def test_bytes_per_parameter(cls, update, moments, wanted):
    weights, optimizer = made(cls, update, moments)
    optimizer.step()
    steps = 8 * len(weights)  # the step counters: one fp64 number a tensor
    assert storages(weights, optimizer) == wanted * COUNT + steps
    optimizer.step()
    optimizer.step()
    assert storages(weights, optimizer) == wanted * COUNT + steps
    optimizer.load_state_dict(optimizer.state_dict())
    assert storages(weights, optimizer) == wanted * COUNT + steps
