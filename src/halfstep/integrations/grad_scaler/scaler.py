"""A drop-in for torch.amp.GradScaler that reports each step and can prevent silent failures.

With its extra options off, every call behaves as torch's, bit for bit: returned values, exception
types, warnings, scales, states, gradients and weights. It then only adds
:attr:`GradScaler.last_step` and better error messages. ``docs/grad-scaler.md`` is the how-to.

With any option on, the scale stays between a floor and a ceiling, which prevents two silent
failures of torch: at scales up to 2^-128 it turns finite gradients into NaN and applies them, and
finally the scale is 0 for ever. ``update`` then reads the overflow flag (one host synchronisation,
which non-fused optimizers have already paid in ``step``) and raises where no scale can help.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.integrations.grad_scaler.parameter_names import Names, refuse_pure
from halfstep.integrations.grad_scaler.recording import RecordingScaler, SkipCount, total
from halfstep.precision.agreement import as_ranks
from halfstep.precision.border import as_device, as_number
from halfstep.precision.checks import some
from halfstep.precision.result import Reason
from halfstep.precision.scaling.calibrate import largest_finite_scale
from halfstep.precision.scaling.gradients import Ranks
from halfstep.precision.scaling.loss_scale import Limits, ScaleState

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number. **Source:** IEEE 754 binary32; 1/S is infinite in fp32 for every
S up to 2^-128, and torch then turns finite gradients into NaN and applies them."""
LARGEST_SCALE = 2.0**126
"""The largest scale whose reciprocal is a normal fp32 number."""
STRICT_FLOOR, STRICT_CEILING = 1.0, 2.0**24
"""The bounds of ``strict``. **Source:** see :class:`halfstep.LossScaleConfig`."""

EXTRA_KEY = "halfstep"
"""The key of a state dict's extra entry, which torch's scaler ignores."""
_EXTRA = {
    "hysteresis_left": int,
    "skipped_total": int,
    "skipped_in_a_row": int,
    "calibrating": bool,
    "calibrate_next": bool,
    "losses": Mapping,
}
_STARTS = "a number above 0, or 'auto'"


@dataclass(frozen=True, slots=True)
class ScaleGuard:
    """The bounds of a scale, and the conditions under which a run stops."""

    floor: float
    ceiling: float
    hysteresis: int
    max_consecutive_skips: int | None

    def limits(self, growth: float, backoff: float, interval: int) -> Limits:
        """The scale's limits with torch's factors and interval."""
        return Limits(growth, backoff, interval, self.floor, self.ceiling, self.hysteresis)

    def require(self, scale: object, where: str) -> None:
        """Refuse a scale outside the bounds."""
        if not isinstance(scale, int | float) or not self.floor <= scale <= self.ceiling:
            raise PrecisionError(
                f"{where} is {scale!r}; allowed: numbers from {self.floor:g} (min_scale) to "
                f"{self.ceiling:g} (max_scale). Give another scale, or other bounds"
            )


