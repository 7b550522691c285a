"""AdamW, SGD with momentum and Lion over low-precision weights and moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.moments import Moments
from halfstep.optim.options import checked_betas, require_option
from halfstep.optim.rules import ADAMW, LION, SGD as SGD_RULE
from halfstep.precision.masters.rounding import Update


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
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; all but the last three arguments are those of ``torch.optim.AdamW``.

        Args:
            params: Parameters, groups of them, or ``model.named_parameters()``.
            lr: A number, or a CPU tensor of one element, which is read at every step.
            betas: Decay rates of the two moments, as numbers or CPU tensors of one element.
            eps: Added to the square root of the second moment.
            weight_decay: Decoupled weight decay, multiplied by ``lr``.
            maximize: Step along the gradient instead of against it.
            foreach: Accepted but without effect: the kernels always take one pass over memory.
            fused: Accepted but without effect, as ``foreach``.
            update: The rounding mode of bf16 weights.
            moments: The format of the moments.
            seed: Seed of stochastic rounding.

        Raises:
            PrecisionError: For a number outside its range, an unknown ``update`` or ``moments``, or
                an unsupported option or parameter dtype.
        """
        require_option(bool(lr >= 0), "learning rate", lr, "lr >= 0")
        betas = checked_betas(betas)
        require_option(
            eps > 0, "epsilon value", eps, "eps > 0; with 0, elements at rest become NaN"
        )
        require_option(weight_decay >= 0, "weight_decay value", weight_decay, ">= 0")
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, options, update=update, moments=moments, seed=seed)


class SGD(LowPrecisionOptimizer):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``."""

    algorithm = SGD_RULE

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; it stores the moment even if ``momentum`` is 0.

        All but the last three arguments are those of ``torch.optim.SGD``; for ``foreach``
        and ``fused`` see :class:`AdamW`.

        Raises:
            PrecisionError: For a number outside its range, nesterov without momentum, or for the
                reasons of :class:`AdamW`.
        """
        require_option(bool(lr >= 0), "learning rate", lr, "lr >= 0")
        require_option(momentum >= 0, "momentum value", momentum, ">= 0")
        require_option(bool(weight_decay >= 0), "weight_decay value", weight_decay, ">= 0")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise PrecisionError(
                "Nesterov momentum requires a momentum and zero dampening: nesterov=True is "
                "allowed with momentum > 0 and dampening 0"
            )
        options = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, options, update=update, moments=moments, seed=seed)


class Lion(LowPrecisionOptimizer):
    """Lion: steps by the sign of an interpolated momentum, with decoupled weight decay."""

    algorithm = LION

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; the options are those of :class:`AdamW`.

        Raises:
            PrecisionError: For a number outside its range, or the reasons of :class:`AdamW`.
        """
        require_option(bool(lr >= 0), "learning rate", lr, "lr >= 0")
        betas = checked_betas(betas)
        require_option(weight_decay >= 0, "weight_decay value", weight_decay, ">= 0")
        options = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, options, update=update, moments=moments, seed=seed)
