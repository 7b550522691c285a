"""What ranks run in tests of gradient sums, and what one process finds for each rank's share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.distributed.reducer import GradientReducer
from halfstep.optim.optimizers import AdamW
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision

VOCABULARY, WIDTH, ROWS = 11, 8, 6
BIG = 25 * 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Found = dict[str, tuple[str, Any]]


class Net(nn.Module):
    """A tied embedding, a frozen layer, and one layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 24)
        self.frozen = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.spare = nn.Linear(24, 24)
        self.down = nn.Linear(24, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, tokens: Tensor, spare: bool) -> Tensor:
        x = self.norm(self.frozen(torch.tanh(self.up(self.embedding(tokens)))))
        if spare:
            x = x + self.spare(x)
        return self.head(self.down(x))


class Branches(nn.Module):
    """Layers side by side, so that the caller chooses the order in which backward reaches them."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        total = x.sum() * 0
        for number in order:
            total = total + self.branches[number](x).square().sum()
        return total


def batch(rank: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets that differ between ranks and micro-batches."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    tokens = torch.randint(VOCABULARY, (2, ROWS), generator=generator)
    return tokens[0], tokens[1]


def make(policy: str, model: nn.Module, **options: Any) -> Precision:
    parsed = parse_policy(policy)
    owned = [p for p in model.parameters() if p.requires_grad]
    optimizer = (
        AdamW(owned, lr=0.01)
        if parsed.needs_own_optimizer
        else torch.optim.AdamW(owned, lr=0.01, eps=1e-4)
    )
    return Precision(parsed, model, optimizer, **options)


def backward(precision: Precision, model: Net, rank: int, number: int, spare: bool) -> Tensor:
    """One micro-batch; the loss is divided by a power of two, like all others of the step."""
    tokens, targets = batch(rank, number)
    with precision.autocast():
        logits = model(tokens, spare)
        loss = F.cross_entropy(logits.float(), targets, reduction="sum") / 16
    precision.backward(loss)
    return loss


def gradients(precision: Precision) -> dict[str, Tensor]:
    named = precision.named_parameters()
    found = precision.masters.gradients(named.values())
    return {name: found[p].detach() for name, p in named.items() if p in found}


def packed(tensors: dict[str, Tensor]) -> Found:
    """What pipes carry without shared memory: the dtype, and the numbers in fp32."""
    return {n: (str(t.dtype), t.detach().float().numpy().copy()) for n, t in tensors.items()}


def unpacked(found: Found) -> dict[str, Tensor]:
    return {n: torch.from_numpy(numbers) for n, (_, numbers) in found.items()}


def share(policy: str, rank: int, *, micro_batches: int = 1, spare: bool = True):
    """A rank's own gradients, computed by this process alone."""
    model = Net()
    precision = make(policy, model)
    for number in range(micro_batches):
        backward(precision, model, rank, number, spare)
    return {name: g.clone() for name, g in gradients(precision).items()}


def reduced(
    rank: int,
    *,
    policy: str,
    reduce: str,
    micro_batches: int = 1,
    spare: Sequence[bool] = (True,) * 4,
    bucket_bytes: int = BIG,
    steps: int = 1,
    overlap: bool = True,
) -> Found:
    """In a worker: the gradients after finish() of the last of several equal steps."""
    model = Net()
    precision = make(policy, model)
    reducer = GradientReducer(
        precision, dist.group.WORLD, DTYPES[reduce], bucket_bytes=bucket_bytes
    )
    found: Found = {}
    for step in range(steps):
        precision.masters.clear()
        use = spare[rank] or step < steps - 1  # buffers are dirty when something is missing
        for number in range(micro_batches - 1):
            backward(precision, model, rank, number, use)
        if overlap:
            with reducer.last():
                backward(precision, model, rank, micro_batches - 1, use)
        else:
            backward(precision, model, rank, micro_batches - 1, use)
        reducer.finish()
        found = packed(gradients(precision))
    return found
