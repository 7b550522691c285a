"""Recovery from steps that no loss scale cures, non-finite or spiking: stop, skip, roll back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError, PrecisionError, SpikeError
from halfstep.precision.after_step import EMA
from halfstep.precision.checks import some
from halfstep.precision.masters.local_part import is_sharded, local_part
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.masters.stepping import Gradients
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.scaling.gradients import Judged, Ranks, clip_factor, find_nonfinite
from halfstep.precision.scaling.loss_scale import LossScale
from halfstep.precision.scaling.spikes import Spike, SpikeDetector

Action = Literal["stop", "skip", "rollback"]
_Choice = TypeVar("_Choice", "OnNonFinite", "OnSpike")
_KEPT = ("params", "lr", "initial_lr")

OnBroken = Callable[[Judged, NonFiniteError | None, float, int, bool], None]
"""Called for a step that is not applied, before the loss scale is lowered or weights go back: with
what was measured, the error if no loss scale can help, the loss scale, how many steps in a row were
not applied, and whether the scale still searches for its level. It may run the batch again."""

FIND_IT = (
    "; to see which operation made it: print(halfstep.first_cause(precision, lambda: "
    "your_loss(batch)))"
)
"""What the error of a user's own loop ends with; others run the batch again by themselves."""
_UNCHANGED = "; the weights are unchanged"


@dataclass(frozen=True, slots=True)
class OnNonFinite:
    """The user's choice of recovery, written ``"stop"``, ``"skip:K"`` or ``"rollback:N"``.

    Attributes:
        action: ``"stop"`` raises at once. ``"skip"`` leaves out up to ``count`` such steps in a
            row. ``"rollback"`` restores a copy in memory, taken every ``count`` applied steps and
            so 1 to ``count`` steps old, and raises if that did not help, which means that it
            happens again before the next copy. Two copies are kept, so that one is a step old.
        count: Number of steps; unused for ``"stop"``.
    """

    action: Action = "stop"
    count: int = 0

    @classmethod
    def parse(cls, text: str | OnNonFinite) -> OnNonFinite:
        """Parse the written form; an OnNonFinite is returned as it is."""
        allowed = "stop, skip:K, rollback:N with K, N > 0"
        return _parse(cls, text, "on_nonfinite", ("stop",), allowed)

    def __str__(self) -> str:
        return _written(self)


@dataclass(frozen=True, slots=True)
class OnSpike:
    """What to do about a finite spike: ``"off"``, ``"stop"``, ``"skip:K"`` or ``"rollback:N"``.

    Attributes:
        action: ``"off"`` looks for none. The others are those of :class:`OnNonFinite`, and raise
            :class:`~halfstep.errors.SpikeError` where that raises its error; ``"skip"`` is written
            for ``"skip:10"``.
        count: Number of steps; unused for ``"off"`` and ``"stop"``.
    """

    action: Literal["off"] | Action = "off"
    count: int = 0

    @classmethod
    def parse(cls, text: str | OnSpike) -> OnSpike:
        """Parse the written form; an OnSpike is returned as it is."""
        allowed = "off, stop, skip, skip:K, rollback:N with K, N > 0"
        written = "skip:10" if text == "skip" else text
        return _parse(cls, written, "on_spike", ("off", "stop"), allowed)

    def __str__(self) -> str:
        return _written(self)


def _parse(
    kind: Callable[..., _Choice], text: object, option: str, alone: Sequence[str], allowed: str
) -> _Choice:
    """Read one of the actions that stand alone, ``"skip:K"`` or ``"rollback:N"``."""
    if type(text) is kind:
        return cast("_Choice", text)
    name, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text in alone:
        return kind(name)
    if name in get_args(Action)[1:] and number.isdecimal() and int(number) >= 1:
        return kind(name, int(number))
    raise PrecisionError(f"{option}={text!r}; allowed: {allowed}")


def _written(choice: OnNonFinite | OnSpike) -> str:
    return f"{choice.action}:{choice.count}" if choice.count else choice.action


