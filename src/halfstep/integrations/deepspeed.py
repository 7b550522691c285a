"""Tell what each step of DeepSpeed's engine did, and end a run whose steps are all skipped."""

from __future__ import annotations

import math
import sys
import warnings
from operator import attrgetter
from typing import Any, NoReturn

from halfstep.errors import NonFiniteError
from halfstep.precision.checks import some
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import NonFinite, find_nonfinite, global_norm

_LIMIT = 3  # steps in a row that may be skipped while the loss scale does not fall


class StepObserver:
    """See what DeepSpeed's engine does in each optimizer step: ``StepObserver(engine)``, once.

    ``engine.step()`` stays the call, whoever makes it, and no number changes. A run that only
    skips, or applies gradients that are not finite, ends in a :class:`halfstep.NonFiniteError`; at
    the floor of its loss scale DeepSpeed ends one itself.

    Attributes:
        last_step: What the latest optimizer step did, or None before the first. Its ``loss`` is
            NaN: the engine does not keep it. The first skip in a row names no parameters.
    """

    def __init__(self, engine: Any) -> None:
        """Observe what ``deepspeed.initialize`` returned first."""
        self.last_step: StepResult | None = None
        self._engine, self._stuck, self._row = engine, 0, 0
        # What torch_autocast in fp16 scales by, with ZeRO and without.
        zero = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
        self._scaler = zero or getattr(engine, "torch_autocast_z0_gradscaler", None)
        # step() calls it where an accumulation ends, and so does a pipeline's train_batch().
        self._take, engine._take_model_step = engine._take_model_step, self._observed

    def _observed(self, *args: Any, **kwargs: Any) -> None:
        engine, scale = self._engine, self._scale()
        checked = hasattr(engine.optimizer, "overflow")  # what torch's own optimizers do is not
        seen = [p.grad for p in engine.module.parameters() if not checked and p.grad is not None]
        norm, found = global_norm(seen), NonFinite((), ())
        broken = not math.isfinite(norm)
        if broken or self._row:
            found = self._found()
        if broken and self._scaler is None:
            self._tell(False, scale, norm, found)
            _end("gradients", "would apply a step", found)
        self._take(*args, **kwargs)
        applied = engine.was_step_applied() and not broken  # it is true where torch's scaler skips
        if checked:
            norm = engine.get_global_grad_norm()
        self._tell(applied, scale, norm, found)
        if applied and norm is not None and not math.isfinite(norm):
            _end("gradients", "has applied a step (go back to a checkpoint)", found)
        if self._stuck >= _LIMIT:
            _end("skip_limit", f"skips {self._row} steps in a row; at loss scale {scale:g}", found)

    def _tell(self, applied: bool, scale: float, norm: Any, found: NonFinite) -> None:
        after, total = self._scale(), self.last_step.skipped_total if self.last_step else 0
        if not (applied or total):
            warnings.warn(f"DeepSpeed skips a step at loss scale {scale:g}", stacklevel=5)
        self._row = 0 if applied else self._row + 1
        # A scale below 1 does not help, and torch's falls to 0.
        self._stuck = 0 if applied or 1 <= after < scale else self._stuck + 1
        self.last_step = StepResult(
            applied=applied, reason=None if applied else found.reason or "overflow", loss=math.nan,
            grad_norm=math.nan if norm is None else float(norm) / (scale if self._scaler else 1),
            loss_scale=scale, next_loss_scale=after, skipped_total=total + (not applied),
            skipped_in_a_row=self._row, nonfinite_parameters=found.names,
        )  # fmt: skip

    def _scale(self) -> float:
        own = getattr(self._engine.optimizer, "loss_scale", 1.0)
        return float(self._scaler.get_scale() if self._scaler else own)

    def _found(self) -> NonFinite:
        """Look at each gradient; ZeRO's are gathered, one by one, by all ranks together."""
        utils = sys.modules.get("deepspeed.utils")
        whole = utils.safe_get_full_grad if utils else attrgetter("grad")
        named = ((name, whole(p)) for name, p in self._engine.module.named_parameters())
        return find_nonfinite((name, grad) for name, grad in named if grad is not None)


def _end(cause: str, what: str, found: NonFinite) -> NoReturn:
    where = f": {found.what} in the gradients of {some(found.names)}" if found.names else ""
    raise NonFiniteError(f"DeepSpeed {what}{where}", cause=cause, parameters=found.names)
