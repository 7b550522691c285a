"""Small programs of many kinds: each yields its model and optimizers, then a loss per step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Precision

Program = Iterator[Any]
VOCABULARY = 32


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    made = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), act())]
    return nn.Sequential(*made[:-1])


class Attention(nn.Module):
    gain = 1.0

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q * self.gain, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    gain = 1.0

    def __init__(self, width: int, causal: bool, post: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, causal)
        self.norm2, self.mlp = nn.LayerNorm(width), mlp(width, 4 * width, width, act=nn.GELU)
        self.dropout, self.post = nn.Dropout(dropout), post

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.attn(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x))) * self.gain


class Transformer(nn.Module):
    """Of tokens, or of images' patches."""

    def __init__(
        self, layers=2, causal=True, post=False, tied=False, dropout=0.0, images=False
    ) -> None:
        super().__init__()
        self.emb = nn.Conv2d(3, 32, 4, 4) if images else nn.Embedding(VOCABULARY, 32)
        self.pos = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32, causal, post, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.emb.weight
            nn.init.normal_(self.emb.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        x = x.flatten(2).transpose(1, 2) if x.dim() == 4 else x
        x = x + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3 = (nn.Conv2d(n, 16, 3, padding=1) for n in (3, 16, 16))
        self.b1, self.b2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b1(self.c1(x)))
        x = x + F.relu(self.b2(self.c2(x)))
        return self.head((x + F.relu(self.c3(x))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, 24), nn.Linear(32, VOCABULARY)
        self.lstm = nn.LSTM(24, 32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.emb(x))[0])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.router, self.out = (nn.Linear(16, n) for n in (16, 6, 1))
        self.experts = nn.ModuleList(mlp(16, 32, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        weight, chosen = self.router(h).softmax(-1).max(-1)
        y = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                y[mine] = expert(h[mine]) * weight[mine, None]
        return self.out(h + y)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def tokens(g: torch.Generator, rows: int = 8, length: int = 12) -> Tensor:
    """Arithmetic progressions, a tenth of them noise."""
    start, by = (torch.randint(1, n, (rows, 1), generator=g) for n in (VOCABULARY, 4))
    x = (start + by * torch.arange(length + 1)) % VOCABULARY
    noise = torch.randint(0, VOCABULARY, x.shape, generator=g)
    return torch.where(torch.rand(x.shape, generator=g) < 0.1, noise, x)


def next_token(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def steps(model, loss, optimizer=None, rate=None, accumulate=1, clip=None) -> Program:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)
    yield model, [optimizer]
    for i in range(10**6):
        for _ in range(accumulate):
            value = loss(i) / accumulate
            value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups if rate else ():
            group["lr"] = rate(i)
        optimizer.step()
        optimizer.zero_grad()
        yield float(value.detach())


def language(optimizer=None, accumulate=1, clip=None, rate=None, sizes=None, model=None, **how):
    net, g = model or Transformer(**how), torch.Generator().manual_seed(0)
    sizes = sizes or (lambda i: (8, 12))
    made = (
        None if optimizer is None else optimizer([p for p in net.parameters() if p.requires_grad])
    )
    return steps(net, lambda i: next_token(net, tokens(g, *sizes(i))), made, rate, accumulate, clip)


def images(model=None, optimizer=None, rows=lambda i: 16) -> Program:
    net, g = model or Transformer(causal=False, images=True), torch.Generator().manual_seed(0)

    def loss(i: int) -> Tensor:
        y = torch.randint(0, 4, (rows(i),), generator=g)
        x = torch.randn(rows(i), 3, 16, 16, generator=g)
        x[:, 0] += y[:, None, None] - 1.5
        out = net(x)
        return F.cross_entropy(out.mean(1) if out.dim() == 3 else out, y)

    return steps(net, loss, optimizer and optimizer(net.parameters()))


def regression(scale=lambda i: 1.0, model=None, truth=None, rate=1e-3) -> Program:
    net, g = model or mlp(8, 32, 32, 32, 1), torch.Generator().manual_seed(0)
    w = torch.randn(8, generator=g)
    truth = truth or (lambda x: (x @ w).sin())

    def loss(i: int) -> Tensor:
        x = torch.randn(32, 8, generator=g) * scale(i)
        return (net(x)[:, 0] - truth(x)).square().mean()

    return steps(net, loss, torch.optim.AdamW(net.parameters(), rate))


def gan() -> Program:
    net = nn.ModuleDict({"g": mlp(4, 32, 32, 2), "d": mlp(2, 32, 32, 1)})
    g = torch.Generator().manual_seed(0)
    both = [torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.9)) for m in net.values()]
    yield net, both
    while True:
        angle = torch.rand(64, 1, generator=g) * 6.28
        real, fake = (
            torch.cat([angle.cos(), angle.sin()], 1),
            net.g(torch.randn(64, 4, generator=g)),
        )
        lost = F.softplus(-net.d(real)).mean() + F.softplus(net.d(fake.detach())).mean()
        for optimizer, loss in ((both[1], lost), (both[0], F.softplus(-net.d(fake)).mean())):
            if optimizer is both[0]:
                loss = F.softplus(-net.d(fake)).mean()  # by what the discriminator is now
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield float(loss.detach())