def parse_choices(
    on_nonfinite: str | OnNonFinite, on_spike: str | OnSpike
) -> tuple[OnNonFinite, OnSpike]:
    """Parse both options, and refuse copies of two ages: one list of copies serves both."""
    both = OnNonFinite.parse(on_nonfinite), OnSpike.parse(on_spike)
    if len({choice.count for choice in both if choice.action == "rollback"}) > 1:
        raise PrecisionError(
            f"on_nonfinite={both[0]} and on_spike={both[1]} would keep copies of two ages; "
            "allowed: the same N in both"
        )
    return both


def without_hint(error: Exception) -> str:
    """An error's message without how to look for the first cause."""
    return str(error).removesuffix(FIND_IT)


def spiking(spike: Spike, loss: float, norm: float) -> SpikeError:
    """The error for a finite step far from the ones before it."""
    what = "loss" if spike.reason == "loss_spike" else "gradient norm"
    text = (
        f"the {what} spikes: loss {loss:.4g} and gradient norm {norm:.4g}, where the steps before "
        f"lead to {spike.expected_loss:.4g} and {spike.expected_norm:.4g} ({spike.excess:.3g} "
        "times what is allowed). Look at the batch and the learning rate; the weights are unchanged"
    )
    return SpikeError(text, cause=spike.reason)


def failure(
    policy: PrecisionPolicy,
    loss_scale: LossScale,
    judged: Judged,
    model: nn.Module,
    ranks: Ranks,
    in_a_row: int,
) -> NonFiniteError | SpikeError | None:
    """The error for a step that must not be applied, or None if a smaller loss scale may help."""
    if judged.spike is not None:
        return spiking(judged.spike, judged.loss, judged.norm)
    if judged.found is None:
        return broken_loss(policy, judged.loss, model, ranks)
    return incurable(policy, loss_scale, judged, in_a_row)


def incurable(
    policy: PrecisionPolicy, loss_scale: LossScale, judged: Judged, in_a_row: int
) -> NonFiniteError | None:
    """The error for gradients that are not finite, or None if a smaller loss scale may help.

    Call it before the loss scale is updated, with a finite loss; ``in_a_row`` counts this skip.
    """
    found, loss = judged.found, judged.loss
    assert found is not None, "the loss is finite"
    what = "NaN" if found.nan and not found.inf else "inf" if not found.nan else ""
    what = what or "NaN and inf"
    where = f"{what} in the gradients of {some(found.names)} under a finite loss of {loss:g}"
    end = _UNCHANGED + FIND_IT
    scale = loss_scale.value
    if policy.loss_scale.kind == "none":
        form = dtype_name(policy.compute_dtype)
        text = (
            f"{where}, and policy {policy} has no loss scale to lower: a bug in a backward pass, "
            f"or values beyond {form}{end}"
        )
        return NonFiniteError(text, cause="gradients", parameters=found.names)
    if loss_scale.at_floor:
        text = (
            f"{where} at the smallest loss scale {scale:g}: no smaller scale can help, so this is "
            f"not an overflow by scaling but a bug or values beyond the format{end}"
        )
        return NonFiniteError(text, cause="loss_scale_floor", parameters=found.names)
    if in_a_row >= policy.loss_scale.max_consecutive_skips:
        text = (
            f"{where}: {in_a_row} steps in a row skipped, the limit (max_consecutive_skips), at "
            f"loss scale {scale:g}{end}"
        )
        return NonFiniteError(text, cause="skip_limit", parameters=found.names)
    return None


def broken_loss(
    policy: PrecisionPolicy, loss: float, model: nn.Module, ranks: Ranks
) -> NonFiniteError:
    """The error for a loss that is itself not finite; the same on all ranks."""
    weights = dict(model.named_parameters())
    found = find_nonfinite((name, local_part(weight)) for name, weight in weights.items())
    broken = ranks.union(found, list(weights)).names
    text = (
        f"the loss is {loss} before any gradient: the forward pass or the data made it, no loss "
        f"scale can help (policy {policy}){_UNCHANGED + FIND_IT}"
    )
    if broken:
        text = (
            f"the loss is {loss} before any gradient: the weights {some(broken)} are not finite, "
            f"no loss scale can help (policy {policy})"
        )
    return NonFiniteError(text, cause="forward", parameters=broken)


