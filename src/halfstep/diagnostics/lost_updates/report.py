"""The meter's report on one step of a parameter group: lost shares, freezing rate, verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from halfstep.diagnostics.lost_updates.sampling import Sample
from halfstep.precision.masters.rounding import ROUNDING, RoundingMode
from halfstep.precision.policy.policy import dtype_name
from halfstep.shown import aligned

LOUD = 0.1
"""The share of lost updates from which on the user is warned without asking."""
_TELLING = 0.01  # share of the peak learning rate above which a measured step tells something
_ADVISE = 0.01  # share of lost updates from which on another rounding mode is recommended
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def lost_share(measured: Iterable[tuple[float, float]], peak: float) -> float:
    """The share of its updates that a parameter group loses over a run, to be judged by LOUD.

    It is the median of the measured steps whose learning rate is above 1 % of the peak: at the end
    of a schedule updates are below half a gap of any format, fp32 too, and the run lacks nothing.

    Args:
        measured: Of each measured step the learning rate, NaN if not known, and the share lost.
        peak: The run's largest learning rate, or NaN.

    Returns:
        NaN if no measured step tells.
    """
    shares = [
        share for rate, share in measured if math.isfinite(share) and not rate <= _TELLING * peak
    ]
    return median(shares) if shares else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One parameter group on one measured step; shares are from 0 to 1, estimated from a sample.

    An *update* is an element whose intended change is not zero. The intended change is what the
    same step would do to a weight held in fp64, from the same gradient and moments.
    """

    group: str
    """The group's ``name``, or its number and weight decay."""
    step: int
    """The measured step, counted from 1 over applied steps."""
    learning_rate: float
    """The learning rate of that step; NaN if the group has no ``lr``."""
    elements: int
    """Number of elements of the group that had a gradient."""
    stored: str
    """How the weights are stored: ``"bf16"``, ``"bf16 split"``, ``"fp32"``."""
    lost: float
    """Share of updates that are lost for good: the stored bits (weight and remainder) did not
    change, and stochastic rounding would not move them on average either. NaN if the intended
    update is not known."""
    unmoved: float
    """Share of updates that did not change the stored bits, by chance or for good. If the intended
    update is not known, it is the share of the elements with a nonzero gradient."""
    zero: float
    """Share of all elements whose intended update is exactly zero."""
    frozen_below: float
    """Learning rate below which half of the updates would be lost; NaN if not known."""
    stuck: tuple[str, ...]
    """Names of tensors all of whose sampled updates were lost."""
    tensors: int
    """Number of tensors of the group that had a gradient."""
    note: str = ""
    """What is not known, and why."""

    @property
    def verdict(self) -> str:
        """One line of text: what is lost, at which learning rate, and what helps."""
        if math.isnan(self.lost):
            text = f"{_percent(self.unmoved)} of weights with a gradient did not change"
            return f"{text}; {self.note}"
        if self.zero == 1:
            return self._noted("no update: every intended update is zero")
        return self._noted(self._loss)

    @property
    def _loss(self) -> str:
        """The part of the verdict on what the weights lose."""
        if self.lost == 0:
            if self._random:
                return (
                    f"moves on average; {_percent(self.unmoved)} of single updates leave the "
                    "weight where it is, which is right on average"
                )
            return "none lost"
        text = f"{_percent(self.lost)} of updates are lost at lr {self.learning_rate:.3g}"
        if self._advice and (self.lost >= _ADVISE or self.stuck):
            text += f": use {self._advice}"
        if not math.isnan(self.frozen_below):
            text += f"; below lr {self.frozen_below:.2g} half of this group stands still"
        if self.stuck and self.lost < 1:
            some = ", ".join(self.stuck[:3]) + (", ..." if len(self.stuck) > 3 else "")
            text += f"; {len(self.stuck)} of {self.tensors} tensors do not move: {some}"
        return text

    @property
    def _modes(self) -> list[RoundingMode]:
        """The rounding modes that ``stored`` names."""
        words = self.stored.replace(",", "").split()
        found = [ROUNDING[word] for word in words if word in ROUNDING]
        return found or [ROUNDING["nearest"]] * ("bf16" in words)

    @property
    def _random(self) -> bool:
        return any(mode.random for mode in self._modes)

    @property
    def _advice(self) -> str:
        if "fp16" in self.stored:
            return "fp16-master"
        # no advice if 23 mantissa bits are kept: only a larger learning rate helps then
        return next((mode.advice for mode in self._modes if mode.advice), "")

    def _noted(self, text: str) -> str:
        return f"{text}; {self.note}" if self.note else text


