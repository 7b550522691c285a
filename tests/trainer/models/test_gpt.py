"""GPT: its mathematics, its four precision settings, and what it promises to distribution."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.models.gpt import GPT, GPTConfig

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=24, vocab_size=19)


def batch(config=SMALL, b=3, t=24, seed=0, ignored=0.2):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (b, t), generator=g)
    targets = torch.randint(0, config.vocab_size, (b, t), generator=g)
    targets[torch.rand(b, t, generator=g) < ignored] = -100
    return tokens, targets


# --- construction --------------------------------------------------------------------------------


def test_heads_divide_the_width():
    with pytest.raises(ConfigError, match=r"model\.n_head, got 32 and 5"):
        dataclasses.replace(SMALL, n_head=5)


def test_weights_follow_the_seed_and_leave_the_global_state_alone():
    before = torch.random.get_rng_state()
    a, b, c = GPT(SMALL, seed=1), GPT(SMALL, seed=1), GPT(SMALL, seed=2)
    assert torch.equal(before, torch.random.get_rng_state())
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not torch.equal(a.wte.weight, c.wte.weight)
    torch.manual_seed(99)
    assert torch.equal(GPT(SMALL, seed=1).wte.weight, a.wte.weight)


def test_initial_weights_have_gpt2s_spread():
    config = GPTConfig(n_layer=8, n_head=4, n_embd=128, block_size=64, vocab_size=300)
    for name, p in GPT(config, seed=3).named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(16) if residual else 0.02
            # The standard error of a standard deviation is 1/sqrt(2 n); five of them.
            assert abs(p.std().item() / std - 1) < 5 / math.sqrt(2 * p.numel()), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name


# --- the function --------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["fp32", "bf16 autocast", "bf16"])
def test_loss_sum_is_the_cross_entropy_of_the_logits(setting):
    model = GPT(SMALL, seed=1)
    if setting == "bf16":
        model.bfloat16()
    tokens, targets = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "bf16 autocast"):
        logits = model(tokens)
        total, count = model.loss_sum((tokens, targets))
    want = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    assert count.item() == (targets != -100).sum().item()
    # The same logits; fp32 softmax and sum over 72 tokens: a few fp32 units of the sum.
    assert total.item() == pytest.approx(want.item(), rel=1e-6)


def test_a_sequence_longer_than_the_model_is_refused():
    with pytest.raises(DataError, match="25 tokens, but the model has 24 positions"):
        GPT(SMALL, seed=1)(torch.zeros(1, 25, dtype=torch.int64))


# --- the four settings ---------------------------------------------------------------------------

SETTINGS = {
    "fp32": (torch.float32, None, torch.float32, 2.0**-24 * 64),
    "bf16 autocast": (torch.float32, torch.bfloat16, torch.float32, 2.0**-8 * 4),
    "fp16 autocast": (torch.float32, torch.float16, torch.float32, 2.0**-11 * 4),
    "bf16": (torch.bfloat16, None, torch.bfloat16, 2.0**-8 * 4),
    "fp16": (torch.float16, None, torch.float16, 2.0**-11 * 4),
}
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NEEDS AN NVIDIA GPU"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_has_its_dtypes_and_every_gradient_its_digits(setting, device):
    # Few kinds of tokens and 2048 of them: sums over equal tokens, positions and rows are long, so
    # a gradient that is summed in 16 bits anywhere shows (torch's own layers are off by 90 % here).
    params, autocast, stream, bound = SETTINGS[setting]
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=128, vocab_size=5)
    start = GPT(config, seed=1).bfloat16().half()  # weights that every dtype holds exactly
    oracle = copy.deepcopy(start).double()
    pair = batch(config, b=16, t=128)
    oracle.loss_sum(pair)[0].backward()

    model = copy.deepcopy(start).to(device, params)
    tokens, targets = (t.to(device) for t in pair)
    with torch.autocast(device, autocast, enabled=autocast is not None):
        hidden = model.hidden(tokens)
        logits = model(tokens)
        total, _ = model.loss_sum((tokens, targets))
    total.backward()
    assert hidden.dtype == stream
    assert (logits.dtype, total.dtype) == (torch.float32, torch.float32)
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert p.grad.dtype == p.dtype == params
        # Relative error in the 2-norm: some ten independent roundings on each path from weight to
        # loss and back, of a third of a unit each in the mean, sqrt(10) / 3 = 1 unit; four for
        # gradients that cancel. fp32 accumulates over 2048 tokens besides: sqrt(2048) = 45 units.
        error = (p.grad.cpu().double() - q.grad).norm() / q.grad.norm()
        assert error <= bound, name
