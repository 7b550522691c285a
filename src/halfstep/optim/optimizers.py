"""AdamW, SGD with momentum and Lion over low-precision weights and moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.options import Storage
from halfstep.optim.rules import ADAMW, LION, SGD as SGD_RULE


class AdamW(LowPrecisionOptimizer):
    """Adam with decoupled weight decay.

    Bytes per parameter between micro-batches, besides 2 for a bf16 weight: remainder 2 (``split``,
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
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **storage: Unpack[Storage],
    ) -> None:
        """Make the optimizer; the first five arguments are those of ``torch.optim.AdamW``.

        Args:
            params: Parameters, groups of them, or ``model.named_parameters()``.
            lr: A number, or a tensor of one element, which the host reads at every step.
            betas: Decay rates of the two moments.
            eps: Added to the square root of the second moment.
            weight_decay: Decoupled weight decay, multiplied by ``lr``.
            storage: ``update``, the rounding mode of bf16 weights; ``moments``, their format;
                ``seed``, of stochastic rounding.
        """
        # all keys of torch's, so that a sharded checkpoint, which is read by key, goes both ways
        theirs = torch.optim.AdamW([torch.empty(0)]).defaults
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, theirs | options, **storage)


class SGD(LowPrecisionOptimizer):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``."""

    algorithm = SGD_RULE

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **storage: Unpack[Storage],
    ) -> None:
        """Make the optimizer; it stores the moment even if ``momentum`` is 0.

        The first six arguments are those of ``torch.optim.SGD``.
        """
        theirs = torch.optim.SGD([torch.empty(0)]).defaults
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        options |= {"dampening": dampening, "nesterov": nesterov}
        super().__init__(params, theirs | options, **storage)


class Lion(LowPrecisionOptimizer):
    """Lion: steps by the sign of an interpolated momentum, with decoupled weight decay."""

    algorithm = LION

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **storage: Unpack[Storage],
    ) -> None:
        """Make the optimizer; the options are those of :class:`AdamW`."""
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, options, **storage)
