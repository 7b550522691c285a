"""Recovery from steps that no loss scale cures, non-finite or spiking: stop, or skip some."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from halfstep.errors import NonFiniteError, PrecisionError, SpikeError
from halfstep.precision.checks import some
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_saved
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import Judged, Progress, Ranks, find_nonfinite
from halfstep.precision.scaling.spikes import Spike, SpikeDetector

if TYPE_CHECKING:
    from halfstep.precision.ema import EMA

GO_BACK = "go back to a checkpoint whose weights are finite"
FIND_IT = "print(halfstep.first_cause(precision, your_loss, batch))"
"""What to type after the error of a user's own loop; others run the batch again by themselves."""
_UNCHANGED = "; the weights are unchanged"
Error = NonFiniteError | SpikeError


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


class Outcome:
    """What follows once a step is judged: counts, the loss scale, the average and recovery.

    Attributes:
        on_broken: Called for a step that is not applied, with what was measured and the error if
            no loss scale can help, before it is counted or answered. It may run the batch again.
        about_layers: What the model's layers show, for the message of a step that is not applied.
        on_stop: Called with a step, counted, and its error, before that is raised.
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
        self.on_broken: Callable[[Judged, Error | None], object] | None = None
        self.about_layers: Callable[[], str] = lambda: ""
        self.on_stop: Callable[[Judged, Error], None] | None = None
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
            if self.spikes.repeated and "repeated" not in self._said:
                self._said.add("repeated")
                warnings.warn(
                    f"loss {judged.loss:.4g} and gradient norm {judged.norm:.4g} spike as a step "
                    "that was left out did: what repeats is data, and is applied. If the data has "
                    "not changed, the weights have: go back to a checkpoint. Said once",
                    stacklevel=7,
                )
            self.spikes.remember(judged.loss, judged.norm)

    def skipped(self, judged: Judged) -> StepResult:
        """Count a skipped step; then lower the scale, leave the step out as chosen, or raise."""
        progress, error = self.progress, self._failure(judged)
        if self.on_broken is not None:
            self.on_broken(judged, error)  # all is as before the step
        progress.skipped_total += 1
        progress.skipped_in_a_row += 1
        if self.spikes is not None and judged.spike is not None:
            self.spikes.leave_out(judged.loss, judged.norm)
        if error is not None:
            try:
                self._leave_out(error)
            except (NonFiniteError, SpikeError) as stop:
                if self.on_stop is not None:
                    self.on_stop(judged, stop)
                raise
        return progress.skipped(judged)

    def _failure(self, judged: Judged) -> Error | None:
        """The error for a step that must not be applied; None if a smaller loss scale may help."""
        if judged.spike is not None:
            return self._spiking(judged, judged.spike)
        if judged.found is None:
            return self._broken_loss(judged)
        found, scale, config = judged.found, self.progress.loss_scale, self._policy.loss_scale
        row, cause = self.progress.skipped_in_a_row + 1, "skip_limit"
        why = f": {row} steps in a row skipped, the limit (max_consecutive_skips), at loss scale "
        why += f"{scale.value:g}"
        if config.kind == "none":
            cause, why = "gradients", f", and policy {self._policy} has no loss scale to lower"
        elif scale.at_floor:
            cause = "loss_scale_floor"
            why = f" at the smallest loss scale {scale.value:g}: no smaller scale can help"
        elif row < config.max_consecutive_skips:
            return None
        where = f"{found.what} in the gradients of {some(found.names)} under a finite loss of "
        text = f"{where}{judged.loss:g}{why}{self.about_layers()}{_UNCHANGED}"
        error = NonFiniteError(text, cause=cause, parameters=found.names)
        error.to_do, error.typed = self.progress.slower(), FIND_IT
        return error

    def _spiking(self, judged: Judged, spike: Spike) -> SpikeError:
        what = "loss" if spike.reason == "loss_spike" else "gradient norm"
        return SpikeError(
            f"the {what} spikes: loss {judged.loss:.4g} and gradient norm {judged.norm:.4g}, where "
            f"the steps before lead to {spike.expected_loss:.4g} and {spike.expected_norm:.4g} "
            f"({spike.excess:.3g} times what is allowed). Look at the batch and the learning rate"
            f"{self.about_layers()}{_UNCHANGED}",
            cause=spike.reason,
        )

    def _broken_loss(self, judged: Judged) -> NonFiniteError:
        """The error for a loss that is itself not finite; the same on all ranks."""
        weights = dict(self._model.named_parameters())
        found = find_nonfinite((name, local_part(weight)) for name, weight in weights.items())
        broken = self._ranks.union(found, list(weights)).names
        what, end = "the forward pass or the data made it", _UNCHANGED
        if broken:
            what, end = f"the weights {some(broken)} are not finite", ""
        error = NonFiniteError(
            f"{judged.whose or f'the loss is {judged.loss}'} before any gradient: {what}, no loss "
            f"scale can help (policy {self._policy}){self.about_layers()}{end}",
            cause="forward",
            parameters=broken,
        )
        back = GO_BACK if broken else ""
        error.to_do = "; ".join(filter(None, [back, self.progress.slower()]))
        error.typed = "" if broken else FIND_IT
        return error

    def _leave_out(self, error: Error) -> None:
        """Raise ``error`` unless the user's choice leaves such a step out.

        That does not help if its forward has left a NaN in a buffer: it raises then, too.
        """
        option = "on_spike" if isinstance(error, SpikeError) else "on_nonfinite"
        choice = self._recovery[option]
        self._left_out[option] += 1
        if self._left_out[option] > choice.count:
            raise error
        what = str(error.args[0]).removesuffix(_UNCHANGED)
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
            warnings.warn(f"{text}. Said once; every StepResult tells", stacklevel=7)

    def state(self) -> dict[str, Any]:
        """The policy, counts and the loss scale, and the spike detector's window: equal on ranks.

        Masters are in the optimizers' states.
        """
        if self.ema is not None:
            self.ema.require_own_weights()
        state = {"policy": str(self._policy), **self.progress.state()}
        return state if self.spikes is None else {**state, "spikes": self.spikes.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.progress.load(state, other_policy=parse_saved(state["policy"]) != self._policy)
        if self.spikes is not None:
            self.spikes.restore_(state.get("spikes"))
        self._left_out.clear()
