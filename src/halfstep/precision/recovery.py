"""Recovery from steps that no loss scale cures, non-finite or spiking: stop, or skip some."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from halfstep.errors import NonFiniteError, PrecisionError, SpikeError
from halfstep.precision.checks import some
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.spelling import parse_saved
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import Judged, Progress, Ranks, find_nonfinite
from halfstep.precision.scaling.loss_scale import LossScale
from halfstep.precision.scaling.spikes import Spike, SpikeDetector

if TYPE_CHECKING:
    from halfstep.precision.ema import EMA

OnBroken = Callable[[Judged, NonFiniteError | None, float, int, bool], None]
"""Called for a step that is not applied, before the loss scale is lowered: with what was measured,
the error if no loss scale can help, the loss scale, how many steps in a row were not applied, and
whether the scale still searches for its level. It may run the batch again."""

FIND_IT = "\ntry: print(halfstep.first_cause(precision, your_loss, batch))"
"""What the error of a user's own loop ends with; others run the batch again by themselves."""
_UNCHANGED = "; the weights are unchanged"


@dataclass(frozen=True, slots=True)
class Recovery:
    """The user's choice for steps that no loss scale helps: ``"stop"`` or ``"skip:K"``.

    ``"stop"`` raises at once, ``"skip:K"`` leaves out up to K such steps in a row. For spikes
    there is ``"off"``, too, which looks for none.
    """

    action: Literal["off", "stop", "skip"] = "stop"
    count: int = 0

    @classmethod
    def parse(cls, text: str | Recovery, option: str = "on_nonfinite") -> Recovery:
        """Parse the written form of ``on_nonfinite`` or ``on_spike``; a value stays what it is."""
        if isinstance(text, Recovery):
            return text
        if text == "stop":
            return cls()
        if text == "off" and option == "on_spike":
            return cls("off")
        name, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
        if name == "skip" and number.isdecimal() and int(number) >= 1:
            return cls("skip", int(number))
        off = "off, " if option == "on_spike" else ""
        raise PrecisionError(f"{option}={text!r}; allowed: {off}stop, skip:K with K > 0")

    def __str__(self) -> str:
        return f"{self.action}:{self.count}" if self.count else self.action


def without_hint(error: Exception) -> str:
    """An error's message without how to look for the first cause."""
    return str(error).removesuffix(FIND_IT)


def failure(
    policy: PrecisionPolicy,
    loss_scale: LossScale,
    judged: Judged,
    model: nn.Module,
    ranks: Ranks,
    in_a_row: int,
) -> NonFiniteError | SpikeError | None:
    """The error for a step that must not be applied, or None if a smaller loss scale may help.

    Call it before the loss scale is updated; ``in_a_row`` counts this skip.
    """
    if judged.spike is not None:
        return _spiking(judged, judged.spike)
    if judged.found is None:
        return _broken_loss(policy, judged, model, ranks)
    found, scale = judged.found, loss_scale.value
    what = "NaN" if found.nan and not found.inf else "inf" if not found.nan else "NaN and inf"
    where = f"{what} in the gradients of {some(found.names)} under a finite loss of {judged.loss:g}"
    if policy.loss_scale.kind == "none":
        cause, why = "gradients", (
            f", and policy {policy} has no loss scale to lower: a bug in a backward pass, or "
            f"values beyond {dtype_name(policy.compute_dtype)}"
        )  # fmt: skip
    elif loss_scale.at_floor:
        cause, why = "loss_scale_floor", (
            f" at the smallest loss scale {scale:g}: no smaller scale can help, so this is not an "
            "overflow by scaling but a bug or values beyond the format"
        )  # fmt: skip
    elif in_a_row >= policy.loss_scale.max_consecutive_skips:
        cause, why = "skip_limit", (
            f": {in_a_row} steps in a row skipped, the limit (max_consecutive_skips), at loss "
            f"scale {scale:g}"
        )  # fmt: skip
    else:
        return None
    return NonFiniteError(where + why + _UNCHANGED + FIND_IT, cause=cause, parameters=found.names)


def _spiking(judged: Judged, spike: Spike) -> SpikeError:
    what = "loss" if spike.reason == "loss_spike" else "gradient norm"
    text = (
        f"the {what} spikes: loss {judged.loss:.4g} and gradient norm {judged.norm:.4g}, where the "
        f"steps before lead to {spike.expected_loss:.4g} and {spike.expected_norm:.4g} "
        f"({spike.excess:.3g} times what is allowed). Look at the batch and the learning rate"
    )
    return SpikeError(text + _UNCHANGED, cause=spike.reason)


