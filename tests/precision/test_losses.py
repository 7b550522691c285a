"""Losses of 16-bit values, and those that a model computes itself: fp32, as if computed outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.optim import AdamW
from halfstep.precision.casting.op_table import OPS
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.step import Precision

LOW = [name for name, policy in POLICIES.items() if policy.param_dtype != torch.float32]


def numbers(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1


CHOSEN = torch.tensor([0, 2, 1, 0])


def test_every_loss_function_of_torch_is_known():
    named = {
        name for name in dir(F)
        if name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"
    }  # fmt: skip
    # that one is a product too, which the policy wants in 16 bits; torch's own names of two
    known = {*OPS["loss"].names.split()} - {"cross_entropy_loss", "nll_loss2d"}
    assert known == named - {"linear_cross_entropy"}


class Model(nn.Module):
    """It gives logits, and with labels the loss as well, as models of transformers do."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.seen = None

    def forward(self, x, labels=None):
        logits = self.head(torch.tanh(self.body(x)))
        if labels is None:
            return None, logits
        loss = nn.functional.cross_entropy(logits, labels)
        self.seen = loss.dtype
        return loss, logits


def prepared(policy, model):
    own = POLICIES[policy.partition(",")[0]].needs_own_optimizer
    kind = AdamW if own else torch.optim.AdamW
    return Precision(policy, model, kind(model.parameters(), lr=1e-2, eps=1e-4))


@pytest.mark.parametrize("policy", LOW)
def test_a_loss_inside_is_bit_for_bit_the_loss_outside(policy):
    x = numbers(4, 6)
    steps = []
    for inside in (True, False):
        model = Model()
        precision = prepared(policy, model)
        with precision.autocast():
            loss, logits = model(x, CHOSEN) if inside else model(x)
            if not inside:
                loss = F.cross_entropy(logits, CHOSEN)
        assert not inside or model.seen == torch.float32
        result = precision.step(loss)
        assert result.applied
        steps.append((result, [v.clone() for _, v in precision.masters.items()]))
    (first, weights), (second, others) = steps
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_the_loss_scale_is_not_rounded_to_fp16():
    # the loss's own gradient is the scale: 2^20 is infinite in fp16, and that of the logits is not
    model = Model()
    precision = prepared("fp16-master,init_scale=1048576", model)
    with precision.autocast():
        loss, _ = model(numbers(4, 6), CHOSEN)
    precision.backward(loss * 2.0**-8)
    assert precision.step().applied
