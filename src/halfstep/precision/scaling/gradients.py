"""Checks a step's finished gradients: their norm, whether they are finite, and whether to step.

In a run of one process, :class:`OneRank` takes the place of the ranks; several ranks agree in
``agreement.py``. :class:`Progress` counts what was decided, and adapts the loss scale to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.masters.local_part import flattened, runs
from halfstep.precision.result import Reason, StepResult
from halfstep.precision.scaling.loss_scale import LossScale, LossScaleConfig
from halfstep.precision.scaling.spikes import Spike


class Share(NamedTuple):
    """How a parameter lies over ranks: which of how many parts this rank holds, and how split."""

    parts: int = 1
    part: int = 0
    split: str = ""  # the same for parameters that are split alike, on all ranks


Gradients = Mapping[Share, Sequence[Tensor]]
"""Maps a share (:meth:`Ranks.share_of`) to such gradients."""
Norm = Callable[[Sequence[Tensor]], Tensor]

# Number of elements widened at a time: 1 MiB of fp32.
_PIECE = 2**18


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The names of parameters whose gradients hold NaN, or infinities; some may hold both."""

    nan: tuple[str, ...]
    inf: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all non-finite gradients, NaN first."""
        return tuple(dict.fromkeys(self.nan + self.inf))

    @property
    def reason(self) -> Reason | None:
        """Why a step with these gradients is skipped, or None if all are finite.

        An overflow can reach the parameters as NaN only (by inf - inf during the backward pass), so
        NaN is first treated as an overflow; a bug persists until the scale is at its floor.
        """
        if not self.names:
            return None
        return "overflow" if self.inf else "nan_gradients"

    @property
    def what(self) -> str:
        """What was found, in the words of messages."""
        return " and ".join(["NaN"] * bool(self.nan) + ["inf"] * bool(self.inf))


def _values(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The stored values: for a sparse gradient its coalesced values, duplicates summed."""
    return [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, accumulated in fp32 whatever their dtype.

    Args:
        gradients: Any shapes; 16-bit, fp32 or sparse; on one device.

    Returns:
        fp32 scalar on that device, with no host synchronisation: NaN or inf if any element is not
        finite, or if the sum of squares overflows fp32 (see :func:`exact_global_norm`).
    """
    if not gradients:
        return torch.zeros(())
    values = _values(gradients)
    # On a CPU torch's fp32 norm of a 16-bit tensor is 14 times slower than that of an fp32 copy.
    narrow = [v for v in values if v.is_cpu and v.element_size() == 2]
    norms = list[Tensor]()
    for run in runs(narrow, _PIECE) if narrow else ():
        flat = flattened(narrow[run])
        if flat.numel() > _PIECE:
            norms += [torch.linalg.vector_norm(part.float()) for part in torch.split(flat, _PIECE)]
        else:
            parts = torch.split(flat.float(), [*map(Tensor.numel, narrow[run])])
            norms += torch._foreach_norm(parts, 2)
    if len(narrow) < len(values):
        wide = [v for v in values if not (v.is_cpu and v.element_size() == 2)] if narrow else values
        norms.extend(torch._foreach_norm(wide, 2, dtype=torch.float32))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def exact_global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm in fp64, for finite gradients so large that their squares overflow fp32."""
    norms = [torch.linalg.vector_norm(value.double()) for value in _values(gradients)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or inf; makes nothing of the tensor's size. Waits for its device.

    ``tensor.isfinite().all()`` makes six bytes an element and takes ten times as long on a CPU.
    """
    if not tensor.numel():
        return True
    if tensor.element_size() == 1:  # of some formats torch knows neither isfinite nor a largest
        tensor = tensor.float()
    if tensor.is_complex():
        return bool(tensor.isfinite().all())
    return all(bool(end.isfinite()) for end in torch.aminmax(tensor))  # a NaN is both


def find_nonfinite(named_gradients: Iterable[tuple[str, Tensor]]) -> NonFinite:
    """Find the parameters whose gradients hold NaN or inf. Synchronises with the host."""
    values = ((name, _values([gradient])[0]) for name, gradient in named_gradients)
    broken = [(name, value) for name, value in values if not is_finite(value)]
    nan = tuple(name for name, value in broken if value.isnan().any())
    return NonFinite(nan, tuple(name for name, value in broken if value.isinf().any()))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor, at most 1, that brings a global norm down to ``max_norm``.

    **Source:** Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
    2013, algorithm 1; the 1e-6, against a division by 0, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


class Ranks:
    """How the ranks that train one model agree; as it stands, those of a run of one process."""

    members: Sequence[int] = ()
    """Their numbers, if they are several."""

    def measure(self, loss: Tensor, gradients: Gradients, norm: Norm) -> tuple[float, float]:
        """The loss of the whole step, and the 2-norm of all its gradients, on the host."""
        every = [gradient for some in gradients.values() for gradient in some]
        total = norm(every)
        if total.is_cpu and loss.is_cpu:
            return float(loss), float(total)
        value, length = torch.stack([loss.to(total), total]).tolist()  # the host waits once
        return value, length

    def bound(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Self:
        """These ranks, for one model; all ranks call it together."""
        return self

    def at(self, step: int, applied: int, scale: float) -> None:
        """What must be equal on all ranks when they measure."""

    def cannot(self) -> None:
        """Join the ranks' :meth:`measure` as one that cannot step; the others then raise, too."""

    def leave_out(self) -> None:
        """Leave a step out, which all ranks do or none."""

    def agree(self) -> None:
        """Raise if ranks that hold copies of weights do not hold the same."""

    def worst(self, marks: Sequence[int]) -> list[int]:
        """The element-wise maximum of ``marks`` over ranks; every rank passes equally many."""
        table = torch.tensor(marks, dtype=torch.int64)
        self.worst_(table)
        worst: list[int] = table.tolist()
        return worst

    def worst_(self, marks: Tensor) -> None:
        """Like :meth:`worst`, but in place and without waiting for the device."""

    def share_of(self, parameter: Tensor) -> Share:
        """Which of how many parts of a parameter this rank holds."""
        return Share()

    def of_loss(self, loss: Tensor) -> str:
        """Say whose loss is not finite; "" if everybody's is. All ranks call it."""
        return "" if bool(loss.isfinite().all()) else f"the loss is {loss.tolist()}"

    def union(self, found: NonFinite, names: Sequence[str]) -> NonFinite:
        """The findings of all ranks; ``names`` are all possible names, equal on every rank."""
        return found


class OneRank(Ranks):
    """A run of one process, or of processes that each train a model of their own."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a step's loss and gradients, the same on every rank."""

    loss: float  # of the whole step, over all ranks
    norm: float  # the global 2-norm of its gradients, in fp64 if squares leave the range of fp32
    found: NonFinite | None  # the non-finite gradients; None if the loss itself is not finite
    spike: Spike | None = None  # what is wrong with a finite step, where spikes are guarded
    whose: str = ""  # which rank's loss is not finite, in words

    @property
    def broken(self) -> bool:
        """Whether the step must not be applied."""
        return self.found is None or bool(self.found.names) or self.spike is not None

    @property
    def reason(self) -> Reason | None:
        """Why it must not be applied, or None if it may."""
        if self.spike is not None:
            return self.spike.reason
        return "nonfinite_loss" if self.found is None else self.found.reason


COUNTS = "applied_total", "skipped_total", "skipped_in_a_row"


class Progress:
    """Counts a Precision's steps, adapts its loss scale, and writes the result of each step."""

    def __init__(self, config: LossScaleConfig) -> None:
        self.loss_scale = LossScale(config)
        self.scaled = config.kind != "none"
        self.applied_total = self.skipped_total = self.skipped_in_a_row = 0
        self.calibrating = config.kind == "dynamic"
        """Whether a dynamic scale searches for its level still, as no step has been applied."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=500)
        """The last applied steps, from 1, and their losses."""

    @property
    def steps(self) -> int:
        """Steps taken, skipped ones included."""
        return self.applied_total + self.skipped_total

    def slower(self, more: float = math.inf, *, step: int = 0) -> str:
        """What to do about a loss that has left its past, as words; empty if it has not.

        ``more`` is a finite loss of ``step`` (0: the next), if there is one, in a wider format.
        The last two are then three times above all that led to the lowest, or one is five times.
        """
        losses = [*self.losses, *[(step or self.steps + 1, more)] * math.isfinite(more)]
        low = min(range(len(losses)), key=lambda i: (losses[i][1], -i), default=0)
        past, after = losses[max(0, low - 20) : low + 1], losses[low + 1 :]
        size = max((abs(loss) for _, loss in past), default=0.0)
        if not after or not size:
            return ""
        far = max(past, key=lambda one: one[1])[1] + (2 if len(after) > 1 else 4) * size
        if any(loss <= far for _, loss in after[-2:]):
            return ""
        (since, first), (step, last) = past[-1], after[-1]
        rose = f"the loss rose from {first:.4g} at step {since} to {last:.4g} at step {step}"
        return f"lower the learning rate: {rose}"

    def applied(self, judged: Judged) -> StepResult:
        """Count an applied step, after which the loss scale holds or grows."""
        scale, calibrating = self.loss_scale.value, self.calibrating
        if self.scaled:
            self.loss_scale.update(found_nonfinite=False)
        self.skipped_in_a_row = 0
        self.applied_total += 1
        self.losses.append((self.applied_total + self.skipped_total, judged.loss))
        self.calibrating = False
        return self._result(judged, scale, calibrating, applied=True)

    def skipped(self, judged: Judged) -> StepResult:
        """The result of a skipped step that is counted; gradients that broke it lower the scale."""
        scale = self.loss_scale.value
        names = () if judged.found is None else judged.found.names
        if names:
            self.loss_scale.update(found_nonfinite=True)
        outcome = {"applied": False, "reason": judged.reason, "nonfinite_parameters": names}
        return self._result(judged, scale, self.calibrating, **outcome)

    def _result(
        self, judged: Judged, scale: float, calibrating: bool, **outcome: Any
    ) -> StepResult:
        return StepResult(
            loss=judged.loss,
            grad_norm=judged.norm,
            loss_scale=scale,
            calibrating=calibrating,
            next_loss_scale=self.loss_scale.value,
            skipped_total=self.skipped_total,
            skipped_in_a_row=self.skipped_in_a_row,
            **outcome,
        )

    def state(self) -> dict[str, Any]:
        """The counts, and the loss scale's own state."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return {"loss_scale": self.loss_scale.state_dict(), **counts}

    def load(self, state: Mapping[str, Any], *, other_policy: bool) -> None:
        """Go on from :meth:`state`; another policy's loss scale is left out if it does not fit."""
        accepted = True
        try:
            self.loss_scale.load_state_dict(dict(state["loss_scale"]))
        except PrecisionError:
            if not other_policy:
                raise
            accepted = False
        for name in COUNTS:
            setattr(self, name, state[name])
        if accepted and self.applied_total:
            self.calibrating = False
