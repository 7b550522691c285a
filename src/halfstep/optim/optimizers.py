"""AdamW, SGD with momentum and Lion over low-precision weights and moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from halfstep.optim.algorithms import ADAMW, LION, SGD as SGD_RULE
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.moments import Moments
from halfstep.precision.policy import Update


class AdamW(LowPrecisionOptimizer):
    """Adam with decoupled weight decay.

    Bytes per parameter between micro-batches, beside the weight's own 2: remainder 2 (``split``,
    ``kahan``), 1 (``split24``) or 0; moments 8 (``fp32``), 4 (``bf16``) or 2 (``8bit``).

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1).to(torch.bfloat16)
        >>> optimizer = AdamW(model.parameters(), lr=1e-3, update="split", moments="8bit")
        >>> model(torch.ones(8, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    algorithm = ADAMW

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; the first five arguments as ``torch.optim.AdamW``.

        Raises:
            ValueError: For a number outside its range.
            PrecisionError: For an unknown ``update`` or ``moments``, or fp16 parameters.
        """
        _require(lr >= 0, "lr", lr, ">= 0")
        _require(all(0 <= beta < 1 for beta in betas), "betas", betas, "0 <= beta < 1")
        _require(eps > 0, "eps", eps, "> 0")
        _require(weight_decay >= 0, "weight_decay", weight_decay, ">= 0")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, update=update, moments=moments, seed=seed)


class SGD(LowPrecisionOptimizer):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``."""

    algorithm = SGD_RULE

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; the moment is kept even where ``momentum`` is 0.

        Raises:
            ValueError: For a number outside its range, or nesterov without momentum.
            PrecisionError: For an unknown ``update`` or ``moments``, or fp16 parameters.
        """
        _require(lr >= 0, "lr", lr, ">= 0")
        _require(momentum >= 0, "momentum", momentum, ">= 0")
        _require(weight_decay >= 0, "weight_decay", weight_decay, ">= 0")
        _require(
            not nesterov or (momentum > 0 and dampening == 0),
            "nesterov",
            nesterov,
            "with momentum > 0 and dampening 0",
        )
        options = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, options, update=update, moments=moments, seed=seed)


class Lion(LowPrecisionOptimizer):
    """The sign of an interpolated momentum, with decoupled weight decay; one moment."""

    algorithm = LION

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer.

        Raises:
            ValueError: For a number outside its range.
            PrecisionError: For an unknown ``update`` or ``moments``, or fp16 parameters.
        """
        _require(lr >= 0, "lr", lr, ">= 0")
        _require(all(0 <= beta < 1 for beta in betas), "betas", betas, "0 <= beta < 1")
        _require(weight_decay >= 0, "weight_decay", weight_decay, ">= 0")
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, options, update=update, moments=moments, seed=seed)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value}; allowed: {allowed}")
