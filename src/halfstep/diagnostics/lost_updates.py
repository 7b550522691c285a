"""The lost-update meter: how many updates of a real step leave the stored weights unchanged.

A 16-bit weight loses any update below half the gap between neighbouring numbers, without a warning:
the loss falls more slowly, and gains of norms stay at exactly 1. On every N-th step the meter
copies a sample of each weight, with its remainder, before the optimizer's step, and compares bits
after it: an element whose gradient or momentum is not 0, and whose bits stayed, has lost its
update.

The loop needs no change, results stay the same bit for bit, and nothing waits for the device until
:meth:`LostUpdateMeter.report`. ``docs/lost-updates.md`` is the how-to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import PrecisionError
from halfstep.optim.state import stored_moment
from halfstep.precision.agreement import WORDS
from halfstep.precision.border import require
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.rounding import REMAINDER, ROUNDING, Update
from halfstep.precision.masters.states import local_state
from halfstep.precision.masters.stepping import OwnOptimizer
from halfstep.precision.policy.policy import dtype_name
from halfstep.precision.step import Precision
from halfstep.shown import aligned

SAMPLE = 4096
"""Elements of a parameter that are looked at, at most."""
LOUD = 0.1
"""The share of lost updates from which on the user is warned without asking."""
_TELLING = 0.01  # share of the peak learning rate above which a measured step tells something
_ADVISE = 0.01  # share of lost updates from which on another rounding mode is recommended
_UNREAD = 8  # measured steps kept while it is not known whether a fused optimizer applied them
_KNOWN = (
    *(optim.AdamW, optim.Adam, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta),
)
"""Optimizers of torch that mean to move every element whose gradient is not 0."""


def sampled(tensor: Tensor) -> Tensor:
    """At most :data:`SAMPLE` elements; the odd stride visits all columns of most shapes."""
    return tensor.reshape(-1)[:: -(-tensor.numel() // SAMPLE) | 1]


def optimizers_of(source: object, who: str) -> list[Optimizer]:
    """The optimizers that somebody gave ``who`` as its source, without wrappers around them."""
    several = [source] if isinstance(source, Optimizer) else source
    if isinstance(several, list | tuple) and all(isinstance(o, Optimizer) for o in several):
        return [bare_optimizer(one) for one in several]
    raise PrecisionError(
        f"{who}(source={source!r:.80}); allowed: a halfstep.Precision, an optimizer, or a list of "
        "them"
    )


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of wrappers that are optimizers themselves, such as Accelerate's."""
    while isinstance(inner := vars(optimizer).get("optimizer"), Optimizer):
        optimizer = inner
    return optimizer


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

    An *update* is an element whose gradient or momentum is not 0, in a group whose learning rate is
    not 0.
    """

    group: str
    """The group's ``name``, or its number and weight decay."""
    step: int
    """The measured step, counted from 1 over applied steps."""
    learning_rate: float
    """The learning rate of that step; NaN if the group has no ``lr``."""
    updates: float
    """How many updates the step made."""
    stored: str
    """How the weights are stored: ``"bf16"``, ``"bf16 split"``, ``"fp32"``."""
    lost: float
    """Share of updates that are lost for good: the stored bits (weight and remainder) did not
    change. 0 where rounding is stochastic, as it moves weights on average. NaN for an optimizer
    that may mean to leave a weight where it is."""
    unmoved: float
    """Share of updates that did not change the stored bits, by chance or for good."""
    stuck: tuple[str, ...]
    """Names of tensors all of whose sampled updates were lost."""
    tensors: int
    """Number of tensors of the group that had a gradient."""
    advice: str
    """Policies that lose less; empty where 23 mantissa bits are kept, as none keeps more."""

    @property
    def verdict(self) -> str:
        """One line of text: what is lost, at which learning rate, and what helps."""
        if math.isnan(self.lost):
            return (
                f"{_percent(self.unmoved)} of weights with a gradient did not change; whether the "
                "optimizer meant to move them is not known"
            )
        if not self.updates:
            return "no update: every gradient, or the learning rate, is zero"
        if self.lost == 0:
            if self.unmoved:
                return (
                    f"moves on average; {_percent(self.unmoved)} of single updates leave the "
                    "weight where it is, which is right on average"
                )
            return "none lost"
        rate = f"at lr {self.learning_rate:.3g}"
        if not self.advice:
            return f"{_percent(self.lost)} of updates {rate} are below the last bit of fp32"
        text = f"{_percent(self.lost)} of updates are lost {rate}"
        if self.lost >= _ADVISE or self.stuck:
            text += f": use {self.advice}"
        if self.stuck and self.lost < 1:
            some = ", ".join(self.stuck[:3]) + (", ..." if len(self.stuck) > 3 else "")
            text += f"; {len(self.stuck)} of {self.tensors} tensors do not move: {some}"
        return text


