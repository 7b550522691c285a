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
from halfstep.precision.masters.accumulation import graph_leaves

BF16, F16 = torch.bfloat16, torch.float16
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

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], average: float | None = None
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.average = halfstep.EMA(model, average) if average else None

    def autocast(self) -> Any:
        return contextlib.nullcontext()

    def around(self) -> Any:
        """A context for the whole loop, where a policy's may be so."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

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
        if self.average is not None:
            keep, averages = self.average.decay, self.average.averages
            for name, p in self.model.named_parameters():
                if name in averages:
                    averages[name] = keep * averages[name] + (1 - keep) * p.detach()

    def skipped_step(self) -> None:
        """A step whose gradients are not finite."""
        self.discard()

    def averaged(self) -> Any:
        assert self.average is not None
        return self.average.applied_to(self.model)

    def state(self) -> Any:
        return copy.deepcopy({"average": self.average.state_dict() if self.average else {}})

    def load(self, state: Any) -> None:
        if self.average is not None:
            self.average.load_state_dict(state["average"])


class ByHand(Loop):
    """What a policy is, written out in plain torch.

    Casts are those of ``halfstep.autocast``, which other tests hold to their table. 16-bit weights
    are fp32 tensors of values that 16 bits hold, beside what the policy keeps of their masters.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], policy: str, **o: Any):
        super().__init__(model, optimizers, **o)
        self.policy = halfstep.parse_policy(policy)
        self.stored, compute = self.policy.param_dtype, self.policy.compute_dtype
        self.casts = {F16: "fp16-mixed", BF16: "bf16-mixed"}.get(compute, "fp32")
        self.scale = 256.0 if compute == F16 else 1.0
        self.masters: dict[Tensor, Tensor] = {}
        if self.stored != torch.float32:
            kept = {
                p for m in model.modules() if isinstance(m, nn.BatchNorm1d) for p in m.parameters()
            }
            self.low = [p for p in model.parameters() if p not in kept]
            self.masters = {p: p.data.clone() for p in self.low}
            self.show()
            model.register_forward_pre_hook(lambda *_: self.adopt())

    def show(self) -> None:
        for p, master in self.masters.items():
            p.data = master.to(self.stored).float()

    @torch.inference_mode(False)
    def adopt(self) -> None:
        """What the program has written is a 16-bit number, and is the master."""
        for p, master in self.masters.items():
            p.data = p.data.to(self.stored).float()
            self.masters[p] = master.where(master.to(self.stored) == p.data, p.data)

    def autocast(self) -> Any:
        return halfstep.autocast(self.casts, "cpu")

    def backward(self, loss: Tensor, **options: Any) -> None:
        handles = [leaf.register_hook(lambda g: g / self.scale) for leaf in graph_leaves(loss)]
        with self.autocast().arithmetic():
            (loss.float() * self.scale).backward(**options)
        for handle in handles:
            handle.remove()

    def skipped_step(self) -> None:
        super().skipped_step()
        self.scale /= 2

    def step(self, max_norm: float | None = None) -> None:
        self.adopt()
        for p, master in self.masters.items():
            p.data = master
        pure = self.low if self.masters and self.policy.is_pure else []
        self.convert(pure, self.stored)
        super().step(max_norm)
        self.convert(pure, torch.float32)
        for p in self.masters:
            chance = self.policy.update == "stochastic"
            self.masters[p] = rounded_by_chance(p.data, 16) if chance else p.data.clone()
            dropped = {"bf16": 16, "8bit": 20}.get(self.policy.moments)
            for value in self.moments(p).values() if dropped else ():
                value.copy_(rounded_by_chance(value, dropped))
        self.show()

    def convert(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        for p in parameters:
            gradient, p.grad = p.grad, None
            p.data = p.data.to(dtype)
            p.grad = None if gradient is None else gradient.to(dtype)
            for value in self.moments(p).values():
                value.data = value.data.to(dtype)

    def moments(self, p: nn.Parameter) -> dict[str, Tensor]:
        states = [optimizer.state.get(p, {}) for optimizer in self.optimizers]
        return {k: v for s in states for k, v in s.items() if isinstance(v, Tensor) and v.dim()}

    def state(self) -> Any:
        self.adopt()
        names = {p: name for name, p in self.model.named_parameters()}
        masters = {names[p]: master for p, master in self.masters.items()}
        return copy.deepcopy({**super().state(), "masters": masters, "scale": self.scale})

    def load(self, state: Any) -> None:
        super().load(state)
        self.scale = state["scale"]
        held = dict(self.model.named_parameters())
        self.masters = {held[name]: master for name, master in state["masters"].items()}
        self.show()


def rounded_by_chance(x: Tensor, bits: int) -> Tensor:
    """Up or down to a neighbour that has the last ``bits`` of an fp32 number's bits 0."""
    noise = torch.randint(0, 2**bits, x.shape, dtype=torch.int32)
    return (x.view(torch.int32) + noise).bitwise_and(-(2**bits)).view(torch.float32)


class HalfLoop(Loop):
    """The same under a policy."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], policy: str, **o: Any):
        super().__init__(model, optimizers, **o)
        chosen = optimizers if len(optimizers) != 1 else optimizers[0]
        skips = {"on_nonfinite": "skip:9", "ema": self.average} if self.average else {}
        self.precision = halfstep.Precision(policy, model, chosen, **skips)

    def autocast(self) -> Any:
        return self.precision.autocast()

    def around(self) -> Any:
        return self.precision.autocast()

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.precision.backward(loss, **options)

    def discard(self) -> None:
        self.precision.discard()

    def step(self, max_norm: float | None = None) -> None:
        result = self.precision.step(max_norm=max_norm)
        assert result.applied, f"a step was skipped that fp32 takes: {result.reason}"

    def skipped_step(self) -> None:
        assert not self.precision.step().applied, "a step of an infinite gradient was applied"

    def state(self) -> Any:
        return {**super().state(), "precision": copy.deepcopy(self.precision.state_dict())}

    def load(self, state: Any) -> None:
        super().load(state)
        self.precision.load_state_dict(state["precision"])


@dataclass
class Kit:
    """What an idiom builds its loop from.

    Attributes:
        policy: None for plain torch.
        by_hand: Whether the policy's definition is written out in plain torch.
        trained: What was trained, in the order it was taken.
        seen: Numbers that the idiom read on its way, such as norms of gradients.
    """

    policy: str | None = None
    by_hand: bool = False
    trained: list[nn.Module] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    start: list[Tensor] = field(default_factory=list)

    def own(self) -> bool:
        if self.policy is None or self.by_hand:
            return False
        return halfstep.parse_policy(self.policy).needs_own_optimizer

    def sgd(self, params: Iterable[Any], **options: Any) -> Optimizer:
        kind: Any = halfstep.optim.SGD if self.own() else torch.optim.SGD
        return kind(params, **{"lr": 0.1, "momentum": 0.9, **options})

    def adamw(self, params: Iterable[Any], **options: Any) -> Optimizer:
        kind: Any = halfstep.optim.AdamW if self.own() else torch.optim.AdamW
        # an eps that fp16 holds, and that keeps noise in tiny gradients from being amplified
        return kind(params, **{"lr": 0.01, "eps": 1e-3, **options})

    def take(self, model: nn.Module, *optimizers: Optimizer, average: float | None = None) -> Loop:
        self.trained.append(model)
        self.start.append(flat(model))
        if self.policy is None:
            return Loop(model, [*optimizers], average)
        kind = ByHand if self.by_hand else HalfLoop
        return kind(model, [*optimizers], self.policy, average=average)


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


def run(idiom: Idiom, policy: str | None, by_hand: bool = False) -> Outcome:
    torch.manual_seed(0)
    kit = Kit(policy, by_hand)
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
