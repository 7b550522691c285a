"""Autocast is seen and switched off where the models say so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from halfstep import Precision
from halfstep.optim import AdamW
from halfstep.precision.loss_head import matmul_dtype
from halfstep.trainer.models.gpt import GPT, GPTConfig


def test_matmul_dtype_is_autocasts_or_the_wider_operand():
    f32, bf16, f16, f64 = (
        torch.zeros(1, dtype=d)
        for d in (torch.float32, torch.bfloat16, torch.float16, torch.double)
    )
    assert matmul_dtype(bf16, bf16) == torch.bfloat16
    assert matmul_dtype(bf16, f32) == torch.float32
    assert matmul_dtype(f16, bf16) == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert matmul_dtype(f32, f32) == torch.float16
        assert matmul_dtype(bf16, bf16) == torch.float16
        assert matmul_dtype(f64, f32) == torch.float64
        # On another device this autocast does not count.
        assert matmul_dtype(f32.to("meta"), f32.to("meta")) == torch.float32


# torch warns of what torch.compile itself does as it traces an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("torch_alone")  # a compiled model runs by no kernel of ours
@pytest.mark.parametrize("policy", ["", "bf16-mixed", "bf16-split", "bf16-pure"])
def test_a_compiled_gpt_is_one_graph_with_the_same_bits(policy, monkeypatch):
    """In torch 2.11, too, which cannot trace the question whether a device has an autocast.

    Without a policy, torch's own autocast stands around it.
    """
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: True)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=32)
    model = GPT(config, seed=0)
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    pair = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    torch._dynamo.reset()
    context = torch.autocast("cpu", torch.bfloat16)
    if policy:
        context = Precision(policy, model, AdamW(model.parameters())).autocast()
    # aot_eager runs the traced operators one by one: the same kernels
    compiled = torch.compile(model.loss_sum, fullgraph=True, backend="aot_eager")
    with context:
        found, wanted = compiled(pair), model.loss_sum(pair)
    torch._dynamo.reset()
    assert torch.equal(found[0], wanted[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_records_torchs_operators_and_no_kernel_of_ours():
    """A kernel would leave what it wrote as a constant, and a warning at each of its checks."""
    model = nn.Sequential(
        nn.Embedding(9, 64), nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
    ).eval()
    Precision("bf16-pure", model, AdamW(model.parameters()))
    one, other = torch.randint(9, (2, 4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        traced = torch.jit.trace(model, one)
        found, wanted = traced(other), model(other)
    assert not [w for w in told if "/halfstep/kernels/" in w.filename]
    # bf16: one rounding of values near 1 in another place
    torch.testing.assert_close(found, wanted, rtol=0, atol=2**-5)
