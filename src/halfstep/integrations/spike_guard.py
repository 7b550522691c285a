"""Finite spikes in the loops of Accelerate and the Transformers Trainer.

Their steps are judged like those of :class:`halfstep.Precision`: loss and norm of the unscaled
gradients, the same on every rank, are compared with the steps before, in
:class:`~halfstep.integrations.loop_scaler.LoopScaler`, before the optimizer is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import PrecisionError, SpikeError
from halfstep.integrations.grad_scaler.recording import stored_gradients
from halfstep.precision.recovery import Guard, OnNonFinite, OnSpike, spiking
from halfstep.precision.scaling.gradients import Ranks, global_norm
from halfstep.precision.scaling.spikes import Spike, SpikeDetector


class SpikeGuard:
    """Judges the steps of one optimizer, and answers a spike.

    Args:
        choice: What to do about one.
        models: A function that returns the loop's models.
        optimizers: The same for its optimizers.
    """

    def __init__(
        self,
        choice: OnSpike,
        models: Callable[[], Sequence[nn.Module]],
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self.choice = choice
        self.detector = SpikeDetector()
        self._models, self._optimizers = models, optimizers
        self._guard: Guard | None = None
        self._kept: Tensor | float | None = None  # the norm before clipping, if it was clipped
        self.measured = (0.0, 0.0)
        """Loss and norm of the step that was judged last, over all ranks."""
        self.spike: Spike | None = None
        """What is wrong with it."""

    def keep_norm(self, norm: Any) -> None:
        """Remember the norm that clipping has measured, as it changes the gradients."""
        self._kept = norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def judge(self, optimizer: Optimizer, loss: Tensor | None, ranks: Ranks) -> Spike | None:
        """Test a finite step; all ranks call it together.

        Raises:
            PrecisionError: If the loop has several optimizers, or no loss is known.
        """
        if len(self._optimizers()) != 1:
            raise PrecisionError(
                f"on_spike={self.choice} with {len(self._optimizers())} optimizers, whose losses "
                "are not known apart; allowed: one optimizer, or halfstep.Precision for each"
            )
        if loss is None:
            raise PrecisionError(
                f"on_spike={self.choice} and no loss is known: back-propagate a scalar loss "
                "through accelerator.backward"
            )
        kept, self._kept = self._kept, None
        parts: dict[int, list[Tensor]] = {}
        if kept is not None:  # of all ranks already
            parts[1] = [torch.as_tensor(kept, dtype=torch.float32, device=loss.device)]
        else:
            for parameter, gradient in stored_gradients(optimizer):
                parts.setdefault(ranks.parts_of(parameter), []).append(gradient)
        self.measured = ranks.measure(loss, parts, global_norm)
        self.spike = self.detector.test(*self.measured)
        return self.spike

    def forget(self) -> None:
        """Forget what was measured of a step that is not finite."""
        self._kept = self.spike = None

    def applied(self) -> None:
        """Remember the step, which was applied."""
        self.detector.remember(*self.measured)
        guard = self._started()
        if guard is not None:
            guard.applied()

    def answer(self, ranks: Ranks) -> int:
        """Raise, or return how many applied steps were undone."""
        assert self.spike is not None
        error: SpikeError = spiking(self.spike, *self.measured)
        guard = self._started(ranks)
        if guard is None:
            raise error
        return guard.answer(error)

    def begin(self, ranks: Ranks) -> None:
        """Take the first copy for a rollback, before the first step."""
        self._started(ranks)

    def _started(self, ranks: Ranks | None = None) -> Guard | None:
        if self._guard is None and ranks is not None and self.choice.action != "stop":
            models = nn.ModuleList(self._models())
            choices = OnNonFinite(), self.choice
            self._guard = Guard(choices, [self.detector], models, self._optimizers(), {}, ranks)
            self._guard.start(0)
        return self._guard

    def state(self) -> dict[str, Any]:
        """The detector's state; copies for a rollback are taken anew."""
        return self.detector.state()

    def restore_(self, state: object) -> None:
        """Continue from :meth:`state`, or begin anew from None."""
        self.detector.restore_(state)
        self._guard = None
