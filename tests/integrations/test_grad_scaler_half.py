"""16-bit weights under halfstep.GradScaler, and what it says when no gradient came."""

import pytest
import torch
from torch import nn

from halfstep import GradScaler, PrecisionError
from halfstep.optim import AdamW


def bf16(optim, **options):
    """``optim`` is told as what it adds to torch's AdamW, or as halfstep's."""
    model = nn.Linear(4, 2).bfloat16()
    kind = AdamW if "update" in optim else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-5, **optim)
    scaler = GradScaler("cpu", init_scale=4.0, names=model.named_parameters(), **options)
    scaler.scale(model(torch.ones(1, 4).bfloat16()).float().sum()).backward()
    return model, optimizer, scaler


@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.parametrize("optim", [{}, {"fused": True}])
def test_strict_refuses_pure_bf16_before_anything_is_changed(optim, call):
    model, optimizer, scaler = bf16(optim, strict=True)
    weight, gradient = model.weight.detach().clone(), model.weight.grad.clone()
    with pytest.raises(
        PrecisionError,
        match=r"2 of 2 tensors of AdamW are trained in bf16.*weight, bias.*\(20 bytes",
    ):
        getattr(scaler, call)(optimizer)
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.weight.grad, gradient)
