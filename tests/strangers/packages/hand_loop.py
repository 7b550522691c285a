"""The training loop that people write by hand, around models of packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep
from strangers.packages.runs import STEPS, Program, Run

LossOf = Callable[[nn.Module, Any], Tensor]


def plain(model: nn.Module, optimizer: Optimizer, batches: Sequence[Any], loss_of: LossOf):
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mixed(policy, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any], loss_of: LossOf):
    losses = []
    precision = halfstep.Precision(policy, model, optimizer)
    for batch in batches:
        with precision.autocast():
            loss = loss_of(model, batch)
        precision.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        precision.step()
        losses.append(loss.item())
    assert not precision.progress.skipped_total, "a step was skipped that fp32 takes"
    return losses


# Adam's default of 1e-8 is 0 in fp16, which fp16-pure refuses.
EPS = 1e-4


def torchs(parameters: Any, lr: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, eps=EPS)


def halfsteps(parameters: Any, lr: float) -> Optimizer:
    return halfstep.optim.AdamW(parameters, lr=lr, eps=EPS)


@dataclass(frozen=True)
class HandLoop:
    """What the loop needs of a program.

    Attributes:
        model: Makes it, from torch's generator.
        batch: The i-th batch.
        loss: Of a model and a batch.
        lr: The learning rate.
        different: How many different batches there are; they come again and again.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: LossOf
    lr: float = 1e-3
    different: int = 3

    def __call__(self, run: Run, rule: str = "") -> list[float]:
        torch.manual_seed(0)
        model = run.begin(self.model().train())
        draws = [torch.Generator().manual_seed(i) for i in range(self.different)]
        made = [self.batch(draw) for draw in draws]
        batches = [made[i % self.different] for i in range(STEPS)]
        weights = [p for p in model.parameters() if p.requires_grad]
        torch.manual_seed(1)
        if run.policy is None:
            return plain(model, torchs(weights, self.lr * run.rate), batches, self.loss)
        policy = with_rule(run.policy, rule)
        make = halfsteps if halfstep.parse_policy(policy).needs_own_optimizer else torchs
        return mixed(policy, model, make(weights, self.lr * run.rate), batches, self.loss)


def with_rule(policy: str, rule: str) -> str:
    """The policy with the rule where it stores 16-bit weights; elsewhere nobody needs one."""
    stored = halfstep.parse_policy(policy).param_dtype
    return f"{policy},{rule}" if rule and stored != torch.float32 else policy


def by_hand(
    name: str, package: str, rule: str = "", *, amplifies: float = 1.0, **parts: Any
) -> Program:
    """The program, trained by the loop above."""
    loop = HandLoop(**parts)

    return Program(
        name, package, lambda run: loop(run, rule), rule=rule, bare=loop, amplifies=amplifies
    )
