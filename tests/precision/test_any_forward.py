"""Ordinary forwards that mix formats train under every policy with 16-bit weights.

Each program makes or holds fp32 numbers, or calls something other than ``model(x)``, and knows
nothing of halfstep but the ``with``. It is trained beside the same program in fp32.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from halfstep import POLICIES, Precision, parse_policy
from halfstep.optim import AdamW

LOW = [name for name, policy in POLICIES.items() if policy.param_dtype != torch.float32]
D, STEPS = 8, 4


class Program(nn.Module):
    """What is trained: ``loss`` is the whole forward, however it calls the model."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)


class Rotary(Program):
    """Rotary tables of fp32, real and complex, and a bias of attention by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        angle = torch.outer(torch.arange(4.0), 1.0 / 100.0 ** (torch.arange(0, D, 2) / D))
        self.register_buffer("cos", angle.cos().repeat_interleave(2, -1))
        self.register_buffer("sin", angle.sin().repeat_interleave(2, -1))
        self.register_buffer("turn", torch.polar(torch.ones_like(angle), angle))
        self.register_buffer("bias", -(torch.arange(4.0)[:, None] - torch.arange(4.0)).abs())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, None].expand(-1, 4, -1)).chunk(3, -1)
        half = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
        q = q * self.cos + half * self.sin
        pairs = torch.view_as_complex(k.reshape(*k.shape[:-1], D // 2, 2))
        k = torch.view_as_real(pairs * self.turn).flatten(-2)
        mask = self.bias.masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(torch.float).min)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).mean(1))


class Recurrent(Program):
    """Layers and cells with states that the program makes, one packed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(D, D, batch_first=True), nn.GRU(D, D, batch_first=True)
        self.cell, self.rnn = nn.LSTMCell(D, D), nn.RNN(D, D, batch_first=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x[:, None] * torch.linspace(0.5, 1.0, 3)[:, None]
        zero = torch.zeros(1, len(x), D)
        h, _ = self.lstm(rows, (zero, zero))
        packed = pack_padded_sequence(h.float(), torch.full((len(x),), 3), batch_first=True)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        h, _ = self.rnn(h + rows)
        out, _ = self.cell(h[:, -1] + x, (zero[0], zero[0]))
        return F.mse_loss(out, y)


class Repeated(Program):
    """Activation checkpointing around a part that mixes formats; dropout replays its numbers."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.register_buffer("table", torch.randn(D))

    def part(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x + self.table) + self.table)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return F.mse_loss(self.head(h), y)


class RepeatedReentrant(Repeated):
    reentrant = True


PROGRAMS = [Rotary, Recurrent, Repeated, RepeatedReentrant]


@cache
def losses_of(policy: str, kind: type[Program], sgd: bool) -> list[float]:
    torch.manual_seed(0)
    program = kind()
    spelled = policy
    if POLICIES[policy].loss_scale.kind == "dynamic":
        spelled += ",init_scale=256"  # no skip in the few steps
    optimizer: torch.optim.Optimizer
    if sgd:
        optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    else:
        own = POLICIES[policy].needs_own_optimizer
        make = AdamW if own else torch.optim.AdamW
        optimizer = make(program.parameters(), lr=2e-2, eps=1e-4)
    precision = Precision(parse_policy(spelled), program, optimizer)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(6, D, generator=generator) for _ in range(2))
        torch.manual_seed(step)
        with precision.autocast():
            loss = program.loss(x, y)
        assert loss.dtype == torch.float32
        result = precision.step(loss)
        assert result.applied
        losses.append(result.loss)
    return losses


@pytest.mark.covering
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_it_trains_beside_fp32(kind, policy):
    sgd = policy == "fp16-pure"  # the squares of gradients in Adam's moments are 0 in fp16
    exact, found = losses_of("fp32", kind, sgd), losses_of(policy, kind, sgd)
    # A result goes through some 16 roundings one after another, each of at most u = 2^-9 (bf16) or
    # 2^-12 (fp16) of it, forward and backward in each of 4 steps: 16 * 2 * 4 u.
    unit = torch.finfo(POLICIES[policy].param_dtype).eps / 2
    for step, (wanted, got) in enumerate(zip(exact, found, strict=True)):
        assert abs(got - wanted) <= 128 * unit * max(1.0, abs(wanted)), (step, exact, found)
