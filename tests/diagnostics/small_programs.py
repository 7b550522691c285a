"""Small programs: some have a fault that reaches the loss or a gradient, others a harmless NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import hessian, jvp, linearize, vmap

INF, NAN = math.inf, math.nan
EXP = ("aten.exp", "overflow", "x.clamp(max=88.7)")
DATA = ("data not finite", "leave these rows out")
WEIGHT = ("aten._to_copy", "overflow in a cast", "shrink the weight")
MEANT = ("infinity of a mask", "mask by a finite number")
POLE = "log or division of zero"
NONE = ("", "", "")


@dataclass(frozen=True)
class Program:
    """A loss of a model and a batch, and what must be said of it; no operation: nothing."""

    name: str
    loss: Callable[[Any, Any], Tensor]
    batch: Any
    told: tuple[str, str, str] = NONE
    """Beginning of the operation's name, class, and words of the remedy."""
    samples: tuple[int, ...] = ()
    model: Callable[[], nn.Module] = lambda: nn.Linear(6, 6)
    module: str | None = None
    policy: str = ""
    """What the model trains in; "": as it is."""


def rows(at: dict[int, float] | None = None, *shape: int, fill: float | None = None) -> Tensor:
    """Eight rows of data; the first number of some is replaced."""
    size = (8, *(shape or (6,)))
    random = torch.randn(size, generator=torch.Generator().manual_seed(1))
    x = random if fill is None else torch.full(size, fill)
    for row, value in (at or {}).items():
        x[row].view(-1)[0] = value
    return x


def zero(row: int, *shape: int) -> Tensor:
    x = rows(None, *shape)
    x[row] = 0
    return x


def large(model: nn.Module, path: str, factor: float, *, one: bool = False) -> nn.Module:
    """Multiply a weight, or set its first number."""
    with torch.no_grad():
        weight = model.get_parameter(path)
        if one:
            weight.view(-1)[0] = factor
        else:
            weight.mul_(factor)
    return model


def six() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def no_bias() -> nn.Module:
    return nn.Linear(6, 6, bias=False)


def pooled(x: Tensor, keep: Tensor) -> Tensor:
    return (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)


def attend(q: Tensor, mask: Tensor | float = 0.0) -> Tensor:
    return ((q @ q.transpose(-1, -2) + mask).softmax(-1) @ q).float().mean()


def broken_norm() -> nn.Module:
    norm = nn.BatchNorm1d(6).eval()
    norm.running_mean[1] = NAN
    return norm


def garbage(x: Tensor) -> Tensor:
    """What torch.empty may return."""
    memory = torch.empty(x.shape)
    memory.view(torch.int32).fill_(0x7FC00000)
    return memory


def hidden(x: Tensor) -> Tensor:
    return x.masked_fill(torch.ones(6, 6).bool().triu(1), -INF)


def adam(model: Any, x: Tensor, **how: Any) -> Tensor:
    """A step inside the loss, with an eps that is 0 in fp16."""
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-7 if p.dtype == torch.float16 else 0)
    torch.optim.Adam(model.parameters(), **{"foreach": False, **how}).step()
    return model(x.to(model.weight.dtype)).float().mean()


def by_hand(model: Any, x: Tensor) -> Tensor:
    """A cast of data, in a function whose name says loss."""

    def compute_loss() -> Tensor:
        return model(x.half().float()).mean()

    return compute_loss()


def beside_missing(model: Any, x: Tensor) -> Tensor:
    """What is missing is imputed; the logarithm of a negative number stays."""
    scaled = ((x - 0.5) / 1.3).log1p()
    return model(torch.where(x.isnan(), 0, scaled)).mean()


def partly_masked(model: Any, x: Tensor) -> Tensor:
    return model((x * 2).masked_fill(x[:, 1:2].abs() > 50, 0)).mean()


def written(model: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 0], y[:, 1] = x[:, 0].log1p(), (x[:, 1] * 0 - 2).log1p()
    y[:, 1] = 0
    return model(y).mean()


def compiled(model: Any, x: Tensor) -> Tensor:
    return torch.compile(lambda x: model(x.exp()).mean(), backend="eager")(x)