@dataclass(slots=True)
class _Sample:
    """Some elements of one tensor before a step, and what the step did to them."""

    name: str
    parameter: Tensor
    update: Update  # rounding mode of the weight
    weight: Tensor
    remainder: Tensor | None
    counts: Tensor | None = None  # elements that were to move; those of them whose bits stayed


class _Group(NamedTuple):
    """The samples of one parameter group."""

    name: str
    rate: Any  # the learning rate of the step, a number or a scalar tensor
    known: bool  # whether the optimizer means to move every element with a gradient
    samples: list[_Sample]


class _Step(NamedTuple):
    """The samples of one optimizer's step, still on the device."""

    number: int
    found: Tensor | None  # the flag of a fused step: above 0 if it changes nothing
    groups: list[_Group]


class LostUpdateMeter:
    """Measures lost updates in any training loop, without changing the loop.

    Example:
        >>> gain = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
        >>> optimizer = optim.AdamW([gain], lr=1e-3, weight_decay=0.0)
        >>> meter = LostUpdateMeter(optimizer, every=1)
        >>> gain.grad = torch.ones_like(gain)
        >>> optimizer.step()
        >>> (report,) = meter.report()
        >>> report.lost
        1.0
        >>> print(report.verdict)
        100 % of updates are lost at lr 0.001: use bf16-split, bf16-kahan, bf16-sr or bf16-master
        >>> meter.close()
    """

    def __init__(
        self,
        source: Optimizer | Sequence[Optimizer] | Precision,
        every: int = 50,
        *,
        start: int = 0,
    ) -> None:
        """Register hooks on the optimizers; their steps are counted from now on.

        Args:
            source: An optimizer, several, or a :class:`halfstep.Precision`, which also provides
                parameter names.
            every: Measure every this many applied steps; 0: never. A fused optimizer under a
                ``GradScaler`` is also called on overflow: such a call is counted, not measured.
            start: Applied steps before this meter's first, in a resumed run.

        Raises:
            PrecisionError: If ``every`` < 0, or ``source`` is none of these.
        """
        if require(every, int, "LostUpdateMeter(every)", "an integer >= 0") < 0:
            raise PrecisionError(f"LostUpdateMeter(every={every}); allowed: an integer >= 0")
        names: dict[Tensor, str] = {}
        if isinstance(source, Precision):
            names = {p: name for name, p in source.named_parameters().items()}
            several: Sequence[Optimizer] = source.optimizers
        else:
            several = optimizers_of(source, "LostUpdateMeter")
        self._watches = [
            _Watch(one, f"optimizer {i} " if len(several) > 1 else "", names, every, start)
            for i, one in enumerate(several)
        ]
        self._handles = [h for watch in self._watches for h in watch.hook()] if every else []

    def report(self) -> tuple[GroupReport, ...]:
        """What the newest measured step did: one report per parameter group with gradients.

        It waits for the device, and is empty until a step has been measured. Sparse gradients are
        left out.
        """
        return tuple(report for watch in self._watches for report in watch.report())

    @property
    def fresh(self) -> bool:
        """Whether any optimizer's newest step was measured; costs nothing."""
        return any(watch.fresh for watch in self._watches)

    def __str__(self) -> str:
        """A table with one row per group, then one verdict per group."""
        reports = self.report()
        if not reports:
            return "no step has been measured yet"
        head = ("group", "stored", "updates", "lr", "lost", "unmoved")
        rows = [
            (r.group, r.stored, f"{r.updates:,.0f}", f"{r.learning_rate:.3g}",
             _percent(r.lost), _percent(r.unmoved))
            for r in reports
        ]  # fmt: skip
        table = aligned([head, *rows], range(2, len(head)))
        return "\n".join([table, *(f"{r.group}: {r.verdict}" for r in reports)])

    def close(self) -> None:
        """Remove the hooks; existing measurements can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


@dataclass(eq=False)
class _Watch:
    """The hooks on one optimizer, and the steps that they have sampled."""

    _optimizer: Any
    _prefix: str
    _names: Mapping[Tensor, str]
    _every: int
    _count: int
    _open: _Step | None = None  # the call in progress
    _unread: list[_Step] = field(default_factory=list)
    _reports: tuple[GroupReport, ...] = ()
    fresh: bool = False

    def hook(self) -> list[RemovableHandle]:
        """Register hooks before and after the optimizer's step."""
        before = self._optimizer.register_step_pre_hook(self._before)
        return [before, self._optimizer.register_step_post_hook(self._after)]

    @torch.no_grad()
    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open = None
        if (self._count + 1) % self._every == 0:
            decided = getattr(kwargs.get("multiplier"), "found", None)  # by halfstep, on the device
            found = getattr(optimizer, "found_inf", decided)
            groups = [self._sample(*pair) for pair in enumerate(optimizer.param_groups)]
            self._open = _Step(self._count + 1, None if found is None else found.clone(), groups)

    def _sample(self, number: int, group: dict[str, Any]) -> _Group:
        own, samples = isinstance(self._optimizer, OwnOptimizer), []
        names = group.get("param_names") or [
            f"tensor {j} of shape {tuple(p.shape)}" for j, p in enumerate(group["params"])
        ]
        for parameter, name in zip(group["params"], names, strict=True):
            weight, held = sampled(local_part(parameter.detach())), self._remainder(parameter)
            update: Update = "nearest"
            if own and weight.dtype == torch.bfloat16:
                update = self._optimizer.storage["update"]
            before = weight.clone(), None if held is None else held.clone()
            samples.append(_Sample(self._names.get(parameter, name), parameter, update, *before))
        decay, rate = group.get("weight_decay"), group.get("lr", math.nan)
        title = f"group {number}" + ("" if decay is None else f" (weight decay {float(decay):g})")
        rate = rate.clone() if isinstance(rate, Tensor) else rate
        known = (own and not group.get("use_muon")) or type(self._optimizer) in _KNOWN
        return _Group(self._prefix + (group.get("name") or title), rate, known, samples)

    def _remainder(self, parameter: Tensor) -> Tensor | None:
        held = local_state(self._optimizer.state.get(parameter, {}), parameter).get(REMAINDER)
        return None if held is None else sampled(held)

    @torch.no_grad()
    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, self._open = self._open, None
        self._count += 1
        self.fresh = step is not None
        if step is None:
            return
        given = kwargs.get("gradients")  # of halfstep's optimizers
        for sample in (one for group in step.groups for one in group.samples):
            p = sample.parameter
            gradient = p.grad if given is None else given.get(p)
            if gradient is not None and not gradient.is_sparse and len(sample.weight):
                sample.counts = self._count_in(sample, local_part(gradient))
        self._unread = [*self._unread[1 - _UNREAD :], step]

    def _count_in(self, sample: _Sample, gradient: Tensor) -> Tensor:
        moving, state = sampled(gradient) != 0, self._optimizer.state.get(sample.parameter, {})
        for name in ("exp_avg", "momentum_buffer"):  # which move a row without a gradient, too
            moment, _ = stored_moment(state, name)
            if moment is not None:
                moving |= sampled(local_part(moment)) != 0
        same = _same_bits(sample.weight, sampled(local_part(sample.parameter.detach())))
        after = self._remainder(sample.parameter)
        if after is not None:
            before = torch.zeros_like(after) if sample.remainder is None else sample.remainder
            same &= _same_bits(before, after)
        return torch.stack([moving.sum(), (moving & same).sum()])

    def report(self) -> tuple[GroupReport, ...]:
        """The reports of the newest measured step that was applied."""
        while self._unread:
            step = self._unread.pop()
            if step.found is None or not float(step.found):
                self._unread = []
                found = (_read(step.number, group) for group in step.groups)
                self._reports = tuple(one for one in found if one is not None)
        return self._reports


