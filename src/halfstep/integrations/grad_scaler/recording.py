"""A torch.amp.GradScaler that records what each step did, and otherwise behaves as torch's.

Reading a value from a GPU makes the host wait, and nothing here waits where torch's scaler would
not: flags, scales and counters stay tensors until :attr:`RecordingScaler.last_step` is read; those
that are already on the host are kept as numbers.

The ranks of a run step together or not at all, and keep one scale. But under plain replication,
DDP, FSDP2 and tensor parallelism each rank sees different gradients: parts of one tensor, or values
that a hook or a fault changed on one rank. With torch's scaler each rank decides alone; if one
skips and one steps, their weights and scales differ for good. Here the flag of every optimizer is
the MAX over ranks, in one small collective beside the check.

**Source:** Megatron-Core reduces ``found_inf`` with MAX over all model-parallel ranks.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.integrations.grad_scaler.local_gradients import LocalGradients, kinds, stepping
from halfstep.integrations.grad_scaler.parameter_names import (
    Names,
    accepts_low_precision,
    low_trainable,
    name_table,
    owned,
    parameter_names,
    refuse_half,
    refuse_pure,
    with_gradients,
)
from halfstep.precision.agreement import ranks_of_this_process
from halfstep.precision.casting.cast import upcast_
from halfstep.precision.checks import some
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.policy.policy import dtype_name
from halfstep.precision.result import Reason, StepResult
from halfstep.precision.scaling.gradients import OneRank, Ranks

_NOT_CHECKED = "No inf checks were recorded"  # torch's words, when no gradient was seen

Held = Tensor | float
"""A number, or a 0-dim tensor on a device whose value has not been read yet."""


def on_host(tensor: Tensor) -> bool:
    """Whether the tensor's value can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def hold(tensor: Tensor) -> Held:
    """The tensor's present value: a number where reading it is free, else a copy on its device."""
    return float(tensor.item()) if on_host(tensor) else tensor.detach().clone()


