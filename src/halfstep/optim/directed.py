"""Optimizers that move a weight along a direction computed from the whole tensor.

The direction needs all elements of a tensor at once: a matrix product, or means over rows. What is
done with it is element-wise again, and so one kernel stores it in any rounding mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from halfstep.optim.base import LowPrecisionOptimizer, Members
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.rules import ADAMW, DIRECTED
from halfstep.optim.storage.state import StepTask, dense, flat

Seen = Callable[[Tensor, Tensor, float], None]


class DirectedOptimizer(LowPrecisionOptimizer):
    """An optimizer whose rule is given a direction instead of a gradient."""

    on_direction: Seen | None = None
    """Called in a step with each parameter, its direction, of its shape, and the factor of that."""

    def _direction(
        self, group: dict[str, Any], plan: Plan, parameter: nn.Parameter, task: StepTask
    ) -> tuple[Tensor, float]:
        """The direction of a parameter's update, of its shape, and a factor of it."""
        raise NotImplementedError

    def _run(self, group: dict[str, Any], plan: Plan, members: Members) -> None:
        if plan.algorithm is ADAMW:
            super()._run(group, plan, members)
            return
        for parameter, task in members:
            direction, factor = self._direction(group, plan, parameter, task)
            if self.on_direction is not None:
                self.on_direction(parameter, direction, factor)
            move = StepTask(
                weight=task.weight,
                remainder=task.remainder,
                moments=(),
                tops=(),
                gradient=flat(direction, dense(parameter)),
                stream=task.stream,
            )
            kernel = self._kernel(parameter.device, DIRECTED.name)
            kernel.run([move], replace(plan, algorithm=DIRECTED, moments="fp32", multiplier=factor))
