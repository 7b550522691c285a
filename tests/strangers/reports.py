"""Situations of public bug reports of mixed-precision training, each as a small forward of ours.

A function gets the modules that its decorator names, and a batch, and returns a loss; it knows
nothing of halfstep. The first argument of the decorator is where the situation was reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import checkpoint as recompute

D, ROWS = 8, 6
Loss = Callable[[Any, Tensor, Tensor], Tensor]
TOKENS = torch.arange(ROWS * 4).view(ROWS, 4) % 5


class Parts(nn.Module):
    """A model that is called part by part."""

    def __init__(self, **parts: Callable[[], nn.Module]) -> None:
        super().__init__()
        for name, make in parts.items():
            setattr(self, name, make())


@dataclass(frozen=True)
class Report:
    source: str
    parts: dict[str, Callable[[], nn.Module]]
    loss: Loss


REPORTS: dict[str, Report] = {}


def linear(outputs: int = D, inputs: int = D) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs)


def report(source: str, **parts: Callable[[], nn.Module]) -> Callable[[Loss], Loss]:
    def register(loss: Loss) -> Loss:
        REPORTS[loss.__name__] = Report(source, {"a": linear(), "b": linear(), **parts}, loss)
        return loss

    return register


# --- products -------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """A product whose backward multiplies what it saved, without ``custom_fwd``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return torch.einsum("bo,oi->bi", grad, w), torch.einsum("bo,bi->oi", grad, x)


@report("NVlabs/pacnet#27, #24: einsum in a Function's backward, Half but found Float")
def own_function(m, x, y):
    return F.mse_loss(Scaled.apply(m.a(x), m.b.weight), y)


@report("pytorch/pytorch#42996: an LSTM cell by hand, its states made in fp32", c=linear(4 * D))
def cell_by_hand(m, x, y):
    h = c = torch.zeros(ROWS, D)
    for _ in range(2):
        i, f, g, o = (torch.mm(x, m.c.weight.t()) + m.b(h).repeat(1, 4)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return F.mse_loss(h, y)


@report("shawntan/scattermoe#17, pytorch/torchtitan#2225", gate=linear(3))
def experts(m, x, y):
    weights, chosen = m.gate(x).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for number, expert in enumerate((m.a, m.b)):
        row, rank = torch.where(chosen == number)
        out.index_add_(0, row, (expert(x[row]) * weights[row, rank, None]).to(out.dtype))
    balance = F.one_hot(chosen, 3).float().mean((0, 1)) @ weights.float().sum(0).repeat(2)[:3]
    return F.mse_loss(out, y) + 0.1 * balance


# --- losses and functions -------------------------------------------------------------------------


@report("pytorch/pytorch#133085, huggingface/transformers#5651: squares beyond fp16", g=linear())
def norms_of_large_numbers(m, x, y):
    h = 300 * m.a(x)
    wide = h.float()
    by_hand = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
    return F.mse_loss(by_hand + F.rms_norm(h, (D,)) + F.layer_norm(300 * m.b(x), (D,)), y)


@report("pytorch/pytorch#29210: distributions inside of the context", c=linear(3), s=linear())
def heads_of_distributions(m, x, y):
    of = torch.distributions
    torch.manual_seed(int(x.sum() * 100))
    actions = of.Categorical(logits=m.c(x))
    normal = of.Normal(m.a(x), F.softplus(m.s(x)) + 0.1)
    squashed = of.TransformedDistribution(normal, [of.TanhTransform(cache_size=1)])
    near = of.kl_divergence(normal, of.Normal(torch.zeros(D), torch.ones(D))).mean()
    certain = squashed.log_prob(torch.tanh(0.1 * y)).mean()
    return actions.log_prob(torch.arange(ROWS) % 3).mean() + near - 0.1 * certain


@report("jingyaogong/minimind#812, huggingface/trl#454: the ratio of the first update is 1")
def ratio_of_the_first_update(m, x, y):
    with torch.no_grad():
        before = m.a(x).log_softmax(-1)
    ratio = (m.a(x).log_softmax(-1) - before).exp()
    assert (ratio - 1).abs().max() < 1e-3
    return -(ratio * y.softmax(-1)).sum(-1).mean() + 0.1 * m.a(x).square().mean()


# --- layers ---------------------------------------------------------------------------------------


@report("EleutherAI/gpt-neox#1305, #1003; KellerJordan/modded-nanogpt#39", qkv=linear(3 * D))
def rotary_tables(m, x, y):
    angle = torch.outer(1000 + torch.arange(4.0), 1.0 / 100.0 ** (torch.arange(0, D, 2) / D))
    turn, bias = torch.polar(torch.ones_like(angle), angle), -torch.arange(4.0).expand(4, 4)
    q, k, v = m.qkv(x)[:, None].expand(-1, 4, -1).chunk(3, -1)
    half = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    q = q * angle.cos().repeat_interleave(2, -1) + half * angle.sin().repeat_interleave(2, -1)
    k = torch.view_as_real(torch.view_as_complex(k.float().unflatten(-1, (-1, 2))) * turn)
    mask = bias.masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(torch.float).min)
    out = F.scaled_dot_product_attention(q, k.flatten(-2), v, attn_mask=mask)
    return F.mse_loss(out.mean(1), y)


