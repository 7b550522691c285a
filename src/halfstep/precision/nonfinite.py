"""What is done about a loss or gradients that are not finite and that no loss scale can cure."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.precision.checks import some
from halfstep.precision.gradients import NonFinite, find_nonfinite
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.policy import PrecisionPolicy, dtype_name

Action = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True, slots=True)
class OnNonFinite:
    """The choice, written ``"stop"``, ``"skip:K"`` or ``"rollback:N"``.

    Attributes:
        action: ``"stop"`` raises at once. ``"skip"`` leaves up to ``count`` steps in a row out.
            ``"rollback"`` goes back to a copy in memory that is taken every ``count`` applied
            steps, 1 to ``count`` steps ago, and raises if that has not helped: if it happens again
            before the next copy.
        count: Steps; unused for ``"stop"``.
    """

    action: Action = "stop"
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> OnNonFinite:
        """Read the written form.

        Raises:
            PrecisionError: If it is neither of the three.
        """
        name, _, number = text.partition(":")
        if text == "stop":
            return cls()
        if name in get_args(Action)[1:] and number.isdecimal() and int(number) >= 1:
            return cls(name, int(number))  # type: ignore[arg-type]
        raise PrecisionError(
            f"on_nonfinite={text!r}; allowed: stop, skip:K, rollback:N with K, N > 0"
        )

    def __str__(self) -> str:
        return self.action if self.action == "stop" else f"{self.action}:{self.count}"


def incurable(
    policy: PrecisionPolicy, loss_scale: LossScale, found: NonFinite, loss: float, in_a_row: int
) -> NonFiniteError | None:
    """The error for gradients that are not finite, or None if a smaller loss scale may help.

    Args:
        policy: What the run uses.
        loss_scale: Before it is updated.
        found: The parameters concerned.
        loss: Finite.
        in_a_row: Steps skipped so far in a row, this one included.
    """
    what = "NaN" if found.nan and not found.inf else "inf" if not found.nan else "NaN and inf"
    where = f"{what} in the gradients of {some(found.names)} under a finite loss of {loss:g}"
    same = "the weights are unchanged"
    if policy.loss_scale.kind == "none":
        return NonFiniteError(
            f"{where}, and policy {policy} has no loss scale to lower: a bug in a backward pass, "
            f"or values beyond {dtype_name(policy.compute_dtype)}; {same}",
            cause="gradients",
            parameters=found.names,
        )
    if loss_scale.at_floor:
        return NonFiniteError(
            f"{where} at the smallest loss scale {loss_scale.value:g}: no smaller scale can help, "
            f"so this is no overflow by scaling but a bug or values beyond the format; {same}",
            cause="loss_scale_floor",
            parameters=found.names,
        )
    if in_a_row >= policy.loss_scale.max_consecutive_skips:
        return NonFiniteError(
            f"{where}: {in_a_row} steps in a row skipped, the limit (max_consecutive_skips), at "
            f"loss scale {loss_scale.value:g}; {same}",
            cause="skip_limit",
            parameters=found.names,
        )
    return None


def broken_loss(policy: PrecisionPolicy, loss: float, model: nn.Module) -> NonFiniteError:
    """The error for a loss that is not finite before any gradient.

    Args:
        policy: What the run uses.
        loss: NaN or inf.
        model: Its weights may be what is not finite.
    """
    broken = find_nonfinite(model.named_parameters()).names
    source, end = "the forward pass or the data made it", "; the weights are unchanged"
    if broken:
        source, end = f"the weights {some(broken)} are not finite", ""
    return NonFiniteError(
        f"the loss is {loss} before any gradient: {source}, no loss scale can help (policy "
        f"{policy}){end}",
        cause="forward",
        parameters=broken,
    )


class Guard:
    """Goes on after an error where that was asked for: leaves the step out, or goes back."""

    def __init__(
        self, choice: OnNonFinite, model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        self._choice = choice
        self._model = model
        self._optimizers = optimizers
        self._snapshot: Snapshot | None = None
        self._said = False

    def applied(self, count: int) -> None:
        """Take a copy to go back to, where it is time; ``count`` steps have been applied."""
        if self._choice.action == "rollback" and count % self._choice.count == 0:
            self._snapshot = Snapshot(self._model, self._optimizers)

    def answer(self, error: NonFiniteError, in_a_row: int) -> bool:
        """Go on, or raise ``error``.

        Args:
            error: What is wrong.
            in_a_row: Steps left out in a row, this one included.

        Returns:
            Whether weights and optimizer state went back.
        """
        choice = self._choice
        if choice.action == "skip" and in_a_row <= choice.count:
            self._say(f"the step is left out, as on_nonfinite={choice} allows: {error}")
            return False
        if choice.action == "rollback" and self._snapshot is not None:
            self._snapshot.restore_()
            self._snapshot = None  # if it happens again before the next copy, this did not help
            self._say(f"back to a copy of earlier weights, on_nonfinite={choice}: {error}")
            return True
        raise error

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(f"{text}. Said once; every StepResult tells", stacklevel=5)


class Snapshot:
    """A copy in memory of weights, buffers and optimizer state, to go back to."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *owned)}
        self._tensors = [(t, t.detach().clone()) for t in tensors.values()]
        self._states = [
            (o, {p: {k: _copy(v) for k, v in state.items()} for p, state in o.state.items()})
            for o in optimizers
        ]

    @torch.no_grad()
    def restore_(self) -> None:
        """Put everything back, in place, bit for bit; it can be restored again."""
        for tensor, value in self._tensors:
            tensor.copy_(value)
        for optimizer, states in self._states:
            optimizer.state.clear()
            for parameter, state in states.items():
                optimizer.state[parameter] = {k: _copy(v) for k, v in state.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
