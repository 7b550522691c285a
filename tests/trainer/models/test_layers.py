"""The fp32 islands of the layers, against fp64 oracles, where torch's own layers lose digits."""

from __future__ import annotations

import pytest
import torch

from halfstep.trainer.models.gpt import Embedding, LayerNorm

HALVES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NEEDS AN NVIDIA GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def layer_norm_oracle(x, weight, bias, upstream, eps=1e-5):
    """LayerNorm and its three gradients in fp64, written from the definition."""
    x, weight, bias, g = (t.detach().cpu().double() for t in (x, weight, bias, upstream))
    std = torch.sqrt(((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True) + eps)
    normed = (x - x.mean(-1, keepdim=True)) / std
    gw = g * weight
    dx = gw - gw.mean(-1, keepdim=True) - normed * (gw * normed).mean(-1, keepdim=True)
    rows = tuple(range(x.ndim - 1))
    return normed * weight + bias, dx / std, (g * normed).sum(rows), g.sum(rows)


def norm_problem(dtype, device, *, mean, rows=64, width=96):
    g = torch.Generator().manual_seed(0)
    norm = LayerNorm(width)
    with torch.no_grad():
        norm.weight += 0.3 * torch.randn(width, generator=g)
        norm.bias += 0.3 * torch.randn(width, generator=g)
    x = (mean + torch.randn(rows, width, generator=g)).to(device, dtype).requires_grad_()
    upstream = (torch.randn(rows, width, generator=g) + 0.5).to(device, dtype)
    return norm.to(device, dtype), x, upstream


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 60.0])
def test_layer_norm_statistics_and_gradients_are_fp32(dtype, device, mean):
    # A mean of 60 in bf16 leaves steps of 1/4 in x; the oracle sees the same steps, so only what
    # the layer itself loses is left. Statistics in bf16 would be wrong by 60 * 2^-8 deviations.
    norm, x, upstream = norm_problem(dtype, device, mean=mean)
    y = norm(x)
    y.backward(upstream)
    want = layer_norm_oracle(x, norm.weight, norm.bias, upstream)
    got = (y, x.grad, norm.weight.grad, norm.bias.grad)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        # One rounding of the result, of at most a unit, twice for values just above a power of 2;
        # a cancelled entry of dx is as wrong as its largest term, which is near 4 here. fp32 itself
        # loses 60 * 2^-24 in x - mean, far below.
        bound = 2 * UNIT[dtype] * b.abs() + UNIT[dtype] * 0.02 + 1e-4
        assert ((a.detach().cpu().double() - b).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_layer_norm_gradients_of_many_rows_do_not_stop_growing(dtype, device):
    norm, x, upstream = norm_problem(dtype, device, mean=0.0, rows=20000, width=8)
    norm(x).backward(upstream)
    _, _, d_weight, d_bias = layer_norm_oracle(x, norm.weight, norm.bias, upstream)
    for grad, true in ((norm.weight.grad, d_weight), (norm.bias.grad, d_bias)):
        # One rounding of a sum that fp32 accumulates over 20000 terms (2e4 * 2^-24 = 0.1 %, worst
        # case, of the magnitudes, which are about the sum for the bias and 150 for the weight).
        bound = UNIT[dtype] * true.abs() + 1e-3 * true.abs() + 2.0
        assert ((grad.cpu().double() - true).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_layer_norm_answers_in_the_dtype_of_its_input(dtype, device):
    norm, x, _ = norm_problem(dtype, device, mean=1.0)
    for wide_parameters in (False, True):
        outside = (norm.float() if wide_parameters else norm)(x)
        for autocast in HALVES:
            with torch.autocast(device, autocast):
                inside = norm(x)
            assert inside.dtype == dtype
            assert torch.equal(inside, outside)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_embedding_sums_the_gradients_of_equal_tokens_in_fp32(dtype, device):
    tokens = torch.randint(0, 3, (30000,), generator=torch.Generator().manual_seed(1)).to(device)
    table = Embedding(4, 2).to(device, dtype)
    out = table(tokens)
    assert out.dtype == dtype
    assert torch.equal(out, table.weight[tokens])
    out.backward(torch.ones_like(out))
    true = torch.bincount(tokens.cpu(), minlength=4).double()
    assert (true[:3] > 9000).all()
    # One rounding of an integer sum that fp32 holds exactly.
    assert torch.equal(table.weight.grad[:, 0].cpu(), true.to(dtype))
