"""Autocast is seen and switched off where the models say so."""

from __future__ import annotations

import pytest
import torch

from halfstep import Precision
from halfstep.optim import AdamW
from halfstep.trainer.models.cross_entropy import autocast_off, matmul_dtype
from halfstep.trainer.models.gpt import GPT, GPTConfig


def test_autocast_is_off_inside_and_on_again_after():
    with torch.autocast("cpu", torch.bfloat16):
        with autocast_off("cpu"):
            assert not torch.is_autocast_enabled("cpu")
        with autocast_off("meta"):  # which has no autocast
            assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


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
