"""Small real runs, healthy or with planted faults, for tests of the spike guard.

Each run trains a model of its own kind on data made here, under a policy of its own. The limits of
the guard were chosen on other runs (docs/decisions/0018-finite-spikes.md): none of these.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep import Precision
from halfstep.optim.optimizers import AdamW

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Bytes(nn.Module):
    """A GPT over bytes; ``gain`` multiplies the embeddings, to plant inputs that are too large."""

    def __init__(self, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        places = self.place(torch.arange(x.shape[1]))
        hidden = self.blocks(self.embed(x) * self.gain + places)
        return self.head(self.norm(hidden)).flatten(0, 1)


class Letters(nn.Module):
    """A GRU that reads bytes and tells which of several sources they are from."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(128, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.embed(x) * self.gain)[0].mean(1))


def source_code(files: int) -> list[Tensor]:
    """The first modules of Python's standard library, as bytes below 128."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(p for p in folder.glob("[a-t]*.py") if p.stat().st_size > 20_000)[:files]
    return [torch.tensor([min(b, 127) for b in p.read_bytes()[:100_000]]) for p in found]


@dataclass
class Kind:
    """A run: how to make its model, optimizer and batches, and what to multiply."""

    policy: str
    make: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    draw: Callable[[torch.Generator], Batch]
    warm_up: int
    max_norm: float | None = 1.0
    decays: bool = True
    moments: str = "exp_avg"
    extra: dict[str, Any] = field(default_factory=dict)


def _text(size: int, length: int) -> Callable[[torch.Generator], Batch]:
    data = torch.cat(source_code(12))

    def draw(generator: torch.Generator) -> Batch:
        starts = torch.randint(len(data) - length - 1, (size,), generator=generator)
        rows = torch.stack([data[i : i + length + 1] for i in starts.tolist()])
        return rows[:, :-1], rows[:, 1:].flatten()

    return draw


def _sources(size: int, length: int, classes: int) -> Callable[[torch.Generator], Batch]:
    books = source_code(classes)

    def draw(generator: torch.Generator) -> Batch:
        labels = torch.randint(classes, (size,), generator=generator)
        rows = []
        for label in labels.tolist():
            at = int(torch.randint(len(books[label]) - length, (), generator=generator))
            rows.append(books[label][at : at + length])
        return torch.stack(rows), labels

    return draw


def _clouds(size: int, noise: float, shape: tuple[int, ...]) -> Callable[[torch.Generator], Batch]:
    centres = torch.randn(8, *shape, generator=torch.Generator().manual_seed(5))

    def draw(generator: torch.Generator) -> Batch:
        labels = torch.randint(8, (size,), generator=generator)
        return centres[labels] + noise * torch.randn(size, *shape, generator=generator), labels

    return draw


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8)
    )


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 8),
    )  # fmt: skip


def kinds() -> dict[str, Kind]:
    """The five runs."""
    return {
        "gpt": Kind(
            "bf16-mixed", lambda: Bytes(32, 2, 40),
            lambda ps: torch.optim.AdamW(ps, lr=2e-3), _text(8, 40), warm_up=100,
        ),
        "gpt-hot": Kind(
            "fp16-mixed", lambda: Bytes(32, 1, 32),
            lambda ps: torch.optim.AdamW(ps, lr=6e-3), _text(12, 32), warm_up=20, max_norm=None,
        ),
        "perceptron": Kind(
            "fp32", _perceptron, lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
            _clouds(32, 2.0, (24,)), warm_up=0, decays=False, moments="momentum_buffer",
        ),
        "images": Kind(
            "bf16-split", _images, lambda ps: AdamW(ps, lr=3e-3),
            _clouds(32, 4.0, (2, 8, 8)), warm_up=50,
        ),
        "letters": Kind(
            "fp32", lambda: Letters(24, 6),
            lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9), _sources(64, 24, 6), warm_up=50,
            moments="momentum_buffer",
        ),
    }  # fmt: skip


FAULTS = ("labels", "inputs", "rate", "bit")


class Run:
    """One run in progress."""

    def __init__(self, kind: Kind, steps: int, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.kind, self.steps = kind, steps
        self.model = kind.make()
        self.optimizer = kind.optimizer(self.model.parameters())
        self.precision = Precision(kind.policy, self.model, self.optimizer, **options)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self._peak = self.optimizer.param_groups[0]["lr"]

    def _rate(self, step: int) -> float:
        rate = self._peak * min(1.0, (step + 1) / self.kind.warm_up if self.kind.warm_up else 1.0)
        return rate * (1 - 0.9 * step / self.steps) if self.kind.decays else rate

    def step(self, number: int, fault: str = "") -> Any:
        """Take a step; ``"labels"`` and ``"inputs"`` spoil its batch, ``"rate"`` its update, and
        ``"bit"`` flips the highest exponent bit of a moment before it."""
        inputs, labels = self.kind.draw(self.generator)
        faults = torch.Generator().manual_seed(number)
        if fault == "labels":
            labels = labels[torch.randperm(len(labels), generator=faults)]
        times = 1000.0 if fault == "inputs" else 1.0
        if inputs.is_floating_point():
            inputs = inputs * times
        else:
            self.model.gain = times
        if fault == "bit":
            self._flip()
        rate = 50 * self._peak if fault == "rate" else self._rate(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.precision.autocast():
            loss = functional.cross_entropy(self.model(inputs).float(), labels)
        return self.precision.step(loss, max_norm=self.kind.max_norm)

    def _flip(self) -> None:
        """Flip it in the largest element of the last matrix's first moment."""
        last = [p for p in self.precision.named_parameters().values() if p.dim() == 2][-1]
        flat = self.optimizer.state[last][self.kind.moments].view(-1)
        at = int(flat.abs().argmax())
        flat[at] = (flat[at : at + 1].view(torch.int32) ^ (1 << 30)).view(torch.float32)[0]

    def score(self) -> float:
        """The loss on 64 batches that no run trains on."""
        generator = torch.Generator().manual_seed(2**20)
        total = 0.0
        with torch.no_grad(), self.precision.autocast():
            for _ in range(64):
                inputs, labels = self.kind.draw(generator)
                total += float(functional.cross_entropy(self.model(inputs).float(), labels))
        return total / 64
