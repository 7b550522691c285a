"""Optimizers that move a weight along a direction computed from the whole tensor.

The direction needs all elements of a tensor at once: a matrix product, or means over rows. What is
done with it is element-wise again, and so one kernel stores it in any rounding mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.optim.base import LowPrecisionOptimizer, Members
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.rules import ADAMW, DIRECTED
from halfstep.optim.storage.state import StepTask, dense, flat
from halfstep.precision.agreement import MARK
from halfstep.precision.masters.local_part import is_sharded

Seen = Callable[[Tensor, Tensor, float], None]


class DirectedOptimizer(LowPrecisionOptimizer):
    """An optimizer whose rule is given a direction instead of a gradient."""

    on_direction: Seen | None = None
    """Called in a step with each parameter, its direction, of its shape, and the factor of that."""

    gathers: ClassVar[bool]
    """Whether it gathers a tensor that is sharded as a DTensor, to compute its direction."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ``torch.optim`` does; refuse parts of tensors that cannot be gathered."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except PrecisionError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        name, ours = type(self).__name__, "" if self.gathers else " or Muon"
        for parameter in group["params"] if self.is_directed(group) else ():
            sharded = is_sharded(parameter)
            if getattr(parameter, MARK, False) or (sharded and not self.gathers):
                why = "a DTensor over several ranks" if sharded else f"marked {MARK}"
                raise PrecisionError(
                    f"a parameter of shape {tuple(parameter.shape)} is {why}, and {name} needs "
                    f"whole tensors: update it by AdamW or Lion{ours if sharded else ''} of "
                    "halfstep.optim, or let every rank hold it whole"
                )

    def is_directed(self, group: Mapping[str, Any]) -> bool:
        """Whether a group's parameters are moved along a direction, rather than by AdamW."""
        return self.algorithm_of(group) is not ADAMW

    def _directions(
        self, group: dict[str, Any], plan: Plan, members: Members
    ) -> Iterator[tuple[nn.Parameter, StepTask, Tensor, float]]:
        """Each member with the direction of its update, of its shape, and a factor of that."""
        raise NotImplementedError

    def _run(self, group: dict[str, Any], plan: Plan, members: Members) -> None:
        if not self.is_directed(group):
            super()._run(group, plan, members)
            return
        for parameter, task, direction, factor in self._directions(group, plan, members):
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