@report(
    "pytorch/pytorch#45048",
    lstm=lambda: nn.LSTM(D, D, batch_first=True, proj_size=4),
    gru=lambda: nn.GRU(4, D, batch_first=True),
    rnn=lambda: nn.RNN(D, D, batch_first=True),
    cell=lambda: nn.GRUCell(D, D),
)
def recurrent_states_of_the_user(m, x, y):
    rows = x[:, None] * torch.linspace(0.5, 1.0, 3)[:, None]
    h, _ = m.lstm(rows, (torch.zeros(1, ROWS, 4), torch.zeros(1, ROWS, D)))
    packed = pack_padded_sequence(h.float(), torch.full((ROWS,), 3), batch_first=True)
    h, _ = m.rnn(pad_packed_sequence(m.gru(packed)[0], batch_first=True)[0] + rows)
    return F.mse_loss(m.cell(h[:, -1] + x, torch.zeros(ROWS, D)), y)


@report(
    "pytorch/pytorch#132613, #107663, #82783: the fast path of encoders",
    t=lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True),
    att=lambda: nn.MultiheadAttention(D, 2, batch_first=True),
)
def encoder_in_eval(m, x, y):
    rows, pad = x[:, None].expand(-1, 3, -1), torch.tensor([[False, False, True]]).expand(ROWS, -1)
    m.t.eval()
    with torch.no_grad():
        target = m.t(rows, src_key_padding_mask=pad)[:, 0]
    m.t.train()
    seen, weights = m.att(rows, rows, rows, key_padding_mask=pad, need_weights=True)
    return F.mse_loss(m.t(rows)[:, 0] + seen[:, 0], y + target.float()) + weights.square().mean()


@report(
    "pytorch/pytorch#125544, NVIDIA/apex#181",
    s=lambda: parametrizations.spectral_norm(nn.Linear(D, D), n_power_iterations=9),
    w=lambda: parametrizations.weight_norm(nn.Linear(D, D)),
    o=lambda: parametrizations.orthogonal(nn.Linear(D, D)),
)
def parametrized_weights(m, x, y):
    return F.mse_loss(m.s(x) + m.w(x) + m.o(x), y)


# --- derivatives and recomputation ----------------------------------------------------------------


@report("pytorch/pytorch#184890: a Jacobian by vmap", n=lambda: nn.LayerNorm(D))
def jacobian_by_vmap(m, x, y):
    x = x.clone().requires_grad_()
    out = m.n(m.a(x))
    rows = torch.eye(D).to(out.dtype)[:, None].expand(-1, ROWS, -1)
    (jacobian,) = torch.autograd.grad(out, x, rows, is_grads_batched=True, retain_graph=True)
    return (
        F.mse_loss(out, y, reduction="none") * jacobian.detach().abs().mean((0, 2))[:, None]
    ).mean()


@report("NVIDIA/physicsnemo-sym#160, Lightning-AI/pytorch-lightning#12600", u=linear(1))
def second_derivatives(m, x, y):
    x = x.clone().requires_grad_()
    u = m.u(torch.tanh(m.a(x)))
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return F.mse_loss(curve[:, 0] + slope[:, 1], y[:, 0]) + u.square().mean()


@report("pytorch/pytorch#141896, allenai/OLMo-core#828", n=lambda: nn.LayerNorm(D))
def selective_recomputation(m, x, y):
    x = x.clone().requires_grad_()

    def kept(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        policy = recompute.CheckpointPolicy
        return policy.MUST_SAVE if op == torch.ops.aten.addmm.default else policy.PREFER_RECOMPUTE

    def part(x: Tensor) -> Tensor:
        return m.n(m.b(F.dropout(torch.tanh(m.a(x + torch.ones(D))), 0.1)) + torch.ones(D))

    def contexts() -> Any:
        return recompute.create_selective_checkpoint_contexts(kept)

    some = recompute.checkpoint(part, x, use_reentrant=False, context_fn=contexts)
    return F.mse_loss(some + recompute.checkpoint(part, x, use_reentrant=True), y)


@report("pytorch/pytorch#58228, NVIDIA/physicsnemo#1737: complex weights as pairs", w=linear(2))
def fourier_operator(m, x, y):
    weights = torch.view_as_complex(m.w.weight.float().view(D, 2))[: D // 2 + 1]
    return F.mse_loss(torch.fft.irfft(torch.fft.rfft(m.a(x).float()) * weights, D), y)


@report("pytorch/pytorch#177199, #153044: an inner region in fp32")
def region_in_fp32(m, x, y):
    h = m.a(x)
    with torch.autocast("cpu", enabled=False):
        h = F.linear(h.float() * 300, m.b.weight.float() * 300)
    return F.mse_loss(h / 90000, y)
