"""Losses of 16-bit values, and those that a model computes itself: fp32, as if computed outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.optim import AdamW
from halfstep.precision.casting.op_casts import StoredCasts
from halfstep.precision.casting.op_table import MIXED
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.step import Precision

LOW = [name for name, policy in POLICIES.items() if policy.param_dtype != torch.float32]
DTYPES = [torch.bfloat16, torch.float16]


def numbers(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1


P, Q, R = numbers(4, 3), numbers(4, 3, seed=1), numbers(4, 3, seed=2)
SIGNS, CHOSEN = torch.tensor([1, -1, 1, -1]), torch.tensor([0, 2, 1, 0])
CALLS = {
    F.binary_cross_entropy: (P, Q),
    F.binary_cross_entropy_with_logits: (P, Q),
    F.cosine_embedding_loss: (P, Q, SIGNS),
    F.cross_entropy: (P, CHOSEN),
    F.ctc_loss: (
        numbers(5, 2, 4).log_softmax(-1), torch.ones(2, 2, dtype=torch.int64),
        torch.tensor([5, 5]), torch.tensor([2, 1]),
    ),
    F.gaussian_nll_loss: (P, Q, R),
    F.hinge_embedding_loss: (P, SIGNS[:, None].expand(4, 3)),
    F.huber_loss: (P, Q),
    F.kl_div: (P.log(), Q),
    F.l1_loss: (P, Q),
    F.margin_ranking_loss: (P[:, 0], Q[:, 0], SIGNS),
    F.mse_loss: (P, Q),
    F.multi_margin_loss: (P, CHOSEN),
    F.multilabel_margin_loss: (P, torch.tensor([[0, 1, -1]] * 4)),
    F.multilabel_soft_margin_loss: (P, Q),
    F.nll_loss: (P.log(), CHOSEN),
    F.poisson_nll_loss: (P, Q),
    F.smooth_l1_loss: (P, Q),
    F.soft_margin_loss: (P, SIGNS[:, None].expand(4, 3)),
    F.triplet_margin_loss: (P, Q, R),
    F.triplet_margin_with_distance_loss: (P, Q, R),
}  # fmt: skip


def cast(values, dtype):
    return [v.to(dtype) if v.is_floating_point() else v for v in values]


def test_every_loss_function_of_torch_is_known():
    named = {
        name for name in dir(F)
        if name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"
    }  # fmt: skip
    # that one is a product too, which the policy wants in 16 bits
    assert {f.__name__ for f in CALLS} == named - {"linear_cross_entropy"}
    # torch's own names of two of them
    assert set(MIXED["loss"]) - {"cross_entropy_loss", "nll_loss2d"} == {f.__name__ for f in CALLS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", CALLS, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("torch_alone")
def test_a_loss_of_16_bit_values_is_the_fp32_loss_of_these_values(loss, dtype):
    args = cast(CALLS[loss], dtype)
    options = {"reduction": "batchmean"} if loss is F.kl_div else {}
    expected = loss(*cast(args, torch.float32), **options)
    with StoredCasts(torch.bfloat16):
        found = loss(*args, **options)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


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