def make_guard(
    init_scale: object,
    growth_factor: float,
    backoff_factor: float,
    *,
    strict: bool,
    min_scale: float | None,
    max_scale: float | None,
    hysteresis: int,
    max_consecutive_skips: int | None,
) -> ScaleGuard | None:
    """The guard that the options describe, or None if none of them is on."""
    skips = 1 if max_consecutive_skips is None else max_consecutive_skips
    for name, count in (("hysteresis", hysteresis), ("max_consecutive_skips", skips)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise PrecisionError(f"{name} is {count!r}; allowed: integers >= 1")
    bounds = []
    low, high = (STRICT_FLOOR, STRICT_CEILING) if strict else (SMALLEST_SCALE, LARGEST_SCALE)
    for name, given, default in (("min_scale", min_scale, low), ("max_scale", max_scale, high)):
        value = default if given is None else given
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not SMALLEST_SCALE <= value <= LARGEST_SCALE:
            raise PrecisionError(
                f"{name} is {value!r}; allowed: numbers from 2^-126 to 2^126, whose reciprocals "
                "are normal fp32 numbers"
            )
        bounds.append(torch.tensor(value, dtype=torch.float32).item())  # as the scale is stored
    if bounds[0] > bounds[1]:
        raise PrecisionError(
            f"min_scale {bounds[0]:g} is above max_scale {bounds[1]:g}; allowed: at most equal"
        )
    options = (min_scale, max_scale, max_consecutive_skips)
    auto = isinstance(init_scale, str)
    if not strict and not auto and hysteresis == 1 and options == (None, None, None):
        return None
    if not math.isfinite(growth_factor) or not backoff_factor > 0:
        raise PrecisionError(
            f"growth_factor is {growth_factor!r} and backoff_factor {backoff_factor!r}; allowed "
            "with halfstep's options: a finite growth and a back-off above 0"
        )
    guard = ScaleGuard(bounds[0], bounds[1], hysteresis, max_consecutive_skips)
    if not auto:
        guard.require(init_scale, "init_scale")
    return guard


def check_scaler_state(
    state: Mapping[str, Any], guard: ScaleGuard | None, where: str = "saved scale"
) -> None:
    """Refuse a state that cannot be continued, before anything is changed."""
    if guard is not None and "scale" in state:
        guard.require(state["scale"], where)
    extra = state.get(EXTRA_KEY)
    if extra is None:
        return
    fits = isinstance(extra, Mapping) and set(extra) == set(_EXTRA)
    if not fits or not all(isinstance(extra[key], kind) for key, kind in _EXTRA.items()):
        raise PrecisionError(
            f"the saved scaler state's {EXTRA_KEY!r} entry is damaged: {extra!r}; allowed: what "
            f"state_dict() gives, with {', '.join(_EXTRA)}"
        )
    for name, loss in extra["losses"].items():
        check_scaler_state(loss, guard, f"saved scale of loss {name!r}")


class GradScaler(RecordingScaler):
    """Dynamic loss scaling with torch's interface and a report on every step.

    Where ``torch.distributed`` is initialised for several ranks, either all of them step or none
    does, and their scales stay equal: the flag is the MAX over ranks, one small collective per
    optimizer and step. All must then call ``unscale_``, ``step`` and ``update`` together.

    Args:
        device: As in torch, like ``growth_factor``, ``backoff_factor``, ``growth_interval`` and
            ``enabled``.
        init_scale: The first scale, or ``"auto"``: the first call of :meth:`scale`, with a scalar
            loss, searches for the largest scale whose gradients are finite.
        strict: Use floor 1 and ceiling 2^24 unless given, and refuse, at the first step, trainable
            16-bit weights whose small updates would be lost. :meth:`check` refuses them before
            training.
        min_scale: The floor; an overflow there raises. 2^-126 if any other option is on.
        max_scale: The ceiling; 2^126 if any other option is on.
        hysteresis: Number of overflows before a back-off; only a growth resets the count.
        max_consecutive_skips: Number of rounds in a row with a skipped step at which ``update``
            raises; not before the first applied step, while the scale is finding its level.
        names: For messages only: ``model.named_parameters()``, or a dict of it.
        allow_pure: Allow 16-bit weights under any optimizer, although small updates are lost.
        ranks: The ranks that must agree on a skip; None: all of ``torch.distributed``'s default
            group, if initialised. ``OneRank()`` if each process trains a model of its own.

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

    _always_saves_counts: ClassVar[bool] = False  # torch's own state dict where no option is on
    _always_refuses_pure: ClassVar[bool] = False  # torch allows them

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float | Literal["auto"] = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        strict: bool = False,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        names: Names | None = None,
        ranks: Ranks | None = None,
        allow_pure: bool = False,
    ) -> None:
        device = str(as_device(device))
        auto = isinstance(init_scale, str) and init_scale == "auto"
        if not auto and not as_number(init_scale, "GradScaler(init_scale)", _STARTS) > 0:
            raise PrecisionError(f"init_scale={init_scale}; allowed: {_STARTS}")
        if ranks is not None:
            as_ranks(ranks)
        start: Any = 2.0**16 if auto else init_scale
        factors = (growth_factor, backoff_factor)
        super().__init__(
            device, start, *factors, growth_interval, enabled,
            names=names, ranks=ranks, allow_pure=allow_pure,
        )  # fmt: skip
        self._refuses_pure = (strict or self._always_refuses_pure) and not allow_pure
        self._options: dict[str, Any] = {
            "strict": strict,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "hysteresis": hysteresis,
            "max_consecutive_skips": max_consecutive_skips,
        }
        self._made_with: tuple[Any, ...] = (device, init_scale, *factors, growth_interval)
        self._guard = make_guard(init_scale, *factors, **self._options)
        self._calibrate_next = auto
        if auto and self._guard is not None:  # a number to show until it is calibrated
            self._init_scale = min(max(start, self._guard.floor), self._guard.ceiling)
        self._hysteresis_left = hysteresis
        self._losses: dict[str, Self] = {}
        self._saved_losses: dict[str, dict[str, Any]] = {}  # loaded, and not asked for yet

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: list[Tensor]) -> list[Tensor]: ...
    @overload
    def scale(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...
    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or tensors in lists and tuples, by the scale, like torch's.

        Raises:
            PrecisionError: If ``init_scale="auto"`` and this first call has no finite scalar loss
                with a gradient.
        """
        if self._enabled:
            single = isinstance(outputs, Tensor) and outputs.numel() == 1
            if self._calibrate_next:
                self._calibrate(outputs if single else None)
            self._loss = outputs.detach() if single else None
            self._expire()
        return super().scale(outputs)

    def _calibrate(self, loss: Tensor | None) -> None:
        """Find the scale; of several ranks' scales, take the smallest."""
        device = torch.device(self._device) if loss is None else loss.device
        ranks = self._agreeing(device)
        usable = loss is not None and loss.requires_grad and bool(loss.isfinite())
        if usable and ranks.worst([0])[0]:
            raise PrecisionError(
                "init_scale='auto' cannot calibrate: another rank's first loss is not a finite "
                "scalar with a gradient; its own message says more"
            )
        if not usable:
            ranks.worst([1])
        own = self._largest_scale(loss)
        self._init_scale = 2.0 ** -ranks.worst([round(-math.log2(own))])[0]
        self._calibrate_next = False
        if self._scale is not None:
            self._scale.fill_(self._init_scale)

    def _largest_scale(self, loss: Tensor | None) -> float:
        assert self._guard is not None
        if loss is None:
            raise PrecisionError(
                "init_scale='auto' calibrates in the first call of scale(), which got no scalar "
                "tensor; scale one scalar loss first, or give init_scale as a number"
            )
        low, high = self._options["min_scale"], self._options["max_scale"]
        return largest_finite_scale(
            loss,
            minimum=min(STRICT_FLOOR, self._guard.ceiling) if low is None else self._guard.floor,
            maximum=max(STRICT_CEILING, self._guard.floor) if high is None else self._guard.ceiling,
        )

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if self._refuses_pure:
            refuse_pure(optimizer, self._names)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale after all optimizers' steps of an iteration, or set it; as torch's.

        Raises:
            NonFiniteError: With an option on: an overflow at the floor (``cause`` is
                ``"loss_scale_floor"``) or too many skips in a row (``"skip_limit"``). The skipped
                weights are unchanged and the scaler can still be used.
            PrecisionError: With an option on: a ``new_scale`` out of bounds.
        """
        guard = self._guard if self._enabled else None
        if guard is None or self._scale is None or self._growth_tracker is None:
            super().update(new_scale)
            return
        scale, tracker = self._scale, self._growth_tracker
        if isinstance(new_scale, float) or (
            isinstance(new_scale, Tensor) and new_scale.numel() == 1
        ):
            guard.require(float(new_scale), "new_scale")
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        found, good, before = 0.0, 0.0, 0.0
        if flags:
            parts = [total(flags, scale.device), tracker.float(), scale]
            found, good, before = torch.stack(parts).tolist()
        self._torch_update(new_scale)
        at_floor = False
        if new_scale is None:
            factors = self.get_growth_factor(), self.get_backoff_factor(), self._growth_interval
            limits = guard.limits(*factors)
            state = ScaleState(before, int(good), self._hysteresis_left)
            at_floor = bool(found) and limits.at_floor(state)
            value, _, self._hysteresis_left = limits.after(state, bool(found))
            scale.fill_(value)
        culprits = self._culprits() if found else None
        self._close_round()
        if culprits is not None:
            self._stop_if_hopeless(guard, *culprits, before, at_floor=at_floor)

    def _stop_if_hopeless(
        self,
        guard: ScaleGuard,
        reason: Reason,
        names: tuple[str, ...],
        scale: float,
        *,
        at_floor: bool,
    ) -> None:
        what = "NaN" if reason == "nan_gradients" else "overflow (inf)"
        whose = some(names) or (
            "parameters that are not known here: another rank's, or their gradients were cleared"
        )
        where = f"{what} in the gradients of {whose}"
        same = "the weights of the skipped optimizer are unchanged"
        if at_floor:
            raise NonFiniteError(
                f"{where} at the smallest loss scale {scale:g} (min_scale): no smaller scale can "
                f"help, so this is a bug or values beyond the format; {same}",
                cause="loss_scale_floor",
                parameters=names,
            )
        limit = guard.max_consecutive_skips
        if limit is not None and self._count.in_a_row >= limit and not self.calibrating:
            raise NonFiniteError(
                f"{where}: {self._count.in_a_row} steps in a row skipped, the limit "
                f"(max_consecutive_skips), at loss scale {scale:g}; {same}",
                cause="skip_limit",
                parameters=names,
            )

    def for_loss(self, name: str) -> Self:
        """A scaler for one of several losses, with a scale and a state of its own.

        It starts with this scaler's options; the same name gives the same object every time.
        Every parameter must get its gradients through one scaler only. Call its ``update`` too.
        It is saved and loaded with this scaler, under an extra key that torch's scaler ignores.
        """
        if name not in self._losses:
            device, start, growth, backoff, interval = self._made_with
            child = type(self)(
                device, start, growth, backoff, interval, self._enabled,
                names=self._names, ranks=self._ranks,
                allow_pure=self._allow_pure, **self._options,
            )  # fmt: skip
            if name in self._saved_losses:
                child.load_state_dict(self._saved_losses.pop(name))
            self._losses[name] = child
        return self._losses[name]

    def state_dict(self) -> dict[str, Any]:
        """Torch's entries, plus one that torch's scaler ignores if options or losses are used."""
        state = super().state_dict()
        losses = {name: loss.state_dict() for name, loss in self._losses.items()}
        losses |= self._saved_losses
        if self._enabled and (self._guard is not None or losses or self._always_saves_counts):
            state[EXTRA_KEY] = {
                "hysteresis_left": self._hysteresis_left,
                "skipped_total": self._count.total,
                "skipped_in_a_row": self._count.in_a_row,
                "calibrating": not self._count.any_applied,
                "calibrate_next": self._calibrate_next,
                "losses": losses,
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this scaler or of torch's.

        A state without the extra entry counts as a run that has found its scale: hysteresis is
        reset and skips are counted from 0. Scalers of losses that it lacks stay as they are.

        Raises:
            PrecisionError: If, with an option on, the scale is out of bounds, or the extra entry
                is damaged; nothing is changed then.
        """
        if self._enabled:
            check_scaler_state(state_dict, self._guard)
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        extra = state_dict.get(EXTRA_KEY)
        if extra is None:
            self._count = SkipCount(applied=True)
            self._calibrate_next = False
            self._hysteresis_left = self._options["hysteresis"]
            return
        self._count = SkipCount(
            extra["skipped_total"], extra["skipped_in_a_row"], applied=not extra["calibrating"]
        )
        self._calibrate_next = self._calibrate_next and extra["calibrate_next"]
        self._hysteresis_left = min(extra["hysteresis_left"], self._options["hysteresis"])
        for name, loss in extra["losses"].items():
            if name in self._losses:
                self._losses[name].load_state_dict(loss)
            else:
                self._saved_losses[name] = dict(loss)
