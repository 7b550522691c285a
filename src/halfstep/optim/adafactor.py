"""Adafactor: second moments as sums over rows and columns, a step relative to the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.optim.base import Members
from halfstep.optim.directed import DirectedOptimizer
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.options import check_rate, plain_options, require_option
from halfstep.optim.rules import ADAFACTOR
from halfstep.optim.storage.moments import Moments
from halfstep.optim.storage.state import StepTask, dense, new_step
from halfstep.precision.masters.rounding import Update

ROWS, COLUMNS, VARIANCE = "row_var", "col_var", "variance"  # as torch.optim.Adafactor


class Adafactor(DirectedOptimizer):
    """Adafactor, as torch.optim.Adafactor; its second moment takes next to nothing for matrices.

    Bytes per element of a matrix, besides 2 for a bf16 weight: the remainder's 2 (``split``,
    ``kahan``), 1 (``split24``) or 0. A tensor of shape (..., r, c) has r + c fp32 numbers more per
    matrix, a vector one per element.

    Example:
        >>> weight = nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
        >>> optimizer = Adafactor([weight], update="split")
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> {key: tuple(value.shape) for key, value in optimizer.state[weight].items()}
        {'step': (), 'remainder': (4, 3), 'row_var': (4, 1), 'col_var': (1, 3)}

    **Source:** Shazeer and Stern, "Adafactor", ICML 2018, algorithms 4 and 5, in the form of
    torch.optim.Adafactor.
    """

    algorithm = ADAFACTOR
    gathers = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; all but the last three arguments are those of torch.optim.Adafactor.

        Args:
            params: Parameters, groups of them, or ``model.named_parameters()``.
            lr: The largest step relative to the weights; 1 / sqrt(step) where that is smaller.
            beta2_decay: The second moment of step t is averaged with weight t ** beta2_decay.
            eps: The least root of a second moment (None: fp32's epsilon, as everything is computed
                in fp32), and the least root mean square that a weight is taken to have.
            d: The root mean square that an update is clipped to.
            weight_decay: Decoupled weight decay, multiplied by ``lr``.
            foreach: Accepted but without effect.
            maximize: Step along the gradient instead of against it.
            update: The rounding mode of bf16 weights.
            moments: ``"fp32"`` or None: sums over rows and columns leave nothing to save.
            seed: Seed of stochastic rounding.

        Raises:
            PrecisionError: For a number outside its range, other ``moments``, a parameter that is
                sharded over ranks, or the reasons of :class:`AdamW`.
        """
        check_rate(lr)
        for holds, name, value, allowed in (
            (beta2_decay <= 0, "beta2_decay", beta2_decay, "<= 0"),
            (eps[0] is None or eps[0] > 0, "epsilon1", eps[0], ">= 0, here None or > 0,"),
            (eps[1] >= 0, "epsilon2", eps[1], ">= 0"),
            (d >= 1, "Clipping threshold d", d, ">= 1"),
        ):
            if not holds:
                raise PrecisionError(f"{name} should be {allowed} but is: {value}")
        require_option(weight_decay >= 0, "weight_decay value", weight_decay, ">= 0")
        options = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        super().__init__(params, options, update=update, moments=moments, seed=seed)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_moments(group["moments"])
        super()._check_group(group)

    def check_precision(self, update: Update, moments: Moments) -> None:
        """Refuse as every optimizer here, and moments that are not fp32."""
        check_moments(moments)
        super().check_precision(update, moments)

    def _state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        state = super()._state(group, parameter)
        if ROWS not in state and VARIANCE not in state:
            state |= {
                name: torch.zeros(shape, device=parameter.device)
                for name, shape in _shapes(parameter).items()
            }
        return state

    def _averages(self, group: Mapping[str, Any], parameter: Tensor) -> float:
        sums = sum(math.prod(shape) for shape in _shapes(parameter).values())
        return sums / max(1, parameter.numel())

    def _directions(
        self, group: dict[str, Any], plan: Plan, members: Members
    ) -> Iterator[tuple[nn.Parameter, StepTask, Tensor, float]]:
        for parameter, task in members:
            yield parameter, task, *self._direction(group, plan, parameter, task)

    def _direction(
        self, group: dict[str, Any], plan: Plan, parameter: nn.Parameter, task: StepTask
    ) -> tuple[Tensor, float]:
        options, state = plain_options(group), self.state[parameter]
        eps1, eps2 = options["eps"]
        eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
        fresh = plan.step ** options["beta2_decay"]
        layout = dense(parameter)
        strides = layout.stride()
        gradient = task.flat_gradient.as_strided(layout.shape, strides).float() * plan.multiplier
        if ROWS in state:
            rows, columns = state[ROWS], state[COLUMNS]
            for sums, dim in ((rows, -1), (columns, -2)):
                norm = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True)
                sums.lerp_(norm.square_().div_(gradient.shape[dim]), fresh)
            second = rows @ columns
            second.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            second = state[VARIANCE].lerp_(gradient.square(), fresh).clone()
        direction = second.clamp_(min=eps1 * eps1).rsqrt_().mul_(gradient)
        value = self.read_master(parameter)
        size = max(eps2, _root_mean_square(value)) * min(options["lr"], plan.step**-0.5)
        return direction, size / max(1.0, _root_mean_square(direction) / options["d"])

    def convert(self, parameter: nn.Parameter, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a parameter's saved state, of this or torch's Adafactor, in any dtype.

        Raises:
            PrecisionError: If a sum is missing or of another shape.
        """
        state = super().convert(parameter, entry)
        if "step" not in entry:
            return state
        state["step"] = new_step(float(entry["step"]))
        for name, shape in _shapes(parameter).items():
            held = entry.get(name)
            if held is None or tuple(held.shape) != shape:
                raise PrecisionError(
                    f"the saved state of a parameter of shape {tuple(parameter.shape)} has no "
                    f"{name} of shape {shape}: it is from another optimizer or model"
                )
            state[name] = held.to(parameter.device, torch.float32, copy=True)
        return state


def _shapes(parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a parameter's second moment."""
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return {VARIANCE: shape}
    return {ROWS: (*shape[:-1], 1), COLUMNS: (*shape[:-2], 1, shape[-1])}


def _root_mean_square(values: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    return norm / math.sqrt(max(1, values.numel()))


def check_moments(moments: str | None) -> None:
    """Refuse moments that are not fp32."""
    if moments not in (None, "fp32"):
        raise PrecisionError(
            f"moments={moments!r}: Adafactor keeps sums over rows and columns, in fp32, of which "
            "there are too few to save bytes; allowed: fp32 (moments=fp32 in the policy)"
        )