class _Copy(NamedTuple):
    """What a rollback restores."""

    applied: int  # applied steps when it was taken
    weights: Snapshot
    spikes: dict[str, Any] | None  # the state of the spike detector, which goes back with them


class Guard:
    """Continues after an error by skipping or rolling back; ``"stop"`` needs no guard.

    One guard answers for values that are not finite and for finite spikes, with the same copies.
    """

    def __init__(
        self,
        choices: tuple[OnNonFinite, OnSpike],
        spikes: SpikeDetector | None,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        averages: Mapping[str, Tensor],
        ranks: Ranks,
    ) -> None:
        self._on_nonfinite, self._on_spike = choices
        self._spikes = spikes
        self._ranks = ranks
        self._model = model
        self._optimizers = optimizers
        self._averages = averages
        (self._every,) = {c.count for c in choices if c.action == "rollback"} or {0}
        self._copies: list[_Copy] = []  # newest last
        self._applied = 0
        self._in_a_row: dict[str, int] = {}  # steps left out since the last applied one, by option
        self._said: set[str] = set()

    def start(self, applied: int) -> None:
        """Begin after ``applied`` steps, with a copy of the present weights and state."""
        self._applied, self._in_a_row, self._copies = applied, {}, []
        self._copy()

    def applied(self) -> None:
        """Count an applied step, and take a copy if one is due."""
        self._applied += 1
        self._in_a_row.clear()
        if self._every and self._applied % self._every == 0:
            self._copy()

    def _copy(self) -> None:
        if self._every:
            taken = Snapshot(self._model, self._optimizers, self._averages)
            spikes = None if self._spikes is None else self._spikes.state()
            self._copies = [*self._copies[-1:], _Copy(self._applied, taken, spikes)]

    def answer(self, error: NonFiniteError | SpikeError) -> int:
        """Raise ``error``, or continue and return how many applied steps were undone: 0 or more.

        Skipping a step does not help if its forward has left a NaN in a buffer: that raises, too.
        """
        choice: OnNonFinite | OnSpike = self._on_nonfinite
        option = "on_nonfinite"
        if isinstance(error, SpikeError):
            choice, option = self._on_spike, "on_spike"
        self._in_a_row[option] = self._in_a_row.get(option, 0) + 1
        what = str(error).removesuffix(FIND_IT).removesuffix(_UNCHANGED)
        if choice.action == "skip" and self._in_a_row[option] <= choice.count:
            self._require_finite_buffers(error, what)
            self._say(option, f"the step is left out, as {option}={choice} allows: {what}")
            return 0
        older = [copy for copy in self._copies if copy.applied < self._applied]
        if choice.action == "rollback" and older:
            copy = older[-1]
            copy.weights.restore_()
            if self._spikes is not None:
                self._spikes.restore_(copy.spikes)
            self._copies = []  # if it happens again before the next copy, this did not help
            self._say(option, f"back to a copy of earlier weights, {option}={choice}: {what}")
            return self._applied - copy.applied
        raise error

    def _require_finite_buffers(self, error: NonFiniteError | SpikeError, what: str) -> None:
        floating = {n: b for n, b in self._model.named_buffers() if b.is_floating_point()}
        buffers = self._ranks.union(find_nonfinite(floating.items()), list(floating)).names
        if buffers:
            raise NonFiniteError(
                f"{what}; the step was left out, but its forward has left values that are not "
                f"finite in {some(buffers)}; use on_nonfinite=rollback:N, which puts buffers "
                "back",
                cause=error.cause,
                parameters=buffers,
            ) from error

    def _say(self, option: str, text: str) -> None:
        if option not in self._said:
            self._said.add(option)
            warnings.warn(f"{text}. Said once; every StepResult tells", stacklevel=5)


