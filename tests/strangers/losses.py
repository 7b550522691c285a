"""Whether the losses of a program under a policy stand beside those of plain fp32.

How far rounding may carry a program apart depends on the program. So it is asked in plain fp32: its
first weights are moved at random, each by about what a rounding moves it, and what the losses do
then is what rounding may do to them. A policy rounds more often than once; :data:`MARGIN` is for
that.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import halfstep

ROUNDOFF = {torch.float32: 2.0**-25, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""The root mean square of a rounding's relative error, to a power of two.

An error is even in half a gap at most: u/sqrt(3) with u = 2^-8 for bf16, and the value that it is
relative to lies anywhere between one power of two and the next.
"""
MARGIN = 4.0
"""A calm program needs two thirds of it at most; a line that is lost, much more."""
COARSE_MOMENTS = 2.0
"""As much more for moments of 8 bits, whose steps are wider than those of bf16."""
SEEDS = (1, 2)

Prepare = Callable[[nn.Module], object]
"""What a program does to each model that it trains, before the model's first forward."""
Train = Callable[[Prepare], Sequence[float]]
"""A program in plain torch, which returns its losses, one a step."""


@torch.no_grad()
def perturb_(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Move every weight by a random error of the relative size of rounding it to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        error = torch.randn(p.shape, generator=generator)
        p.data.mul_(1 + ROUNDOFF[dtype] * error.clamp(-2, 2))


@dataclass
class Beside:
    """How far from its losses in plain fp32 a program may be, for every policy.

    Attributes:
        train: The program in plain torch.
        kept: The losses of the runs that were needed so far.
    """

    train: Train
    kept: dict[object, list[float]] = field(default_factory=dict)

    @property
    def plain(self) -> list[float]:
        """The losses in plain fp32."""
        return self._run("plain", lambda model: None)

    def controls(self, policy: str) -> list[list[float]]:
        """The losses of the runs that show how far apart rounding carries this program."""
        chosen = halfstep.parse_policy(policy)
        dtype = chosen.compute_dtype
        moved = [
            self._run((dtype, seed), lambda model, seed=seed: perturb_(model, dtype, seed))
            for seed in SEEDS
        ]
        kind = "pure" if chosen.is_pure else chosen.update
        if kind in ("pure", "stochastic"):
            # What such weights lose is the policy's own, by name: it is shown by plain torch
            # that keeps weights and moments so, and has fp32 forwards.
            with kept_in(chosen.param_dtype, kind == "stochastic") as keep:
                moved.append(self._run((chosen.param_dtype, kind), keep))
        return moved

    def allowed(self, policy: str) -> list[float]:
        """How far each loss may be from :attr:`plain`."""
        chosen = halfstep.parse_policy(policy)
        roundoff = ROUNDOFF[chosen.compute_dtype]
        margin = MARGIN * (COARSE_MOMENTS if chosen.moments == "8bit" else 1.0)
        ways = [
            max(abs(mine - own) for mine in there)
            for own, *there in zip(self.plain, *self.controls(policy), strict=True)
        ]
        farthest = itertools.accumulate(ways, max)
        return [
            margin * (roundoff * abs(own) + way)
            for own, way in zip(self.plain, farthest, strict=True)
        ]

    def ratio(self, policy: str, losses: Sequence[float]) -> float:
        """The largest distance of ``losses`` from :attr:`plain`, in units of the allowed one."""
        if len(losses) != len(self.plain):
            return math.inf
        found = zip(losses, self.plain, self.allowed(policy), strict=True)
        return max(
            abs(mine - own) / limit if math.isfinite(mine) else math.inf
            for mine, own, limit in found
        )

    def apart(self, policy: str, losses: Sequence[float]) -> str:
        """Nothing where ``losses`` stand beside the plain ones, or a sentence on where not."""
        if len(losses) != len(self.plain):
            return f"{len(losses)} losses where plain fp32 has {len(self.plain)}"
        for step, limit in enumerate(self.allowed(policy)):
            mine, own = losses[step], self.plain[step]
            if not abs(mine - own) <= limit:
                return f"loss {step}: {mine:.6g}, plain fp32 {own:.6g} +- {limit:.2g}"
        return ""

    def _run(self, key: object, prepare: Prepare) -> list[float]:
        if key not in self.kept:
            losses = [float(loss) for loss in self.train(prepare)]
            assert losses, "the program has no losses"
            assert all(map(math.isfinite, losses)), f"{key}: a control run has lost its way"
            self.kept[key] = losses
        return self.kept[key]


@contextmanager
def kept_in(dtype: torch.dtype, stochastic: bool) -> Iterator[Prepare]:
    """Weights and moments of what is trained are numbers of ``dtype``, forwards are fp32.

    Rounded to the nearest, the optimizer computes in ``dtype`` too, as in a model that was cast as
    a whole: what underflows there is lost. Rounded stochastically, it computes in fp32. Weights
    are rounded before every forward, since a program may update them by hand; what was rounded is
    not moved by another rounding.
    """
    generator = torch.Generator().manual_seed(0)
    gradients: dict[Tensor, Tensor | None] = {}

    def round_(weights: Tensor) -> None:
        value = weights.data
        if stochastic:  # up or down to a neighbour in bf16, as the distances have it
            bits = value.view(torch.int32)
            noise = torch.randint(0, 2**16, bits.shape, generator=generator, dtype=torch.int32)
            bits.add_(noise).bitwise_and_(-(2**16))
        else:
            value.copy_(value.to(dtype))

    prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def round_all(module: nn.Module, *_: object) -> None:
        for p in module.parameters() if module in prepared else ():
            round_(p)

    def before(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Go over to ``dtype``: at once, or behind the closure, whose forward is in fp32."""
        closure = args[1] if len(args) > 1 else options.get("closure")
        if closure is None:
            lower(optimizer)
            return None

        def evaluate() -> Any:
            loss = closure()
            lower(optimizer)
            return loss

        return args[:1], {**options, "closure": evaluate}

    def lower(optimizer: Optimizer) -> None:
        for p in held(optimizer):
            gradients[p], p.grad = p.grad, None
            if not stochastic:
                p.data = p.data.to(dtype)
            grad = gradients[p]
            p.grad = None if grad is None else grad.to(p.dtype)
            for name, value in optimizer.state[p].items():
                if isinstance(value, Tensor) and value.dim():
                    optimizer.state[p][name] = value.to(p.dtype)

    def after(optimizer: Optimizer, *_: object) -> None:
        for p in held(optimizer):
            p.grad = None
            p.data = p.data.float()
            p.grad = gradients.pop(p)
            for value in optimizer.state[p].values():
                if isinstance(value, Tensor) and value.dim():
                    value.copy_(value.to(dtype))

    # Hooks of torch, not of the model: a program may pickle its model.
    hooks = [
        register_module_forward_pre_hook(round_all),
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        yield prepared.add
    finally:
        for hook in hooks:
            hook.remove()


def held(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]
