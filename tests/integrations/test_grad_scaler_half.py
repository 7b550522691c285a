"""16-bit weights under halfstep.GradScaler, and what it says when no gradient came."""

import pytest
import torch
from torch import nn

from halfstep import GradScaler, PrecisionError
from halfstep.optim import AdamW


def half(names=None, named=False, **options):
    model = nn.Linear(4, 2).half()
    optimizer = torch.optim.SGD(model.named_parameters() if named else model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, names=names and dict(model.named_parameters()))
    scaler.scale(model(torch.ones(1, 4).half()).float().sum()).backward()
    return model, optimizer, scaler


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"names": True}, "fp16: weight, bias."),
        ({"named": True}, "fp16: weight, bias."),
        ({}, r"fp16: group 0, tensor 0 of shape \(2, 4\), group 0, tensor 1 of shape \(2,\)."),
    ],
)
@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.covering
def test_fp16_gradients_are_refused_by_name_before_anything_changes(options, text, call):
    model, optimizer, scaler = half(**options)
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    # 10 numbers, 2 bytes more each
    with pytest.raises(PrecisionError, match=f"{text}.* costs 20 bytes more.*fp16-master"):
        getattr(scaler, call)(optimizer)
    for p, (weight, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(p.grad, gradient)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        getattr(scaler, call)(optimizer)


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