def make_guard(
    choices: tuple[OnNonFinite, OnSpike],
    spikes: SpikeDetector | None,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    ema: EMA | None,
    ranks: Ranks,
) -> Guard | None:
    """A guard for the two choices; None where every error is raised."""
    if {choice.action for choice in choices} <= {"off", "stop"}:
        return None
    averages = {} if ema is None else ema.averages
    return Guard(choices, spikes, model, optimizers, averages, ranks)


class _BrokenClosure(Exception):
    """An evaluation of the loss inside an optimizer's step was not finite."""


def step_by_closure(
    optimizer: Optimizer,
    closure: Callable[[], Any],
    masters: MasterWeights,
    model: nn.Module,
    examine: Callable[[bool], tuple[Judged, Gradients]],
    max_norm: float | None,
) -> Judged | None:
    """Step an optimizer that evaluates the loss itself; undo all if an evaluation is not finite.

    The closure sees the model's own parameters, rounded from the masters' present values.

    Args:
        optimizer: Its ``step`` takes a closure.
        closure: Computes the loss and its gradients, and returns the loss.
        masters: What the optimizer updates.
        model: The model.
        examine: Judges an evaluation, given whether it is the first, and returns its gradients.
        max_norm: Clip the global 2-norm of each evaluation's gradients to this, or None.

    Returns:
        The verdict on the first evaluation, or on the one that broke the step; None without any.
    """
    seen: list[Judged] = []

    def evaluate() -> Any:
        masters.push_()
        with masters.installed(False), torch.enable_grad():
            value = closure()
            judged, gradients = examine(not seen)
        seen.append(judged)
        if judged.broken:
            raise _BrokenClosure
        masters.hand_over([optimizer], gradients, clip_factor(judged.norm, max_norm))
        return value

    masters.take_written_()
    with masters.installed():
        before = Snapshot(model, [optimizer], {})
        try:
            optimizer.step(evaluate)
        except _BrokenClosure:
            before.restore_()
            return seen[-1]
    masters.push_()
    return seen[0] if seen else None


class Snapshot:
    """An in-memory copy of weights, buffers, averages and optimizer state, to roll back to.

    Learning rates are left out, since they belong to the schedule.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        averages: Mapping[str, Tensor],
    ) -> None:
        owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        held = {p.data_ptr() for p in owned}  # may include the local part of a sharded weight
        weights: list[Tensor] = [p for p in model.parameters() if not is_sharded(p)]
        parts = [local_part(p) for p in model.parameters() if is_sharded(p)]
        weights += [part for part in parts if part.data_ptr() not in held]
        every = (*weights, *averages.values(), *owned)
        self._buffers = Buffers(model)
        self._tensors = [(t, t.detach().clone()) for t in {id(t): t for t in every}.values()]
        self._states = [
            (o, {p: copy.deepcopy(state) for p, state in o.state.items()}) for o in optimizers
        ]
        self._groups = [
            (group, {k: copy.deepcopy(v) for k, v in group.items() if k not in _KEPT})
            for o in optimizers
            for group in o.param_groups
        ]

    @torch.no_grad()
    def restore_(self) -> None:
        """Restore everything in place, bit for bit; may be called again."""
        self._buffers.restore_()
        for tensor, value in self._tensors:
            tensor.copy_(value)
        for optimizer, states in self._states:
            optimizer.state.clear()
            for parameter, state in states.items():
                optimizer.state[parameter] = copy.deepcopy(state)
        for group, options in self._groups:
            group.update(copy.deepcopy(options))


class Buffers:
    """A copy of a model's buffers, to put back: their values, and the very tensors.

    A forward may assign a new tensor to a buffer's name. torch's batch norm writes its averages
    without a new ``_version``, so values are compared.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._named = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def restore_(self) -> None:
        """Restore them bit for bit; may be called again. What has not changed is not written."""
        for module, name, buffer in self._named:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        for buffer, value in self._values:
            if buffer.layout != torch.strided or not torch.equal(buffer, value):
                buffer.copy_(value)