def dqn() -> Program:
    net, g = mlp(4, 32, 32, 3), torch.Generator().manual_seed(0)
    target, moves = copy.deepcopy(net), torch.randn(3, 4, 4, generator=g) * 0.3

    def loss(i: int) -> Tensor:
        if i % 50 == 0:
            target.load_state_dict(net.state_dict())
        s, a = torch.randn(64, 4, generator=g), torch.randint(0, 3, (64,), generator=g)
        with torch.no_grad():
            then = torch.einsum("bij,bj->bi", moves[a], s) + 0.1
            y = s[:, 0] + 1 + 0.97 * target(then).amax(1)
        return F.smooth_l1_loss(net(s).gather(1, a[:, None])[:, 0], y)

    return steps(net, loss)


def autoencoder() -> Program:
    net = nn.ModuleDict({"enc": mlp(16, 32, 8), "dec": mlp(4, 32, 16)})
    g = torch.Generator().manual_seed(0)
    basis = torch.randn(4, 16, generator=g)

    def loss(i: int) -> Tensor:
        x = torch.randn(32, 4, generator=g) @ basis
        mean, spread = net.enc(x).chunk(2, 1)
        z = mean + torch.randn(mean.shape, generator=g) * (spread / 2).exp()
        apart = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
        return (net.dec(z) - x).square().sum(1).mean() + apart * min(1, i / 200)

    return steps(net, loss)