def penalty(model: Any, x: Tensor) -> Tensor:
    """A gradient's norm, as in WGAN-GP, of a gradient that is 0."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((model(x) * 0).sum(), x, create_graph=True)
    return (gradient.square().sum(1).sqrt() - 1).square().mean()


KEEP = rows(None, 5, fill=1.0)
KEEP[2] = 0
GONE = rows(None, 1, 5, fill=0.0)
GONE[5] = -INF
MISSING = rows().abs() + 1
MISSING[2, 0], MISSING[3, 0] = NAN, -9
ROW_4 = rows({1: NAN, 6: NAN, 4: NAN})
ROW_4[4, 1] = 99
LARGE_4 = rows(fill=1.0)
LARGE_4[4] = 1e10
IGNORED = torch.full((8,), -100)
EDGES = torch.tensor([[0, 1, 2, 3, 4], [5, 5, 5, 5, 5]])

FAULTS = [
    # overflows
    Program("Fourier features", lambda m, x: (m((x * 16).sin()) + x.exp()).mean(),
            rows({5: 1e3}), EXP, (5,), lambda: large(nn.Linear(6, 6), "weight", 50)),
    Program("messages of a graph",
            lambda m, b: m(torch.zeros_like(b[0]).index_add(0, b[1][1], b[0][b[1][0]])).mean(),
            (rows(fill=3e38), EDGES), ("aten.index_add", "overflow in a sum", "scale down")),
    Program("a weight of a down projection", lambda m, x: m(x).square().mean(), rows(), WEIGHT,
            (), lambda: large(net(), "2.weight", 4e6, one=True), "2", "fp16-mixed"),
    Program("a large feature", lambda m, x: m(x).square().mean(), rows({5: 1e6}),
            ("aten._to_copy", "overflow in a cast", "x.clamp(-m, m)"), (5,), policy="fp16-mixed"),
    Program("a cast by hand", by_hand, rows({3: 1e6}),
            ("aten._to_copy", "overflow in a cast", "x.clamp(-m, m)"), (3,)),
    Program("ratio of PPO", lambda m, b: ((m(b[0]) - b[1]).exp() * b[0]).mean(),
            (rows(), rows({2: -200}, 1)), EXP, (2,)),
    Program("exp in fp16", lambda m, x: (m(x) + x[:, :1]).half().exp().float().mean(),
            rows({2: 13}), ("aten.exp", "overflow", "x.clamp(max=11.09)"), (2,)),
    Program("cumulative product", lambda m, x: m(x.cumprod(-1)).mean(), LARGE_4,
            ("aten.cumprod", "overflow", "scale down"), (4,)),
    Program("cumulative sum", lambda m, x: (m(x) + x * 1e38).abs().cumsum(-1).log().mean(),
            rows(fill=2.0), ("aten.cumsum", "overflow in a sum", "scale down")),
    Program("two overflows", lambda m, x: m(x * 0).mean() + (x * 2).abs().mean(),
            rows({3: 2e38}, fill=1e38), ("aten.mul", "overflow", "scale down")),
    Program("residual sum", lambda m, x: (m(x).half() * 0 + x.half() + x.half()).float().mean(),
            rows({3: 6e4}), ("aten.add", "overflow in a sum", "add in fp32"), (3,)),
    Program("one layer of six", lambda m, x: m(x * 1e4).square().mean(), rows(None, 16),
            ("aten.addmm", "overflow in a matmul", "shrink the weight"), (),
            lambda: large(six(), "4.weight", 1e38), "4"),
    Program("scores in fp16", lambda m, x: attend(m(x)), rows(None, 5, 6),
            ("aten.bmm", "overflow in a matmul", "q = q * head_dim"), (),
            lambda: large(nn.Linear(6, 6), "weight", 2e3), policy="fp16-mixed"),
    Program("compiled", compiled, rows({2: 100}), EXP, (2,)),
    Program("recurrent", lambda m, x: (m(x)[0].mean() + x.exp()).mean(), rows({6: 90}, 5, 6), EXP,
            (6,), lambda: nn.LSTM(6, 8, batch_first=True)),
    Program("spectrum", lambda m, x: m(torch.fft.rfft(x * 1e28).abs().sqrt().repeat(1, 2)[:, :6])
            .mean(), LARGE_4, ("aten._fft", "overflow in a sum", "scale down"), (4,)),
    Program("complex product",
            lambda m, x: (torch.complex(m(x), m(x)) * 1e38 * x.to(torch.cfloat)).abs().mean(),
            rows({1: 99}, fill=0.1), ("aten.mul", "overflow", "scale down"), (1,)),
    Program("steep", lambda m, x: (m(x) * 1e-30 * 1e30 * 1e-30 * 1e30).mean() * 1e20, rows(),
            ("aten.mul", "overflow in the backward", "scale the loss down")),
    # poles and domains
    Program("determinant", lambda m, x: (m(x) * x).view(8, 3, 3).logdet().mean(), zero(4, 9),
            ("aten._linalg_slogdet", POLE, "singular"), (), lambda: nn.Linear(9, 9)),
    Program("pooled without an element", lambda m, b: pooled(m(b[0]), b[1]).mean(),
            (rows(None, 5, 6), KEEP), ("aten.div", "invalid operation", "clamp_min(1)"), (2,)),
    Program("all labels ignored, beside a harmless NaN",
            lambda m, b: F.cross_entropy(m(pooled(b[0], b[1]).nan_to_num(0)), b[2]),
            (rows(None, 5, 6), KEEP, IGNORED),
            ("aten.nll_loss", "every target is ignored", "ignore_index")),
    Program("root of zero in where",
            lambda m, x: torch.where(m(x) > 0, m(x).clamp_min(0).sqrt(), 0).mean(), zero(4),
            ("aten.div", POLE, "(x + eps).sqrt()"), (4,), no_bias),
    Program("log of zero in where",
            lambda m, x: torch.where(m(x).abs() > 0, m(x).abs().log(), 0).mean(), zero(4),
            ("aten.log", POLE, "above its pole"), (4,), no_bias),
    Program("gradient penalty", penalty, rows(), ("aten.div", POLE, "(x + eps).sqrt()")),
    Program("root of a negative", lambda m, x: (m(x).tanh() + 2 + x[:, :1].clamp_max(0)).sqrt()
            .mean(), rows({3: -9}, fill=0.1), ("aten.sqrt", "invalid operation", "clamp_min(eps)"),
            (3,)),
    Program("angle", lambda m, x: (m(x).tanh() / 2 + x[:, :1]).acos().mean(),
            rows({3: -9}, fill=0.1), ("aten.acos", "invalid operation", "within: x.clamp"), (3,)),
    Program("angle of 1", lambda m, x: (x[:, :1].clamp(-1, 1) + m(x) * 0).acos().mean(), rows(),
            ("aten.", POLE, "1 - eps"), (0, 4)),
    Program("deviation of one", lambda m, x: m(x)[:1].std(0).mean(), rows(),
            ("aten.std", "invalid operation", "correction=0")),
    Program("mean of nothing", lambda m, x: m(x)[x[:, 0] > 1e9].mean(), rows(),
            ("aten.mean", "invalid operation", "leave out what is empty")),
    Program("empty batch", lambda m, b: F.cross_entropy(m(b[0])[:0], b[1][:0]), (rows(), IGNORED),
            ("aten.nll_loss", "invalid operation", "leave out what is empty")),
    Program("eps of Adam in fp16", adam, rows(),
            ("aten.addcdiv", "eps too small", "raise the optimizer's eps"), (),
            lambda: nn.Linear(6, 6).half()),
    Program("eps of a fused Adam", partial(adam, foreach=None, fused=True, eps=0), rows(),
            ("aten._fused_adam", "eps too small", "raise the optimizer's eps"), (),
            lambda: nn.Linear(6, 6)),
    Program("target longer than its input", lambda m, x: F.ctc_loss(
            m(x).log_softmax(-1).transpose(0, 1), torch.ones(8, 5).long(),
            torch.full((8,), 2), torch.full((8,), 3)), rows(None, 2, 6),
            ("aten._ctc_loss", POLE, "zero_infinity=True")),
    # data, weights, masks
    Program("a batch of one size only", lambda m, x: m(x.view(8, 6)).mean(), rows({3: NAN}),
            ("aten.addmm", *DATA)),
    Program("most rows", lambda m, x: m(x).mean(), torch.full((12, 6), NAN).index_fill(
            0, torch.tensor([4]), 1.0), ("aten.addmm", *DATA)),
    Program("NaN in the data of a batch norm", lambda m, x: m(x).square().mean(), rows({3: NAN}),
            ("aten.addmm", *DATA), (3,), lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    Program("-inf in the data", lambda m, x: m(x).mean(), rows({6: -INF}), ("aten.addmm", *DATA),
            (6,), net),
    Program("-inf in the data of a cast", lambda m, x: m(x).mean(), rows({6: -INF}),
            ("aten.", *DATA), (6,), net, policy="bf16-mixed"),
    Program("-inf in an activation", lambda m, x: m(F.gelu(x)).mean(), rows({6: -INF}),
            ("aten.gelu", *DATA), (6,)),
    Program("two rows of three", partly_masked, ROW_4, ("aten.mul", *DATA), (1, 6)),
    Program("a logarithm beside missing data", beside_missing, MISSING,
            ("aten.log1p", "invalid operation", "above its pole"), (3,)),
    Program("a logarithm written into a slice", written, rows({3: -5}, fill=1.0),
            ("aten.log1p", "invalid operation", "above its pole"), (3,)),
    Program("NaN in a weight", lambda m, x: m(x).mean(), rows(),
            ("aten.addmm", "weight not finite", "checkpoint"), (),
            lambda: large(net(), "2.weight", NAN, one=True), "2"),
    Program("NaN in a literal", lambda m, x: (m(x) * NAN).mean(), rows(),
            ("aten.mul", "literal not finite", "replace")),
    Program("NaN in a buffer", lambda m, x: m(x).mean(), rows(),
            ("aten.native_batch_norm", "buffer not finite", "reset the buffer"), (), broken_norm),
    Program("unwritten memory", lambda m, x: (m(x) + garbage(x)).mean(), rows(),
            ("aten.add", "unwritten memory", "torch.zeros(...)")),
    Program("inf - inf", lambda m, x: attend(m(x) - hidden(m(x)), hidden(m(x))), rows(None, 6, 6),
            ("aten.", "inf - inf", "torch.finfo(dtype).min / 4")),
    Program("row without a key", lambda m, b: attend(m(b[0]), b[1]), (rows(None, 5, 6), GONE),
            ("aten._softmax", "fully masked row", "see one key"), (5,)),
    # infinities that were meant, but not for the loss
    Program("target that is masked",
            lambda m, b: F.cross_entropy(m(b[0]).masked_fill(b[1], -INF), b[0].argmax(-1) * 0),
            (rows(), rows({2: 0}) == 0), ("aten.masked_fill", *MEANT), (2,)),
    # a few rows alone break for another reason
    Program("advantages", lambda m, x: ((lambda a: (a - a.mean()) / a.std())(m(x)[:, 0])
            * x.exp()[:, 0]).mean(), rows({5: 99}), EXP, (5,)),
    Program("mean of positives", lambda m, x: ((lambda one: (m(x).square().mean(-1) * x.exp()[:, 0]
            * one).sum() / one.sum())((x[:, 0] > 9).float())), rows({2: 99, 6: 10}), EXP, (2,)),
    # what the trace does not see
    Program("NumPy", lambda m, x: (m(x) + torch.from_numpy(x.numpy() * INF)).mean(), rows(),
            ("aten.add", "not finite outside the batch", "NumPy")),
    # operations' own remedies
    Program("logit of 1", lambda m, x: (m(x) * 0 + x).clamp(0, 1).logit().mean(), rows({3: 9},
            fill=0.5), ("aten.logit", POLE, "x.clamp(eps, 1 - eps)"), (3,)),
    Program("xlogy", lambda m, x: torch.xlogy(x + 9, m(x) * 0 + x).mean(), rows({3: 0}, fill=2.0),
            ("aten.xlogy", POLE, "x.clamp_min(eps)"), (3,)),
    Program("lists", lambda m, x: sum(torch._foreach_div([m(x), x], [1.0, 0.0])).mean(), rows(),
            ("aten._foreach_div", POLE, "y / (x + eps)")),
    Program("complex", lambda m, x: torch.complex(m(x), m(x) * 0).log().abs().mean(), zero(4),
            ("aten.log", POLE, "x + eps"), (4,), no_bias),
    Program("no eps", lambda m, x: m(x).mean(), rows({4: 1}, fill=1.0),
            ("aten.native_layer_norm", "invalid operation", "eps, as to 1e-5"), (),
            lambda: nn.LayerNorm(6, eps=0)),
    Program("equal eigenvalues", lambda m, x: torch.linalg.eigh((m(x) * 0).view(8, 3, 3)
            + torch.eye(3))[1].sum(), rows(None, 9), ("aten.div", POLE, "randn_like"), (),
            lambda: nn.Linear(9, 9)),
    Program("transposed in place", lambda m, x: m(x.clone().transpose_(0, 1)).mean(),
            rows({3: NAN}, 4, 6), ("aten.clone", *DATA), (3,)),
    Program("a count of 0", lambda m, x: m(x).sum() / (x > 9).sum(), rows(),
            ("aten.div", POLE, "count.clamp_min(1)")),
]  # fmt: skip

UPPER = torch.ones(8, 8).triu(1).bool()
ROW = KEEP[:, :1]
LABELS = torch.tensor([1, 2, -100, 3, 4, -100, 0, 0])


def penalised(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def logged(model: Any, x: Tensor) -> Tensor:
    """An infinite perplexity, that nothing reads."""
    loss = model(x).square().mean()
    (loss * 1e6 + 1e3).exp()
    return loss


HEALTHY = [
    Program(f"harmless {number}", loss, rows())
    for number, loss in enumerate(
        [
            lambda m, x: m((x * ROW / ROW).nan_to_num(0)).mean(),
            lambda m, x: (m(x).detach().to(torch.float8_e4m3fn).float() - m(x)).mean(),
            lambda m, x: m(torch.where(x > 0, x.log(), 0)).mean(),
            lambda m, x: torch.where(m(x).relu() > 0, m(x).relu().sqrt(), 0).mean(),
            lambda m, x: m(x).mean() + x.log().nanmean().detach().nan_to_num(0),
            lambda m, x: (m(x) @ m(x).t()).masked_fill(UPPER, -INF).softmax(-1).mean(),
            lambda m, x: m((1 / (x * 0)).clamp(-1, 1)).mean(),
            lambda m, x: m(torch.stack([x, x / 0]).select(0, 0)).mean(),
            lambda m, x: (m(x) * torch.where((x / 0).isfinite(), 0, 1)).mean(),
            lambda m, x: m(x.masked_fill(ROW == 0, -INF).topk(6, 0).values).mean(),
            lambda m, x: m(x).cumsum(0).mean() + (x.exp() * 1e38).argmax(),
            lambda m, x: m(x).logsumexp(-1).mean() + ((x / 0) > 0).sum(),
            lambda m, x: m(torch.cat([x, x * 0 / 0])[:8]).mean(),
            lambda m, x: (m(x).relu() + (x.detach() * 0 / 0).nansum()).mean(),
            lambda m, x: m(1 / (1 + (x * 100).exp())).mean(),
            lambda m, x: m((x * 1e30).square().reciprocal()).mean(),
            lambda m, x: m(x).mean() + torch.zeros(()).log().clamp_min(-5),
            lambda m, x: F.cross_entropy(m(x), LABELS),
            lambda m, x: F.binary_cross_entropy(m(x).mul(1e3).sigmoid(), (x > 0).float()),
            lambda m, x: m(torch.empty(8, 6).fill_(NAN).copy_(x)).mean(),
            lambda m, x: F.scaled_dot_product_attention(m(x), x, x, attn_mask=~UPPER).mean(),
            penalised,
            logged,
            lambda m, x: jvp(lambda x: m(x).abs(), (x,), (x,))[1].mean() + m(x).mean(),
            lambda m, x: vmap(hessian(lambda x: m(x).relu().square().sum()))(x).mean(),
            lambda m, x: linearize(lambda x: m(x).sin(), x)[1](x).mean() + m(x).mean(),
            lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (m(x),)).mean(),
        ]
    )
] + [
    Program(f"missing {number}", loss, rows({5: NAN}))
    for number, loss in enumerate(
        [
            lambda m, x: m(((x - 0.1) / 1.3).nan_to_num(0)).mean(),
            lambda m, x: m(torch.where(x.isnan(), 0, x)).mean(),
            lambda m, x: m(x[~x.isnan().any(-1)]).mean(),
            lambda m, x: m((x - x.nanmean(0)).nan_to_num(0)).mean(),
            lambda m, x: (m(x.nan_to_num(0)) - x)[~x.isnan()].square().mean(),
            lambda m, x: m(x.index_select(0, torch.tensor([0, 1, 2]))).mean(),
        ]
    )
]