def lost_table(reports: Sequence[GroupReport]) -> str:
    """Reports as text: a table with one row per group, then one verdict per group."""
    head = ("group", "stored", "elements", "lr", "lost", "unmoved", "zero", "half frozen below")
    rows = [head] + [
        (
            r.group,
            r.stored,
            f"{r.elements:,}",
            f"{r.learning_rate:.3g}",
            *(_percent(share) for share in (r.lost, r.unmoved, r.zero)),
            f"lr {r.frozen_below:.2g}",
        )
        for r in reports
    ]
    table = aligned(rows, range(2, len(head)))
    return "\n".join([table, *(f"{r.group}: {r.verdict}" for r in reports)])


def measure(
    group: str,
    step: int,
    learning_rate: float,
    samples: Sequence[Sample],
    updates: Sequence[Tensor] | str,
    note: str,
) -> GroupReport:
    """Compare intended updates with the stored weights.

    ``samples`` are on the CPU. ``updates`` come from the replay, fp64 (k,) each, or are text that
    says why they are not known.
    """
    shares = torch.cat(  # weight of a sampled element: its tensor's elements per sample
        [torch.full_like(s.weight, s.numel / len(s.weight), dtype=torch.float64) for s in samples]
    )
    same = torch.cat([_unmoved(s) for s in samples])
    known, changes = not isinstance(updates, str), [s.gradient for s in samples]
    if isinstance(updates, str):
        note = f"the intended update is not known: {updates}"
    else:
        changes = [*updates]
    moving = torch.cat([change != 0 for change in changes])
    lost, every = same & moving, torch.ones_like(moving)
    frozen = float("nan")
    stuck: tuple[str, ...] = ()
    if known:
        fine = [_below_fp32(s, u) for s, u in zip(samples, changes, strict=True)]
        lost &= torch.cat(fine)
        frozen = _freezing(samples, changes, shares, learning_rate)
        parts = torch.split(lost, [s.weight.numel() for s in samples])
        stuck = tuple(
            s.name
            for s, part, change in zip(samples, parts, changes, strict=True)
            if bool((change != 0).any()) and torch.equal(part, change != 0)
        )
    return GroupReport(
        group=group,
        step=step,
        learning_rate=learning_rate,
        elements=sum(s.numel for s in samples),
        stored=", ".join(sorted({_stored(s) for s in samples})),
        lost=_share(lost, moving, shares) if known else float("nan"),
        unmoved=_share(same & moving, moving, shares),
        zero=_share(~moving, every, shares),
        frozen_below=frozen,
        stuck=stuck,
        tensors=len(samples),
        note=note,
    )


def _stored(sample: Sample) -> str:
    name = dtype_name(sample.weight.dtype)
    return name if sample.update == "nearest" else f"{name} {sample.update}"


def _unmoved(sample: Sample) -> Tensor:
    """A mask of the elements whose stored bits did not change."""
    same = _same_bits(sample.weight, sample.after)
    if sample.remainder is not None and sample.remainder_after is not None:
        same &= _same_bits(sample.remainder, sample.remainder_after)
    return same


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    bits = _BITS[a.element_size()]
    return a.view(bits) == b.view(bits)


def _below_fp32(sample: Sample, update: Tensor) -> Tensor:
    """A mask of weights that this update can never move; with random rounding only some."""
    if not ROUNDING[sample.update].random:
        return torch.ones_like(update, dtype=torch.bool)
    value = sample.value()
    return (value.double() + update).float() == value


def _freezing(
    samples: Sequence[Sample], updates: Sequence[Tensor], shares: Tensor, learning_rate: float
) -> float:
    """The learning rate below which half of the updates are below half a gap, so are lost.

    Updates are taken to be proportional to the learning rate.
    """
    if not learning_rate > 0:
        return float("nan")
    each = [
        ROUNDING[s.update].half_gap(s.weight, s.remainder, s.value().double(), u)
        * learning_rate
        / u.abs()
        for s, u in zip(samples, updates, strict=True)
    ]
    rates = torch.cat(each)
    kept = rates.isfinite()
    if not bool(kept.any()):
        return float("nan")
    rates, order = rates[kept].sort()
    reached = shares[kept][order].cumsum(0) / shares[kept].sum()
    place = torch.searchsorted(reached, torch.tensor(0.5, dtype=reached.dtype))  # weighted median
    return float(rates[place.clamp(max=rates.numel() - 1)])


def _share(part: Tensor, whole: Tensor, shares: Tensor) -> float:
    total = float(shares[whole].sum())
    return float(shares[part].sum()) / total if total else 0.0


def _percent(share: float) -> str:
    return "?" if math.isnan(share) else f"{100 * share:.3g} %"
