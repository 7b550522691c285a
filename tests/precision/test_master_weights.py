"""fp32 masters: what 16-bit weights lose, masters keep."""

import math

import pytest
import torch
from torch import nn

from halfstep import Precision, PrecisionError
from halfstep.optim import SGD
from halfstep.precision.masters.masters import _follow_, _follow_all_
from reference.training import (
    MASTERS,
    batches,
    loss_of,
    mlp,
    scaled,
)


@pytest.mark.parametrize("scale", [1, 2**8])
@pytest.mark.parametrize("name", [*MASTERS, "bf16-split"])
def test_gradients_of_16_bit_weights_are_visible_and_fp32_as_soon_as_they_add_up(name, scale):
    model = mlp()
    make = SGD if name == "bf16-split" else torch.optim.SGD
    precision = Precision(scaled(name, init_scale=scale), model, make(model.parameters(), lr=0.1))
    x, y = batches(1)[0]
    # One bf16 gradient stays as autograd made it; an unscaled fp16 one needs fp32 at once.
    first = torch.float32 if name == "fp16-master" else torch.bfloat16
    for dtype in (first, torch.float32, torch.float32):
        loss = loss_of(model, precision, (x, y))
        precision.backward(loss)
        assert {p.grad.dtype for p in model.parameters()} == {dtype}
        masters = zip(precision.named_parameters().values(), model.parameters(), strict=True)
        assert all(master is p or master.grad is None for master, p in masters)


@pytest.mark.parametrize("name", MASTERS)
def test_sparse_gradients_reach_the_masters(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True))
    before = model[0].weight.detach().clone()
    precision = Precision(scaled(name), model, torch.optim.SGD(model.parameters(), lr=0.5))
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns of whoever has not chosen
        for _ in range(2):
            with precision.autocast():
                loss = model(torch.tensor([1, 1, 4])).sum()
            precision.backward(loss)
        result = precision.step()
    # rows 1 and 4: gradients 2 x 2 and 2 x 1 for each of 3 columns; the norm is one fp32 root
    assert result.grad_norm == pytest.approx(math.sqrt(3 * 16 + 3 * 4), rel=2**-22, abs=0)
    expected = before - 0.5 * torch.tensor([0.0, 4, 0, 0, 2, 0])[:, None]
    assert torch.equal(precision.named_parameters()["0.weight"], expected)


@pytest.mark.parametrize("last", [True, False])
def test_of_several_optimizers_one_made_for_another_policy_is_refused_and_none_changed(last):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fits = SGD(model[0].parameters(), lr=0.1)
    other = SGD(model[1].parameters(), lr=0.1, update="kahan")
    pair = [fits, other] if last else [other, fits]
    with pytest.raises(PrecisionError, match="made with update='kahan', the policy says 'split'"):
        Precision("bf16-split", model, pair)
    assert fits.storage["update"] is None
    assert next(model.parameters()).dtype == torch.float32


def test_masters_follow_their_weights_together_as_each_would_alone():
    torch.manual_seed(0)
    shapes = (3, 5), (7,), (0, 2), (4, 3, 2, 2), ()
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    weights[3] = weights[3].to(memory_format=torch.channels_last)
    masters = [w.float() + 1e-5 for w in weights]
    for weight, value in ((weights[0][1], 0.0), (weights[1][2], math.nan), (weights[3][0], 2.0)):
        weight.fill_(value)
    alone = [m.clone() for m in masters]
    for master, weight in zip(alone, weights, strict=True):
        _follow_(master, weight)
    _follow_all_(masters, weights)
    for a, b in zip(masters, alone, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert alone[0][1].eq(0).all()
    assert masters[0][0].ne(weights[0][0]).all()  # what nobody wrote keeps its lost bits