def total(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of per-device flags on one device, in a new tensor."""
    moved = [flag.to(device, non_blocking=True) for flag in flags]
    return torch.stack(moved).sum()


def stored_gradients(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Each parameter that has a gradient, with the values that this rank stores of it."""
    every = ((p, p.grad) for p in with_gradients(optimizer))
    return [(p, g._values() if g.is_sparse else local_part(g)) for p, g in every if g is not None]


class Marks:
    """Which gradients were not finite at one moment, kept without waiting for the device.

    Args:
        optimizer: The optimizer whose gradients are examined; only names of it are kept.
        known: Names of parameters, as far as known.
        exact: Also find infinities in tensors that hold NaN. This reads the gradients twice more,
            so it is for steps that are known to have overflowed. Without it, a tensor that holds
            both counts as NaN.
    """

    def __init__(self, optimizer: Optimizer, known: Mapping[Tensor, str], *, exact: bool) -> None:
        names = parameter_names(optimizer, known)
        with torch.no_grad():
            found = [(p, v.detach()) for p, v in stored_gradients(optimizer) if v.numel()]
            # Tensors of other types cannot be mixed with plain ones in one call.
            found = [(p, v) for p, v in found if type(v) in (Tensor, torch.nn.Parameter)]
            values = [value for _, value in found]
            self._names = [names[parameter] for parameter, _ in found]
            # The largest absolute value of each: NaN if there is a NaN, else inf if there is one.
            self._norms = list(torch._foreach_norm(values, math.inf)) if values else []
            self._inf = [value.isinf().any() for value in values] if exact else None

    def read(self) -> tuple[Reason, tuple[str, ...]]:
        """The reason and the parameters' names, NaN first. Synchronises with the host."""
        nan: list[str] = []
        inf: list[str] = []
        for name, norm in zip(self._names, self._norms, strict=True):
            value = float(norm)
            if not math.isfinite(value):
                (nan if math.isnan(value) else inf).append(name)
        any_inf = bool(inf) or any(map(bool, self._inf or ()))
        return "nan_gradients" if nan and not any_inf else "overflow", (*nan, *inf)


class SkipCount:
    """Counts skipped rounds, on the device of the flags.

    A round is the time between two calls of ``update``; with one optimizer it is a step.
    """

    def __init__(self, total: int = 0, in_a_row: int = 0, *, applied: bool = False) -> None:
        self._total: Held = total
        self._last_applied: Held = int(applied)  # number of that round, or 0
        self._rounds = int(applied) + in_a_row

    def add(self, skipped: Held) -> None:
        """Count one round; ``skipped`` is 1 or 0."""
        self._rounds += 1
        self._total = self._total + skipped
        self._last_applied = self._last_applied + (self._rounds - self._last_applied) * (
            1 - skipped
        )

    @property
    def total(self) -> int:
        """Skipped rounds so far."""
        return int(self._total)

    @property
    def in_a_row(self) -> int:
        """Skipped rounds since the last one that was applied."""
        return self._rounds - int(self._last_applied)

    @property
    def any_applied(self) -> bool:
        """Whether any round was applied."""
        return int(self._last_applied) > 0

    def resolved(self) -> SkipCount:
        """The same count in plain numbers."""
        return SkipCount(self.total, self.in_a_row, applied=self.any_applied)


@dataclass(eq=False, kw_only=True)
class StepRecord:
    """One call of ``step``, resolved to a :class:`StepResult` when it is read."""

    optimizer: weakref.ref[Optimizer]
    found: Held
    """Above 0 if any gradient was not finite."""
    loss: Tensor | None
    loss_scale: Held
    next_loss_scale: Held
    marks: Marks | None
    """The non-finite gradients; None if they must still be searched for."""
    spike: Reason | None = None
    """Why the finite step was not applied, where spikes are looked for."""
    norm: float = math.nan
    """The norm of its unscaled gradients before clipping, where it was measured."""
    undone: int = 0
    """Applied steps that were undone with it."""
    fresh: bool = True
    """Whether the gradients, if there are any, are still those of this step."""

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped, so that the weights did not change."""
        return self.spike is not None or float(self.found) > 0

    def nonfinite(self, known: Mapping[Tensor, str]) -> tuple[Reason, tuple[str, ...]]:
        """Why the step was skipped, and whose gradients were not finite, as far as known."""
        if self.spike is not None:
            return self.spike, ()
        optimizer = self.optimizer()
        if self.marks is None and self.fresh and optimizer is not None:
            marks = Marks(optimizer, known, exact=True)
            if marks.read()[1]:  # else the gradients were cleared
                self.marks = marks
        return ("overflow", ()) if self.marks is None else self.marks.read()

    def result(self, known: Mapping[Tensor, str], total: int, in_a_row: int) -> StepResult:
        """The step's result in numbers; ``total`` and ``in_a_row`` include this step's round."""
        skipped = self.skipped
        reason, found = self.nonfinite(known) if skipped else (None, ())
        return StepResult(
            applied=not skipped,
            reason=reason,
            loss=math.nan if self.loss is None else float(self.loss),
            grad_norm=self.norm,
            rolled_back=self.undone > 0,
            steps_undone=self.undone,
            loss_scale=float(self.loss_scale),
            next_loss_scale=float(self.next_loss_scale),
            skipped_total=total,
            skipped_in_a_row=in_a_row if skipped else 0,
            nonfinite_parameters=found,
        )


def any_skipped(records: Sequence[StepRecord], device: torch.device) -> Held:
    """1 if any of the steps was skipped, else 0, without waiting for a device."""
    waiting = [record.found for record in records if isinstance(record.found, Tensor)]
    known = float(any(r.skipped for r in records if not isinstance(r.found, Tensor)))
    return (total(waiting, device) + known).clamp(max=1.0) if waiting else known


class RecordingScaler(torch.amp.GradScaler):
    """Torch's loss scaler with a record of every step; see :class:`halfstep.GradScaler`."""

    _scale: Tensor | None

    def __init__(
        self, *torchs: Any, names: Names | None, ranks: Ranks | None, allow_pure: bool
    ) -> None:
        super().__init__(*torchs)
        self._names = name_table(names)
        self._ranks = ranks
        self._allow_pure = allow_pure  # whether 16-bit weights may lose small updates
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

        Reading it may wait for the device; recording it does not. ``applied`` comes from the
        overflow flag, so it is right for fused optimizers too, which are called in either case.
        Read it after ``update``: before, ``next_loss_scale`` is still the current scale.

        * ``loss``: the last value given to ``scale`` if it was a scalar, else NaN; with gradient
          accumulation the last micro-batch's.
        * ``grad_norm``: NaN, as it is not computed here; measured where spikes are looked for.
        * ``skipped_total``, ``skipped_in_a_row``: rounds between two calls of ``update`` in which
          any optimizer's step was skipped; with one optimizer, its steps.
        * ``nonfinite_parameters``: recorded at the step on a CPU, for optimizers that are not
          fused, and after an explicit ``unscale_``. Otherwise the gradients are searched when this
          is read; it is empty, with reason ``"overflow"``, if they were cleared or another loss was
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
        """Whether no step was applied yet, so that skips only mean the scale finds its level."""
        return not self._count.any_applied and not any(not step.skipped for step in self._round)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse, before training, what would fail at the first step or silently lose updates.

        Raises:
            PrecisionError: If the optimizer has trainable fp16 parameters, whose gradients cannot
                be unscaled, or bf16 ones, whose small updates are lost; unless it has
                ``accepts_low_precision_gradients = True``. Fused optimizers of torch are refused
                here although their step would take fp16. With ``allow_pure=True``, or if the scaler
                is disabled, bf16 passes.
        """
        if self._enabled and not accepts_low_precision(optimizer):
            half = [p for p in owned(optimizer) if p.requires_grad and p.dtype == torch.float16]
            refuse_half(optimizer, half, self._names, "The loss scaler needs fp32 gradients")
        if self._enabled and not self._allow_pure:
            refuse_pure(optimizer, self._names)

    def upcast_trainable_(self, optimizer: Optimizer) -> int:
        """Make the optimizer's trainable fp16 and bf16 parameters, and their gradients, fp32.

        The change is in place, so the model has it too; frozen parameters stay as they are. Call it
        before the model is wrapped by DistributedDataParallel or torch.compile.

        Returns:
            The number of bytes added.

        Raises:
            PrecisionError: If there are any and the optimizer already has state in their dtype.
        """
        low = low_trainable(dict.fromkeys(owned(optimizer)))
        if low and optimizer.state:
            names = parameter_names(optimizer, self._names)
            dtypes = ", ".join(sorted({dtype_name(p.dtype) for p in low}))
            raise PrecisionError(
                f"{type(optimizer).__name__} has stepped already, so its state is in {dtypes} like "
                f"{some(tuple(names[p] for p in low))}; convert the weights before the first step, "
                "or make a new optimizer after model.float()"
            )
        return upcast_(low)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        allowed = allow_fp16 or accepts_low_precision(optimizer)
        if not allowed:
            what = "Attempting to unscale FP16 gradients"  # torch's words, which people search for
            half = [p for p, grad in stored_gradients(optimizer) if grad.dtype == torch.float16]
            refuse_half(optimizer, half, self._names, what)
        ranks, found = self._agreeing(found_inf.device), kinds(optimizer)
        alone = isinstance(ranks, OneRank)
        torchs = found <= {"plain"} or (alone and found == {"sharded"})
        source: Any = optimizer if torchs else LocalGradients(optimizer)
        flags = super()._unscale_grads_(source, inv_scale, found_inf, allowed)
        if alone:
            return flags
        none = found_inf.new_full((), float(not flags))
        mine = total(flags.values(), found_inf.device) if flags else torch.zeros_like(none)
        marks = torch.stack([mine.clamp_(max=1.0), none])
        ranks.worst_(marks)
        if flags and on_host(marks) and marks[1].item():
            raise PrecisionError(
                "another rank's optimizer has no gradient in this step, so none steps; every rank "
                "must use the model in each step, or pass ranks=halfstep.OneRank() where each "
                "process trains a model of its own"
            )
        for flag in flags.values():  # set even if another rank raises for lack of gradients
            flag.copy_(marks.amax(), non_blocking=True)
        return flags

    def _agreeing(self, device: torch.device) -> Ranks:
        return ranks_of_this_process(device) if self._ranks is None else self._ranks

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per step, like torch's.

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
        # torch waits for the flags here; wait once, keep the values and pass them on.
        found = optimizer_state["found_inf_per_device"]
        host = {device: flag.cpu() for device, flag in found.items()}
        self._host_flag = sum(float(flag.item()) for flag in host.values())
        known = {**optimizer_state, "found_inf_per_device": host}
        return super()._maybe_opt_step(optimizer, known, *args, **kwargs)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless done, and step unless a gradient is not finite, like torch's.

        Returns:
            What ``optimizer.step`` returned; None if it was skipped. See :attr:`last_step`.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        self._host_flag, self._stepping = None, True
        try:
            with stepping(optimizer):
                value = super().step(optimizer, *args, **kwargs)
        except AssertionError as error:
            if not str(error).startswith(_NOT_CHECKED):
                raise
            raise AssertionError(f"{error} {_why_unchecked(optimizer)}") from None
        finally:
            self._stepping = False
        self._remember(optimizer)
        return value

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
        """Note that a backward will change the gradients, so they are no longer those of a step."""
        for record in (*self._round, self._last):
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
        """Count the round since the last update, and record its steps' next scale."""
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
        """The state for pickling, in plain numbers and without parameter names."""
        state = super().__getstate__()
        state |= {"_last": self.last_step, "_count": self._count.resolved(), "_loss": None}
        state |= {"_round": [], "_marks": {}, "_host_flag": None, "_names": {}}
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent scaler with the names of the same parameters, or of their copies."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        clone._names = {memo.get(id(p), p): name for p, name in self._names.items()}
        return clone


def loss_error(loss: Tensor | None, ranks: Ranks) -> str:
    """Text for a loss that is not finite on some rank, else "". All ranks must call it together."""
    mine = loss is not None and not bool(loss.isfinite().all())
    if not ranks.worst([int(mine)])[0]:
        return ""
    return f"{loss.tolist()}" if mine and loss is not None else "not finite on another rank"


def _why_unchecked(optimizer: Optimizer) -> str:
    every = owned(optimizer)
    frozen = sum(not p.requires_grad for p in every)
    return (
        f"No parameter of this optimizer got a gradient: {type(optimizer).__name__} holds "
        f"{len(every)} tensors, {frozen} of them frozen (requires_grad=False); for the others the "
        "loss was detached or does not depend on them, or the model was moved or replaced after "
        "the optimizer was made"
    )
