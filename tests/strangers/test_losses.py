"""The yardstick for losses lets every policy's calm run pass, and sees planted faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from every import every
from strangers.loops import POLICIES, HalfLoop, Loop
from strangers.losses import Beside, Prepare

pytestmark = pytest.mark.strangers

STEPS, MICRO_BATCHES, MAX_NORM = 24, 3, 0.6


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(32, 12, generator=generator)
    return x, (x[:, :3].sum(1) + x[:, 3:6].prod(1)).gt(0).long() + x[:, 6].gt(1).long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 32),
        nn.Tanh(),
        nn.LayerNorm(32),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 3),
    )


def optimizer_of(model: nn.Module, kind: str, policy: str = "fp32") -> torch.optim.Optimizer:
    own = halfstep.parse_policy(policy).needs_own_optimizer
    if kind == "sgd":
        return (halfstep.optim.SGD if own else torch.optim.SGD)(
            model.parameters(), lr=0.2, momentum=0.9
        )
    # an eps that fp16 holds
    return (halfstep.optim.AdamW if own else torch.optim.AdamW)(
        model.parameters(), lr=0.01, eps=1e-4
    )


Fault = Callable[[nn.Sequential], None]
"""Something that goes wrong with the gradients, before they are clipped."""


def train(
    kind: str, policy: str | None, prepare: Prepare | None = None, fault: Fault | None = None,
    *, clip: bool = True, twice: bool = False,
) -> list[float]:  # fmt: skip
    """A calm program: accumulation, clipping, a schedule by hand; in plain torch without a policy.

    ``twice``: a step's last micro-batch counts twice.
    """
    model = network()
    optimizer = optimizer_of(model, kind, policy or "fp32")
    loop = Loop(model, [optimizer]) if policy is None else HalfLoop(model, [optimizer], policy)
    if prepare is not None:
        prepare(model)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for count, part in enumerate([*range(MICRO_BATCHES), *[MICRO_BATCHES - 1] * twice]):
            x, y = batch(MICRO_BATCHES * step + part)
            with loop.autocast():
                loss = F.cross_entropy(model(x), y) / MICRO_BATCHES
            loop.backward(loss)
            total += loss.item() if count < MICRO_BATCHES else 0.0
        if fault is not None:
            fault(model)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
        loop.step()
        losses.append(total)
    return losses


@cache
def beside(kind: str) -> Beside:
    return Beside(partial(train, kind, None))


def last_layer_doubled(model: nn.Sequential) -> None:
    for p in model[5].parameters():
        p.grad.mul_(2)


def scale_left_in(model: nn.Sequential) -> None:
    for p in model.parameters():
        p.grad.mul_(256)


def a_layer_never_moves(model: nn.Sequential) -> None:
    for p in model[3].parameters():
        p.grad.zero_()


def one_gradient_lost(model: nn.Sequential) -> None:
    model[0].weight.grad.zero_()


FAULTS: dict[str, Callable[[str, str], list[float]]] = {
    "gradients of one group doubled": partial(train, fault=last_layer_doubled),
    "clipping lost": partial(train, clip=False),
    "a loss scale left in": partial(train, fault=scale_left_in),
    "a layer that never moves": partial(train, fault=a_layer_never_moves),
    "a gradient that is lost": partial(train, fault=one_gradient_lost),
    "a micro-batch counted twice": partial(train, twice=True),
}
# Adam divides gradients by their own size: a factor on all of a weight's gradients, or on all
# gradients of a step, is nearly nothing to it. Such faults are for SGD to show.
ADAM_SEES = ("a layer that never moves", "a gradient that is lost", "a micro-batch counted twice")
CASES = [("sgd", name) for name in FAULTS] + [("adamw", name) for name in ADAM_SEES]


def test_a_calm_program_needs_two_thirds_of_what_is_allowed_at_most():
    def check(kind, policy):
        assert beside(kind).ratio(policy, train(kind, policy)) < 2 / 3

    every(itertools.product(("sgd", "adamw"), POLICIES), check)


# One for each yardstick: two formats, what is kept in 16 bits, and moments of 8.
YARDSTICKS = ("bf16-mixed", "fp16-mixed,init_scale=256", "bf16-sr", "bf16-pure",
              "bf16-split,moments=8bit")  # fmt: skip


def test_planted_faults_are_seen():
    def check(kind, fault, policy):
        assert beside(kind).apart(policy, FAULTS[fault](kind, policy))

    every(((*case, policy) for case in CASES for policy in YARDSTICKS), check)
