"""The same training loop in plain fp32 torch and under a policy, for one to check the other.

An idiom is written once, against :class:`Kit`. Between the calls of :class:`Loop` it does whatever
training scripts do: to ``p.grad``, to weights, to optimizers, to modules.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep
from halfstep.errors import HalfstepError

POLICIES = (
    "fp32",
    "bf16-mixed",
    "fp16-mixed,init_scale=256",
    "bf16-master",
    "fp16-master,init_scale=256",
    "bf16-split",
    "bf16-split24",
    "bf16-kahan",
    "bf16-sr",
    "bf16-split,moments=8bit",
    "bf16-pure",
    "fp16-pure,init_scale=256",
)
"""Every policy that a CPU honours. The default first scale would skip a step that fp32 takes."""


class Loop:
    """A model and its optimizers in a training loop of plain torch."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        self.model = model
        self.optimizers = optimizers

    def autocast(self) -> Any:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def unscale_(self) -> None:
        pass

    def discard(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, max_norm: float | None = None) -> None:
        if max_norm is not None:
            owned = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(owned, max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.discard()

    def state(self) -> Any:
        return {}

    def load(self, state: Any) -> None:
        pass


class HalfLoop(Loop):
    """The same under a policy."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], policy: str) -> None:
        super().__init__(model, optimizers)
        chosen = optimizers if len(optimizers) != 1 else optimizers[0]
        self.precision = halfstep.Precision(policy, model, chosen)

    def autocast(self) -> Any:
        return self.precision.autocast()

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.precision.backward(loss, **options)

    def unscale_(self) -> None:
        """Do nothing: ``p.grad`` is unscaled already."""

    def discard(self) -> None:
        self.precision.discard()

    def step(self, max_norm: float | None = None) -> None:
        result = self.precision.step(max_norm=max_norm)
        assert result.applied, f"a step was skipped that fp32 takes: {result.reason}"

    def state(self) -> Any:
        return copy.deepcopy(self.precision.state_dict())

    def load(self, state: Any) -> None:
        self.precision.load_state_dict(state)


@dataclass
class Kit:
    """What an idiom builds its loop from.

    Attributes:
        policy: None for plain torch.
        trained: What was trained, in the order it was taken.
        seen: Numbers that the idiom read on its way, such as norms of gradients.
    """

    policy: str | None = None
    trained: list[nn.Module] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    start: list[Tensor] = field(default_factory=list)

    def _own(self) -> bool:
        return self.policy is not None and (halfstep.parse_policy(self.policy).needs_own_optimizer)

    def sgd(self, params: Iterable[Any], **options: Any) -> Optimizer:
        kind: Any = halfstep.optim.SGD if self._own() else torch.optim.SGD
        return kind(params, **{"lr": 0.1, "momentum": 0.9, **options})

    def adamw(self, params: Iterable[Any], **options: Any) -> Optimizer:
        kind: Any = halfstep.optim.AdamW if self._own() else torch.optim.AdamW
        # an eps that fp16 holds, and that keeps noise in tiny gradients from being amplified
        return kind(params, **{"lr": 0.01, "eps": 1e-3, **options})

    def take(self, model: nn.Module, *optimizers: Optimizer) -> Loop:
        self.trained.append(model)
        self.start.append(flat(model))
        if self.policy is None:
            return Loop(model, [*optimizers])
        return HalfLoop(model, [*optimizers], self.policy)


def flat(model: nn.Module) -> Tensor:
    """All parameters in one fp64 vector."""
    parts = [p.detach().double().reshape(-1) for p in model.parameters()]
    return torch.cat(parts).clone()


Idiom = Callable[[Kit], None]


@dataclass(frozen=True)
class Outcome:
    """Where a loop has ended.

    Attributes:
        weights: All weights, fp64.
        travelled: How far from the start.
        seen: :attr:`Kit.seen`.
    """

    weights: Tensor
    travelled: float
    seen: tuple[float, ...]


def run(idiom: Idiom, policy: str | None) -> Outcome:
    torch.manual_seed(0)
    kit = Kit(policy)
    idiom(kit)
    weights = torch.cat([flat(model) for model in kit.trained])
    start = torch.cat(kit.start)
    travelled = float((weights - start).norm()) if len(start) == len(weights) else 0.0
    return Outcome(weights, travelled, tuple(kit.seen))


def distance(one: Outcome, other: Outcome) -> float:
    """Of two ends, relative to the way that the second one has gone."""
    apart = float((one.weights - other.weights).norm())
    return apart / other.travelled if apart == apart else float("inf")


def verdict(idiom: Idiom, policy: str, reference: Outcome, bound: float) -> tuple[str, str]:
    """``equal``, ``refused``, ``raw``, ``silent`` or ``skipped``, and what was seen."""
    try:
        got = run(idiom, policy)
    except HalfstepError as error:
        return "refused", str(error)
    except AssertionError as error:
        return "skipped", str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    apart = distance(got, reference)
    if apart > bound:
        return "silent", f"{apart:.3g} of the way apart, allowed {bound:.3g}"
    for mine, theirs in zip(got.seen, reference.seen, strict=True):
        if abs(mine - theirs) > bound * max(1.0, abs(theirs)):
            return "silent", f"saw {mine:g} where fp32 sees {theirs:g}"
    return "equal", f"{apart:.3g}"
