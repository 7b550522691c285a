"""A drop-in for torch.amp.GradScaler that reports each step and can prevent silent failures.

With its extra options off, every call behaves as torch's, bit for bit: returned values, exception
types, warnings, scales, states, gradients and weights. It then only adds
:attr:`GradScaler.last_step` and better error messages. ``docs/grad-scaler.md`` is the how-to.

With ``strict`` the scale stays between a floor and a ceiling, as it does under ``Precision``. That
prevents two silent failures of torch: at scales up to 2^-128 it turns finite gradients into NaN and
applies them, and finally the scale is 0 for ever. ``update`` then reads the overflow flag (one host
synchronisation, which non-fused optimizers have already paid in ``step``) and raises where no scale
can help.

Nothing else makes the host wait where torch's scaler would not: flags, scales and counters stay
tensors on their device until :attr:`GradScaler.last_step` is read.

The ranks of a run step together or not at all, and keep one scale. Under plain replication, DDP,
FSDP2 and tensor parallelism each rank sees different gradients, and with torch's scaler each rank
decides alone; if one skips and one steps, their weights differ for good. Here the flag of every
optimizer is the MAX over ranks, in one small collective beside the check.

**Source:** Megatron-Core reduces ``found_inf`` with MAX over all model-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.integrations.optimizer_tensors import (
    Names,
    accepts_low_precision,
    local_gradients,
    name_table,
    owned,
    parameter_names,
    refuse_pure,
    stored_gradients,
    with_gradients,
)
from halfstep.precision.agreement import AnyRanks, ranks_of_this_process
from halfstep.precision.border import as_device
from halfstep.precision.checks import some
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.masters.stepping import Movement, with_inner
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import NonFinite, OneRank, Ranks

STRICT_BOUNDS = 1.0, 2.0**24
"""The bounds of ``strict``. **Source:** see :class:`halfstep.LossScaleConfig`."""
EXTRA_KEY = "halfstep"
"""The key of a state dict's extra entry, which torch's scaler ignores."""

_Held = Tensor | float
"""A number, or a 0-dim tensor on a device whose value has not been read yet."""


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling with torch's interface and a report on every step.

    Where ``torch.distributed`` is initialised for several ranks, either all of them step or none
    does, and their scales stay equal: the flag is the MAX over ranks, one small collective per
    optimizer and step. All must then call ``unscale_``, ``step`` and ``update`` together.

    Args:
        device: This and the next five arguments are torch's; ``init_scale`` must be above 0.
        init_scale: The first scale.
        growth_factor: The scale's factor after ``growth_interval`` good steps in a row.
        backoff_factor: The scale's factor on overflow.
        growth_interval: Good steps before the scale grows.
        enabled: If False, nothing is scaled and every step is taken.
        strict: Keep the scale from 1 to 2^24, where an overflow at 1 raises, and refuse, at the
            first step, trainable 16-bit weights whose small updates would be lost.
        names: For messages only: ``model.named_parameters()``, or a dict of it.
        ranks: The ranks that must agree on a skip: a process group, a device mesh, ``ManyRanks`` or
            ``OneRank()`` if each process trains a model of its own. None: the mesh that the
            parameters are sharded over; else all of ``torch.distributed``'s default group.
        allow_pure: Allow 16-bit weights under any optimizer, although small updates are lost.

    Raises:
        PrecisionError: If an option cannot be honoured.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler = GradScaler("cpu", init_scale=4.0, strict=True, names={"weight": weight})
        >>> scaler.scale((weight * torch.tensor([1.0, float("inf")])).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> result = scaler.last_step
        >>> result.applied, result.reason, result.nonfinite_parameters, result.next_loss_scale
        (False, 'overflow', ('weight',), 2.0)
    """

    _scale: Tensor | None
    _as_torch: ClassVar[bool] = True  # with no option on: its state dict, and its 16-bit weights

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        strict: bool = False,
        names: Names | None = None,
        ranks: AnyRanks | None = None,
        allow_pure: bool = False,
    ) -> None:
        device = str(as_device(device))
        given = init_scale if isinstance(init_scale, int | float | Tensor) else 0.0
        if not float(given) > 0:
            raise PrecisionError(f"init_scale={init_scale!r:.80}; allowed: a number above 0")
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._ranks = None if ranks is None else ranks_of_this_process(device, ranks)
        self._names = name_table(names)
        self._allow_pure = allow_pure
        self._bounds: tuple[float, float] | None = STRICT_BOUNDS if strict else None
        if self._bounds is not None:
            self._require_within(init_scale, "init_scale")
        # rounds between two updates: skipped in all, and in a row
        self._skipped: _Held = 0
        self._in_a_row: _Held = 0
        self._loss: Tensor | None = None
        self._round: list[_Step] = []  # the steps since the last update
        self._nonfinite: dict[int, _Find] = {}  # by id(optimizer), since the last update
        self._last: _Step | StepResult | None = None
        self._movement = Movement()
        self._host_flag: float | None = None
        self._stepping = False

    # --- what can be read -------------------------------------------------------------------------

    @property
    def last_step(self) -> StepResult | None:
        """What the latest call of ``step`` did, or None before the first (or if disabled).

        Reading it may wait for the device; recording it does not. ``applied`` comes from the
        overflow flag, so it is right for fused optimizers too, which are called in either case.
        Read it after ``update``: before, ``next_loss_scale`` is still the current scale.

        * ``loss``: the last value given to ``scale`` if it was a scalar, else NaN; with gradient
          accumulation the last micro-batch's.
        * ``grad_norm``: NaN, as it is not computed here.
        * ``skipped_total``, ``skipped_in_a_row``: rounds between two calls of ``update`` in which
          any optimizer's step was skipped; with one optimizer, its steps.
        * ``nonfinite_parameters``: empty, with reason ``"overflow"``, for a fused optimizer on a
          GPU without an explicit ``unscale_``, since looking would make the host wait. After an
          explicit one on a GPU, a gradient that holds both NaN and infinities counts as NaN.
        """
        last = self._last
        if not isinstance(last, _Step):
            return last
        pending = any(step.skipped for step in self._round)
        found = last.nonfinite() if last.skipped else None
        return StepResult(
            applied=not last.skipped,
            reason=None if found is None else found.reason or "overflow",
            loss=math.nan if last.loss is None else float(last.loss),
            grad_norm=math.nan,
            loss_scale=float(last.loss_scale),
            next_loss_scale=float(last.next_loss_scale),
            skipped_total=int(self._skipped) + pending,
            skipped_in_a_row=int(self._in_a_row) + pending if last.skipped else 0,
            nonfinite_parameters=() if found is None else found.names,
        )

    # --- torch's calls ----------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or tensors in lists and tuples, by the scale, like torch's."""
        if self._enabled:
            single = isinstance(outputs, Tensor) and outputs.numel() == 1
            self._loss = outputs.detach() if single else None
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per step, like torch's.

        Raises:
            ValueError: For fp16 gradients, unless the optimizer has
                ``accepts_low_precision_gradients = True``.
        """
        super().unscale_(optimizer)
        if not self._enabled:
            return
        flags = self._found_inf_per_device(optimizer).values()
        if all(map(on_host, flags)):
            if any(flag.item() for flag in flags):
                self._nonfinite[id(optimizer)] = _look(optimizer, self._names, exact=True)
        elif not self._stepping:  # clipping may follow, which spreads one NaN over all gradients
            self._nonfinite[id(optimizer)] = _look(optimizer, self._names, exact=False)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless done, and step unless a gradient is not finite, like torch's.

        Returns:
            What ``optimizer.step`` returned; None if it was skipped. See :attr:`last_step`.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        self._host_flag, self._stepping = None, True
        heeds = getattr(optimizer, "_step_supports_amp_scaling", False)  # and may skip by itself
        unmoved = self._movement.begin([] if heeds else with_inner([optimizer]))
        try:
            value = super().step(optimizer, *args, **kwargs)
        finally:
            self._stepping = False
        self._remember(optimizer)
        if not self._host_flag:
            error = unmoved(lambda target: parameter_names(optimizer, self._names)[target])
            if error is not None:
                raise error
        return value

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale after all optimizers' steps of an iteration, or set it; as torch's.

        Raises:
            NonFiniteError: With ``strict``: an overflow at the floor (``cause`` is
                ``"loss_scale_floor"``). The skipped weights are unchanged and the scaler can still
                be used.
            PrecisionError: With ``strict``: a ``new_scale`` out of bounds.
        """
        if not self._enabled:
            return
        broken, scale = None, self._scale
        if self._bounds is not None and scale is not None:
            if isinstance(new_scale, float) or (
                isinstance(new_scale, Tensor) and new_scale.numel() == 1
            ):
                self._require_within(float(new_scale), "new_scale")
            states = self._per_optimizer_states.values()
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            if new_scale is None and flags and float(total(flags, scale.device)):
                broken = self._broken() if float(scale) <= self._bounds[0] else None
        super().update(new_scale)
        if self._bounds is not None and self._scale is not None:
            self._scale.clamp_(*self._bounds)
        if self._round and self._scale is not None:
            self._count_round(self._scale)
        self._round, self._nonfinite = [], {}
        if broken is not None:
            self._stop(broken)

    def state_dict(self) -> dict[str, Any]:
        """Torch's entries, plus one that torch's scaler ignores with ``strict``."""
        state = super().state_dict()
        if self._enabled and (self._bounds is not None or not self._as_torch):
            state[EXTRA_KEY] = {
                "skipped_total": int(self._skipped),
                "skipped_in_a_row": int(self._in_a_row),
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this scaler or of torch's.

        A state without the extra entry counts as a run without skips.

        Raises:
            PrecisionError: If, with ``strict``, the scale is out of bounds; nothing is changed.
        """
        if not self._enabled:
            super().load_state_dict(state_dict)
            return
        if self._bounds is not None and "scale" in state_dict:
            self._require_within(state_dict["scale"], "saved scale")
        extra = state_dict.get(EXTRA_KEY, {"skipped_total": 0, "skipped_in_a_row": 0})
        counts = extra["skipped_total"], extra["skipped_in_a_row"]
        super().load_state_dict(state_dict)
        self._skipped, self._in_a_row = counts

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, in plain numbers and without parameter names."""
        state = super().__getstate__()
        counts = {key: int(state[key]) for key in ("_skipped", "_in_a_row")}
        state |= {"_last": self.last_step, "_loss": None, "_host_flag": None}
        state |= {"_movement": Movement()}
        return state | counts | {"_round": [], "_nonfinite": {}, "_names": {}}

    def _agreeing(self, *optimizers: Optimizer) -> Ranks:
        """The ranks that step with this one."""
        return ranks_of_this_process(self._device, self._ranks, owned(*optimizers))

    # --- inside of torch's calls ------------------------------------------------------------------

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if (self._bounds is not None or not self._as_torch) and not self._allow_pure:
            refuse_pure(optimizer, self._names)
        allowed = allow_fp16 or accepts_low_precision(optimizer)
        ranks = self._agreeing(optimizer)
        sharded = {is_sharded(p) for p in with_gradients(optimizer)}
        alone = isinstance(ranks, OneRank)
        torchs = sharded <= {False} or (alone and sharded == {True})
        source: Any = optimizer if torchs else local_gradients(optimizer)
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

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        # as torch, which waits for the flags here
        flags = optimizer_state["found_inf_per_device"].values()
        self._host_flag = sum(float(flag.item()) for flag in flags)
        return None if self._host_flag else optimizer.step(*args, **kwargs)

    def _remember(self, optimizer: Optimizer) -> None:
        flags = self._found_inf_per_device(optimizer).values()
        if not flags or self._scale is None:
            self._last = None  # no gradient was seen: torch says so in update()
            return
        found = self._host_flag
        held = _hold(total(flags, self._scale.device)) if found is None else found
        find = self._nonfinite.get(id(optimizer))
        if find is None and not isinstance(held, Tensor) and held:
            find = _look(optimizer, self._names, exact=True)
        scale = _hold(self._scale)
        self._last = _Step(held, self._loss, scale, scale, find)
        self._round.append(self._last)

    def _count_round(self, scale: Tensor) -> None:
        """Count a round as skipped if any of its steps was, without waiting for a device."""
        waiting = [step.found for step in self._round if isinstance(step.found, Tensor)]
        known = [step.skipped for step in self._round if not isinstance(step.found, Tensor)]
        skipped: _Held = float(any(known))
        if waiting:
            skipped = (total(waiting, scale.device) + skipped).clamp(max=1.0)
        self._skipped = self._skipped + skipped
        self._in_a_row = (self._in_a_row + skipped) * skipped
        following = _hold(scale)
        for step in self._round:
            step.next_loss_scale = following

    def _broken(self) -> NonFinite:
        """Whose gradients were not finite in this round, as far as known."""
        found = [step.nonfinite() for step in self._round if step.skipped]
        found += [find() for find in self._nonfinite.values()]
        nan = dict.fromkeys(name for each in found for name in each.nan)
        return NonFinite(tuple(nan), tuple(dict.fromkeys(n for each in found for n in each.inf)))

    def _require_within(self, scale: object, where: str) -> None:
        assert self._bounds is not None
        low, high = self._bounds
        if not isinstance(scale, int | float) or not low <= scale <= high:
            raise PrecisionError(
                f"{where} is {scale!r}; allowed: numbers from {low:g} to {high:g}; give another"
            )

    def _stop(self, found: NonFinite) -> None:
        """Raise for an overflow at the floor."""
        whose = some(found.names) or (
            "parameters that are not known here: another rank's, or their gradients were cleared"
        )
        raise NonFiniteError(
            f"{found.what} in the gradients of {whose} at the smallest loss scale "
            f"{self.get_scale():g}: no smaller scale can help; the weights of the skipped "
            "optimizer are unchanged",
            cause="loss_scale_floor",
            parameters=found.names,
        )


# --- records of steps -----------------------------------------------------------------------------

_Find = Callable[[], NonFinite]
"""Names the gradients that were not finite at one moment; may wait for the device."""


@dataclass(eq=False)
class _Step:
    """One call of ``step``, as numbers and tensors that have not been read yet."""

    found: _Held
    """Above 0 if any gradient was not finite."""
    loss: Tensor | None
    loss_scale: _Held
    next_loss_scale: _Held
    find: _Find | None
    """Names the non-finite gradients; None if nobody looked."""

    @property
    def skipped(self) -> bool:
        return float(self.found) > 0

    def nonfinite(self) -> NonFinite:
        return NonFinite((), ()) if self.find is None else self.find()


def _look(optimizer: Optimizer, known: Mapping[Tensor, str], *, exact: bool) -> _Find:
    """Look for gradients that are not finite, without waiting for a device until it is read.

    ``exact`` also finds infinities in tensors that hold NaN, which reads the gradients twice more.
    """
    names = parameter_names(optimizer, known)
    stored = [(names[p], grad.detach()) for p, grad in stored_gradients(optimizer)]
    # a tensor subclass cannot stand beside plain tensors in one foreach call
    found = [(name, grad) for name, grad in stored if grad.numel() and type(grad) is Tensor]
    values = [value for _, value in found]
    # the largest absolute value of each: NaN if there is a NaN, else inf if there is one
    norms = list(torch._foreach_norm(values, math.inf)) if values else []
    infinite = [value.isinf().any() for value in values] if exact else norms

    def read() -> NonFinite:
        looked = zip((name for name, _ in found), norms, infinite, strict=True)
        seen = [(name, float(norm), bool(any_)) for name, norm, any_ in looked]
        return NonFinite(
            tuple(name for name, norm, _ in seen if math.isnan(norm)),
            tuple(n for n, norm, any_ in seen if math.isinf(norm) or (exact and any_)),
        )

    return read


def on_host(tensor: Tensor) -> bool:
    """Tell whether the tensor's value can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _hold(tensor: Tensor) -> _Held:
    """The tensor's present value: a number where reading it is free, else a copy on its device."""
    return float(tensor.item()) if on_host(tensor) else tensor.detach().clone()


def total(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Add up per-device flags on one device, in a new tensor."""
    moved = [flag.to(device, non_blocking=True) for flag in flags]
    return torch.stack(moved).sum()