def _broken_loss(
    policy: PrecisionPolicy, judged: Judged, model: nn.Module, ranks: Ranks
) -> NonFiniteError:
    """The error for a loss that is itself not finite; the same on all ranks."""
    weights = dict(model.named_parameters())
    found = find_nonfinite((name, local_part(weight)) for name, weight in weights.items())
    broken = ranks.union(found, list(weights)).names
    whose = judged.whose or f"the loss is {judged.loss}"
    what, end = "the forward pass or the data made it", _UNCHANGED + FIND_IT
    if broken:
        what, end = f"the weights {some(broken)} are not finite", ""
    return NonFiniteError(
        f"{whose} before any gradient: {what}, no loss scale can help (policy {policy}){end}",
        cause="forward",
        parameters=broken,
    )


class Outcome:
    """What follows once a step is judged: counts, the loss scale, the average and recovery.

    Attributes:
        on_broken: See :data:`OnBroken`.
        on_incurable: Called with a step that no loss scale can help, before it is answered.
        on_stop: Called with such a step, counted, and its error, before that is raised.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        model: nn.Module,
        masters: MasterWeights,
        ranks: Ranks,
        recovery: Mapping[str, Recovery],
        ema: EMA | None,
    ) -> None:
        """Begin; ``recovery`` has the choices for ``on_nonfinite`` and ``on_spike``."""
        self._policy, self._model, self._masters, self._ranks = policy, model, masters, ranks
        self._recovery = recovery
        self._left_out: Counter[str] = Counter()  # by option, since the last applied step
        self._said: set[str] = set()
        self.ema = ema
        self.progress = Progress(policy.loss_scale)
        self.spikes = None if recovery["on_spike"].action == "off" else SpikeDetector()
        self.on_broken: OnBroken | None = None
        self.on_incurable: Callable[[Judged], None] | None = None
        self.on_stop: Callable[[Judged, NonFiniteError | SpikeError], None] | None = None
        self.waits = ema is not None or any(r.action == "skip" for r in recovery.values())
        """Whether anything needs the outcome of a step at once."""
        self.follows = self.waits or self.spikes is not None
        """Whether anything is advanced after an applied step."""

    def advance(self, judged: Judged) -> None:
        """Advance what follows an applied step."""
        self._left_out.clear()
        if self.ema is not None:
            self.ema.update_(self._masters.items())
        if self.spikes is not None:
            self.spikes.remember(judged.loss, judged.norm)

    def skipped(self, judged: Judged) -> StepResult:
        """Count a skipped step; then lower the scale, leave the step out as chosen, or raise."""
        progress = self.progress
        scale, row = progress.loss_scale, progress.skipped_in_a_row + 1
        error = failure(self._policy, scale, judged, self._model, self._ranks, row)
        if error is not None and self.on_incurable is not None:
            self.on_incurable(judged)  # all is as before the step
        if self.on_broken is not None and not isinstance(error, SpikeError):
            self.on_broken(judged, error, scale.value, row, progress.calibrating)
        progress.skip()
        if error is not None:
            try:
                self._leave_out(error)
            except (NonFiniteError, SpikeError) as stop:
                if self.on_stop is not None:
                    self.on_stop(judged, stop)
                raise
        return progress.skipped(judged)

    def _leave_out(self, error: NonFiniteError | SpikeError) -> None:
        """Raise ``error`` unless the user's choice leaves such a step out.

        That does not help if its forward has left a NaN in a buffer: it raises then, too.
        """
        option = "on_spike" if isinstance(error, SpikeError) else "on_nonfinite"
        choice = self._recovery[option]
        self._left_out[option] += 1
        if self._left_out[option] > choice.count:
            raise error
        what = without_hint(error).removesuffix(_UNCHANGED)
        floating = {n: b for n, b in self._model.named_buffers() if b.is_floating_point()}
        buffers = self._ranks.union(find_nonfinite(floating.items()), list(floating)).names
        if buffers:
            raise NonFiniteError(
                f"{what}; the step was left out, but its forward has left values that are not "
                f"finite in {some(buffers)}; go back to a checkpoint",
                cause=error.cause,
                parameters=buffers,
            ) from error
        if option not in self._said:
            self._said.add(option)
            text = f"the step is left out, as {option}={choice} allows: {what}"
            warnings.warn(f"{text}. Said once; every StepResult tells", stacklevel=5)

    def state(self) -> dict[str, Any]:
        """The policy, counts and the loss scale, the masters, and the spike detector's window."""
        masters: dict[str, Tensor] = {}
        if self._policy.keeps_more_than_weights:
            if self.ema is not None:
                self.ema.require_own_weights()
            self._masters.take_written_()
            masters = dict(self._masters.items())
        state = {"policy": str(self._policy), **self.progress.state(), "masters": masters}
        return state if self.spikes is None else {**state, "spikes": self.spikes.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.progress.load(state, other_policy=parse_saved(state["policy"]) != self._policy)
        if self.spikes is not None:
            self.spikes.restore_(state.get("spikes"))
        self._left_out.clear()
