"""Steps that the device decides about, and what the host learns of them later.

On CUDA, a step of one of halfstep's optimizers is checked, clipped and applied, or skipped, by
kernels alone. The host reads the decision when a figure of the result is asked for, before the next
step, or before the next backward whose loss scale depends on it. Only then it counts the step,
names what was not finite and raises, by the same code as for a step that it decided itself. Until
then a step that did nothing has done no harm.
docs/decisions/0016-steps-on-the-device.md says what waits, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.masters.stepping import (
    Decision,
    DeviceDecision,
    Gradients,
    KeepsMasters,
    has_users,
)
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import OneRank, Ranks

Installed = Callable[[], AbstractContextManager[None]]
"""A context in which optimizers hold what they update: :meth:`MasterWeights.installed`."""


class DevicePath:
    """The steps of a Precision that are decided on the device, by its only optimizer."""

    def __init__(self, optimizer: Any, installed: Installed) -> None:
        self._optimizer = optimizer
        self._installed = installed
        self._pending: Callable[[], StepResult] | None = None  # of the last step, until it is known

    def attach(self, settle: Callable[[], Callable[[], None] | None]) -> list[RemovableHandle]:
        """Settle the last step before the optimizer's state is saved or loaded.

        ``settle`` is a weak reference to the method that does it.
        """

        def before(*_: Any) -> None:
            known = settle()
            if known is not None:
                known()

        optimizer = self._optimizer
        return [
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_load_state_dict_pre_hook(before),
        ]

    def decide(
        self, loss: Tensor, gradients: Gradients, max_norm: float | None
    ) -> DeviceDecision | None:
        """Decide on a step on the device; None where the host must.

        A user's hooks on the optimizer must not run on a skipped step, so the host decides then.
        """
        optimizer = self._optimizer
        own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if any(map(has_users, (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))):
            return None
        with self._installed():
            decision: DeviceDecision | None = optimizer.decide(loss, gradients, max_norm)
        return decision

    def result(
        self,
        decision: DeviceDecision,
        gradients: Gradients,
        learn: Callable[[Decision], StepResult],
    ) -> StepResult:
        """The result of a step just taken; ``learn`` counts it, once, when it is asked for."""
        targets, outcome = [*gradients], list[StepResult | Exception]()

        def read() -> StepResult:
            if not outcome:
                self._pending, known = None, decision.read()
                if known.nonfinite or not math.isfinite(known.loss):
                    with self._installed():
                        self._optimizer.uncount(targets)
                try:
                    outcome.append(learn(known))
                except Exception as error:  # each look at the result raises it
                    outcome.append(error)
            if isinstance(outcome[0], Exception):
                raise outcome[0]
            return outcome[0]

        self._pending = read
        return StepResult.later(read)

    def settle(self) -> None:
        """Wait for the last step, if the host does not know its outcome.

        Raises:
            NonFiniteError: That of the last step.
        """
        if self._pending is not None:
            self._pending()


def device_path(
    optimizers: Sequence[Optimizer], ranks: Ranks, installed: Installed
) -> DevicePath | None:
    """The way to step on the device; None where the host decides about every step."""
    (optimizer, *others) = optimizers
    if others or not isinstance(optimizer, KeepsMasters) or not isinstance(ranks, OneRank):
        return None
    if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        return None
    return DevicePath(optimizer, installed) if optimizer.can_decide() else None