def _read(number: int, group: _Group) -> GroupReport | None:
    updates = unmoved = lost = 0.0
    stuck, seen = [], [(s, s.counts.tolist()) for s in group.samples if s.counts is not None]
    if not seen:
        return None
    for sample, (moving, same) in seen:
        if not group.rate:  # nothing is to move
            break
        each = local_part(sample.parameter).numel() / len(sample.weight)
        updates += moving * each
        unmoved += same * each
        if not ROUNDING[sample.update].random:
            lost += same * each
            if group.known and same and same == moving:
                stuck.append(sample.name)
    return GroupReport(
        group=group.name,
        step=number,
        learning_rate=float(group.rate),
        updates=updates,
        stored=", ".join(sorted({_stored(sample) for sample, _ in seen})),
        lost=lost / (updates or 1.0) if group.known else math.nan,
        unmoved=unmoved / (updates or 1.0),
        stuck=tuple(stuck),
        tensors=len(seen),
        advice=next((told for sample, _ in seen if (told := _advice(sample))), ""),
    )


def _advice(sample: _Sample) -> str:
    low = {torch.float16: "fp16-master", torch.bfloat16: ROUNDING[sample.update].advice}
    return low.get(sample.weight.dtype, "")


def _stored(sample: _Sample) -> str:
    name = dtype_name(sample.weight.dtype)
    return name if sample.update == "nearest" else f"{name} {sample.update}"


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    bits = WORDS[a.element_size()]
    return a.view(bits) == b.contiguous().view(bits)


def _percent(share: float) -> str:
    return "?" if math.isnan(share) else f"{100 * share:.3g} %"