class Gated(nn.Module):
    """A residual branch whose gain, a parameter, begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.gain = mlp(16, 32, 16), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.branch(x)


def gated() -> Program:
    net = nn.Sequential(nn.Linear(8, 16), *(Gated() for _ in range(6)), nn.Linear(16, 1))
    truth = lambda x: x[:, 0] * x[:, 1]  # noqa: E731
    return regression(model=net, truth=truth, rate=3e-3)


def pinn() -> Program:
    net, g = mlp(1, 32, 32, 1, act=nn.Tanh), torch.Generator().manual_seed(0)

    def loss(i: int) -> Tensor:
        x = (torch.rand(64, 1, generator=g) * 3).requires_grad_()
        (first,) = torch.autograd.grad((u := net(x)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        start = net(torch.zeros(1, 1)).sub(1).square().mean()
        return (second + 9 * u).square().mean() + 100 * start

    return steps(net, loss)


def contrastive() -> Program:
    net = nn.ModuleDict({"a": mlp(6, 32, 16), "b": mlp(6, 32, 16)})
    g, right = torch.Generator().manual_seed(0), torch.arange(32)

    def loss(i: int) -> Tensor:
        z = torch.randn(32, 6, generator=g)
        alike = F.normalize(net.a(z), dim=1) @ F.normalize(net.b(z.flip(1)), dim=1).T * 10
        return F.cross_entropy(alike, right) + F.cross_entropy(alike.T, right)

    return steps(net, loss)


def lora() -> Program:
    net = Transformer().requires_grad_(False)
    for block in net.blocks:
        block.attn.q_proj, block.attn.v_proj = LoRA(block.attn.q_proj), LoRA(block.attn.v_proj)
    return language(model=net, optimizer=lambda p: torch.optim.AdamW(p, 2e-3))


def experts() -> Program:
    net, g = Experts(), torch.Generator().manual_seed(0)
    centres = torch.randn(6, 16, generator=g) * 2

    def loss(i: int) -> Tensor:  # half of the experts' tokens come at step 150
        kind = torch.randint(0, 3 if i < 150 else 6, (16,), generator=g)
        x = centres[kind] + torch.randn(16, 16, generator=g) * 0.3
        return (net(x)[:, 0] - x[:, 0].sin() * (kind + 1)).square().mean()

    return steps(net, loss)


def unfrozen() -> Program:
    net, g = Transformer(), torch.Generator().manual_seed(0)
    net.blocks[0].requires_grad_(False)

    def loss(i: int) -> Tensor:
        net.requires_grad_(i >= 150)
        net.head.requires_grad_(True)
        net.blocks[1].requires_grad_(True)
        return next_token(net, tokens(g))

    return steps(net, loss)


def teacher() -> Program:
    net, g = Transformer(), torch.Generator().manual_seed(0)
    average = copy.deepcopy(net).requires_grad_(False)

    def loss(i: int) -> Tensor:
        for a, p in zip(average.parameters(), net.parameters(), strict=True):
            a.lerp_(p.detach(), 0.01)
        x = tokens(g)
        wanted = average(x).softmax(-1).flatten(0, 1)
        return next_token(net, x) + F.cross_entropy(net(x).flatten(0, 1), wanted)

    return steps(nn.ModuleDict({"student": net, "teacher": average}), loss)


def half_precision() -> Program:
    net, g = Transformer(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    precision = Precision("fp16-mixed,growth_interval=20", net, optimizer)
    yield net, precision
    while True:
        with precision.autocast():
            loss = next_token(net, tokens(g))
        yield precision.step(loss).loss


def sgd(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, rate, momentum=0.9)


HEALTHY: dict[str, Callable[[], Program]] = {
    "GAN": gan,
    "DQN": dqn,
    "restarts": lambda: language(
        rate=lambda i: 1e-3 * (1.0001 + math.cos(math.pi * (i % 60) / 60))
    ),
    "warm-up": lambda: language(rate=lambda i: 2e-3 * min(1, i / 100)),
    "curriculum of scale": lambda: regression(lambda i: 3.0 if i >= 150 else 1.0),
    "curriculum of length": lambda: language(sizes=lambda i: (8, 4 if i < 150 else 32)),
    "batch size": lambda: images(Convolutions(), sgd(0.02), lambda i: 2 if i < 150 else 64),
    "VAE": autoencoder,
    "gains from 0": gated,
    "PINN": pinn,
    "contrastive": contrastive,
    "LoRA": lora,
    "experts": experts,
    "unfrozen": unfrozen,
    "teacher": teacher,
    "tied": lambda: language(tied=True),
    "dropout": lambda: language(dropout=0.3),
    "accumulation": lambda: language(accumulate=4, clip=1.0, sizes=lambda i: (2, 12)),
    "half precision": half_precision,
    "recurrent": lambda: language(model=Recurrent(), clip=1.0),
    "convolutions": lambda: images(Convolutions(), sgd(0.05)),
    "long batches": lambda: language(
        model=Recurrent(), sizes=lambda i: (8, 60 if i % 40 == 39 else 8)
    ),
}
