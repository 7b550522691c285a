"""torch.amp.GradScaler that remembers what each step did, and behaves as torch's in all else.

Nothing here waits for a device that torch's scaler would not wait for: flags, scales and counters
are kept as tensors and read when :attr:`RecordingScaler.last_step` is.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.integrations.grad_scaler.local_gradients import (
    LocalGradients,
    flag_of,
    kinds,
    stepping,
)
from halfstep.integrations.grad_scaler.parameter_names import (
    Names,
    accepts_low_precision,
    half_gradients,
    half_trainable,
    name_table,
    refuse_half,
    refuse_pure,
    upcast_trainable_,
)
from halfstep.integrations.grad_scaler.record import (
    Marks,
    SkipCount,
    StepRecord,
    any_skipped,
    hold,
    on_host,
    total,
)
from halfstep.precision.agreement import ranks_of_this_process
from halfstep.precision.result import Reason, StepResult
from halfstep.precision.scaling.gradients import OneRank, Ranks

_NOT_CHECKED = "No inf checks were recorded"  # torch's words, when no gradient was seen


class RecordingScaler(torch.amp.GradScaler):
    """Torch's loss scaler with an account of every step; see :class:`halfstep.GradScaler`."""

    _scale: Tensor | None
    _allow_pure = False  # whether 16-bit weights are trained with nothing behind them

    def __init__(
        self,
        device: str,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        names: Names | None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._names = name_table(names)
        self._count = SkipCount()
        self._loss: Tensor | None = None
        self._round: list[StepRecord] = []  # the steps since the last update
        self._marks: dict[int, Marks] = {}  # by id(optimizer), since the last update
        self._last: StepRecord | StepResult | None = None
        self._host_flag: float | None = None
        self._stepping = False

    @property
    def last_step(self) -> StepResult | None:
        """What the latest call of ``step`` did, or None before the first (or if disabled).

        Reading it may wait for the device; keeping it for you does not. ``applied`` comes from
        the overflow flag, so it is right for fused optimizers too, which are called either way.
        Read it after ``update``: before, ``next_loss_scale`` is still the present scale.

        * ``loss``: the last value given to ``scale`` if it was a scalar, else NaN; with gradient
          accumulation the last micro-batch's.
        * ``grad_norm``: NaN, it is not computed here.
        * ``skipped_total``, ``skipped_in_a_row``: rounds between two calls of ``update`` in which
          any optimizer's step was skipped; with one optimizer, its steps.
        * ``nonfinite_parameters``: known from the time of the step on a CPU, for optimizers that
          are not fused, and after an explicit ``unscale_``. Else looked for in the gradients when
          this is read: empty, with reason ``"overflow"``, if they are cleared or a next loss was
          scaled by then. On a GPU after an explicit ``unscale_``, a gradient that holds both NaN
          and infinities counts as NaN.
        """
        last = self._last
        if not isinstance(last, StepRecord):
            return last
        pending = any(record.skipped for record in self._round)
        in_a_row = self._count.in_a_row + 1 if pending else self._count.in_a_row
        return last.result(self._names, self._count.total + pending, in_a_row)

    @property
    def calibrating(self) -> bool:
        """Whether no step was applied yet: skips are then the scale finding its level."""
        return not self._count.any_applied and not any(not step.skipped for step in self._round)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse, before training, what would fail at the first step or lose updates in silence.

        Raises:
            PrecisionError: If the optimizer has trainable fp16 parameters, whose gradients cannot
                be unscaled, or bf16 ones, whose small updates are lost; unless it has
                ``accepts_low_precision_gradients = True``. Fused optimizers of torch are refused
                here although their step would take fp16. With ``allow_pure=True``, or if the scaler
                is disabled, bf16 passes.
        """
        if self._enabled and not accepts_low_precision(optimizer):
            what = "The loss scaler needs fp32 gradients"
            refuse_half(optimizer, half_trainable(optimizer), self._names, what)
        if self._enabled and not self._allow_pure:
            refuse_pure(optimizer, self._names)

    def upcast_trainable_(self, optimizer: Optimizer) -> int:
        """Make the optimizer's trainable fp16 and bf16 parameters, and their gradients, fp32.

        In place, so the model sees it; frozen parameters stay as they are. Call it before
        DistributedDataParallel or torch.compile takes the model.

        Returns:
            The bytes this added.

        Raises:
            PrecisionError: If there are any and the optimizer has state in their dtype already.
        """
        return upcast_trainable_(optimizer, self._names)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        allowed = allow_fp16 or accepts_low_precision(optimizer)
        if not allowed:
            what = "Attempting to unscale FP16 gradients"  # torch's words, which people search for
            refuse_half(optimizer, half_gradients(optimizer), self._names, what)
        source = self._gradients_of(optimizer)
        return super()._unscale_grads_(source, inv_scale, found_inf, allowed)

    def _gradients_of(self, optimizer: Optimizer) -> Any:
        """Where torch finds the gradients that it checks and unscales."""
        return optimizer

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once a step; as torch's.

        Raises:
            PrecisionError: For fp16 gradients (it is a ``ValueError``), before any is changed,
                unless the optimizer has ``accepts_low_precision_gradients = True``.
        """
        super().unscale_(optimizer)
        if not self._enabled:
            return
        flags = self._found_inf_per_device(optimizer).values()
        if all(map(on_host, flags)):
            if any(flag.item() for flag in flags):
                self._marks[id(optimizer)] = Marks(optimizer, self._names, exact=True)
        elif not self._stepping:  # clipping may follow, which spreads one NaN over all gradients
            self._marks[id(optimizer)] = Marks(optimizer, self._names, exact=False)

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        # torch waits for the flags here; wait once, keep the numbers and hand them on.
        found = optimizer_state["found_inf_per_device"]
        host = {device: flag.cpu() for device, flag in found.items()}
        self._host_flag = sum(float(flag.item()) for flag in host.values())
        known = {**optimizer_state, "found_inf_per_device": host}
        return super()._maybe_opt_step(optimizer, known, *args, **kwargs)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless done, and step unless a gradient is not finite; as torch's.

        Returns:
            What ``optimizer.step`` returned; None if it was skipped. See :attr:`last_step`.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        self._host_flag, self._stepping = None, True
        try:
            with self._around_step(optimizer):
                value = super().step(optimizer, *args, **kwargs)
        except AssertionError as error:
            if not str(error).startswith(_NOT_CHECKED):
                raise
            raise AssertionError(f"{error} {_why_unchecked(optimizer)}") from None
        finally:
            self._stepping = False
        self._remember(optimizer)
        return value

    def _around_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Within it torch checks, unscales and steps."""
        return nullcontext()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale after all optimizers' steps of an iteration, or set it; as torch's."""
        self._torch_update(new_scale)
        self._close_round()

    def _torch_update(self, new_scale: float | Tensor | None) -> None:
        try:
            super().update(new_scale)
        except AssertionError as error:
            if not str(error).startswith(_NOT_CHECKED):
                raise
            raise AssertionError(
                f"{error} Call scaler.step(optimizer) first; if it was called, no parameter of its "
                "optimizer had a gradient: frozen, the loss detached, or the model moved or "
                "replaced after the optimizer was made"
            ) from None

    def _expire(self) -> None:
        """A backward comes and changes the gradients, so they are no longer those of a step."""
        records = [*self._round, self._last]
        for record in records:
            if isinstance(record, StepRecord):
                record.fresh = False

    def _remember(self, optimizer: Optimizer) -> None:
        flags = self._found_inf_per_device(optimizer).values()
        if not flags or self._scale is None:
            self._last = None  # no gradient was seen: torch says so in update()
            return
        found = self._host_flag
        held = hold(total(flags, self._scale.device)) if found is None else found
        marks = self._marks.get(id(optimizer))
        if marks is None and not isinstance(held, Tensor) and held:
            marks = Marks(optimizer, self._names, exact=True)
        scale = hold(self._scale)
        self._last = StepRecord(
            optimizer=weakref.ref(optimizer),
            found=held,
            loss=self._loss,
            loss_scale=scale,
            next_loss_scale=scale,
            marks=marks,
        )
        self._round.append(self._last)

    def _close_round(self) -> None:
        """Count the steps since the last update, and tell them the scale that follows."""
        if self._round and self._scale is not None:
            self._count.add(any_skipped(self._round, self._scale.device))
            following = hold(self._scale)
            for record in self._round:
                record.next_loss_scale = following
        self._round, self._marks = [], {}

    def _culprits(self) -> tuple[Reason, tuple[str, ...]]:
        """Why this round overflowed, and whose gradients were not finite, as far as known."""
        found = [step.nonfinite(self._names) for step in self._round if step.skipped]
        found += [marks.read() for marks in self._marks.values()]
        names = dict.fromkeys(name for _, some_names in found for name in some_names)
        infinite = not names or any(r == "overflow" for r, some_names in found if some_names)
        return "overflow" if infinite else "nan_gradients", tuple(names)

    def __getstate__(self) -> dict[str, Any]:
        """Everything in plain numbers; parameter names do not travel to another process."""
        state = super().__getstate__()
        state |= {"_last": self.last_step, "_count": self._count.resolved(), "_loss": None}
        state |= {"_round": [], "_marks": {}, "_host_flag": None, "_names": {}}
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A scaler of its own, with the names of the same parameters, or of their copies."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        clone._names = {memo.get(id(p), p): name for p, name in self._names.items()}
        return clone


def _why_unchecked(optimizer: Optimizer) -> str:
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    frozen = sum(not p.requires_grad for p in owned)
    return (
        f"No parameter of this optimizer got a gradient: {type(optimizer).__name__} holds "
        f"{len(owned)} tensors, {frozen} of them frozen (requires_grad=False); for the others the "
        "loss was detached or does not depend on them, or the model was moved or replaced after "
        "the optimizer was made"
    )


# A loss scaler whose ranks step together or not at all, and keep one scale.
#
# Ranks of plain replicas, DDP, FSDP2 and tensor parallelism each see gradients of their own: parts
# of one tensor, or what a hook or a fault has changed on one of them. torch's scaler lets each
# decide by its own; one that skips and one that steps then have different weights and different
# scales for good. Here the flag of every optimizer is the MAX over ranks, in one small collective
# beside the check, and no host waits for it that would not wait anyway.
#
# **Source:** Megatron-Core reduces ``found_inf`` with MAX over all model-parallel ranks.


class AgreeingScaler(RecordingScaler):
    """:class:`RecordingScaler` over ranks; alone, or with ``OneRank()``, it is nothing more."""

    def __init__(self, *args: Any, ranks: Ranks | None = None) -> None:
        super().__init__(*args)
        self._ranks = ranks

    def _agreeing(self, device: torch.device) -> Ranks:
        return ranks_of_this_process(device) if self._ranks is None else self._ranks

    def _gradients_of(self, optimizer: Optimizer) -> Any:
        found = kinds(optimizer)
        alone = isinstance(self._agreeing(torch.device(self._device)), OneRank)
        torchs = found <= {"plain"} or (alone and found == {"sharded"})
        return optimizer if torchs else LocalGradients(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        ranks = self._agreeing(found_inf.device)
        if isinstance(ranks, OneRank):
            return flags
        none = found_inf.new_ones(()) if not flags else found_inf.new_zeros(())
        found = flag_of(flags, found_inf.device) if flags else found_inf.new_zeros(())
        marks = torch.stack([found, none])
        ranks.worst_(marks)
        if flags and on_host(marks) and marks[1].item():
            raise PrecisionError(
                "another rank's optimizer has no gradient in this step, so none steps; every rank "
                "must use the model in each step, or pass ranks=halfstep.OneRank() where each "
                "process trains a model of its own"
            )
        for flag in flags.values():  # not even where a rank without gradients raises
            flag.copy_(marks.amax(), non_blocking=True)
        return flags

    def _around_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return stepping(optimizer)
