"""The lost-update meter: how many updates of a real step leave the stored weights unchanged.

A 16-bit weight loses any update below half the gap between neighbouring numbers, without a warning:
the loss falls more slowly, and gains of norms stay at exactly 1. The meter examines a sample of
each parameter group on every N-th step, through the optimizer's own hooks::

    before the step   copy the sampled weights, remainders, gradients and moments
    after it          copy the sampled weights and remainders again
    in report()       replay the step's rule on the sample in fp64 and compare bits

The loop needs no change, results stay the same bit for bit, and nothing waits for the device until
:meth:`LostUpdateMeter.report`. ``docs/lost-updates.md`` is the how-to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.diagnostics.lost_updates import (
    Chooser,
    GroupReport,
    Sample,
    StepSample,
    after_step,
    before_step,
    is_own,
    lost_table,
    measure,
)
from halfstep.errors import PrecisionError
from halfstep.optim.moments import decode_elements
from halfstep.optim.rules import ADAMW, SGD, Algorithm
from halfstep.optim.state import stored_moment
from halfstep.precision.border import require
from halfstep.precision.masters.rounding import random_key
from halfstep.precision.step import Precision

_RULES: Mapping[type[Optimizer], Algorithm] = {
    optim.AdamW: ADAMW,
    optim.Adam: ADAMW,
    optim.SGD: SGD,
}
"""Optimizers of torch whose rules are those of halfstep's own, and can be replayed."""
_UNREAD = 8  # measured steps kept while it is not known whether a fused optimizer applied them


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
        samples: int = 4096,
        seed: int = 0,
        *,
        start: int = 0,
    ) -> None:
        """Register hooks on the optimizers; their steps are counted from now on.

        Args:
            source: An optimizer, several, or a :class:`halfstep.Precision`, which also provides
                parameter names.
            every: Measure every this many applied steps; 0: never. A fused optimizer under a
                ``GradScaler`` is also called on overflow: such a call is counted, not measured.
            samples: Elements sampled per parameter group, spread over its tensors by size, with a
                few of every tensor at least.
            seed: Seed of the choice of elements, which depends on nothing else.
            start: Applied steps before this meter's first, in a resumed run.

        Raises:
            PrecisionError: If ``every`` < 0, ``samples`` < 1, or ``source`` is none of these.
        """
        allowed = "every >= 0, samples >= 1"
        for name, number in (("every", every), ("samples", samples)):
            require(number, int, f"LostUpdateMeter({name})", allowed)
        if every < 0 or samples < 1:
            raise PrecisionError(f"every={every}, samples={samples}; allowed: {allowed}")
        names: dict[Tensor, str] = {}
        if isinstance(source, Precision):
            names = {p: name for name, p in source.named_parameters().items()}
            optimizers = source.optimizers
        else:
            optimizers = [source] if isinstance(source, Optimizer) else list(_optimizers(source))
        self._watches = []
        for i, optimizer in enumerate(optimizers):
            prefix = f"optimizer {i} " if len(optimizers) > 1 else ""
            choose = Chooser(samples, random_key(seed, i, 0))
            watch = _Watch(optimizer, prefix, choose, names, every, start)
            self._watches.append(watch)
        self._handles = [h for watch in self._watches for h in watch.hook()] if every else []

    def report(self) -> tuple[GroupReport, ...]:
        """What the newest measured step did: one report per parameter group with gradients.

        It waits for the device, and is empty until a step has been measured.
        """
        return tuple(report for watch in self._watches for report in watch.report())

    @property
    def fresh(self) -> bool:
        """Whether any optimizer's newest step was measured; costs nothing."""
        return any(watch.fresh for watch in self._watches)

    def lost_table(self) -> str:
        """The reports as a table of text."""
        reports = self.report()
        return lost_table(reports) if reports else "no step has been measured yet"

    __str__ = lost_table

    def close(self) -> None:
        """Remove the hooks; existing measurements can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _optimizers(source: object) -> Sequence[Optimizer]:
    """A list of optimizers as it is, or an error for anything else."""
    several = source if isinstance(source, list | tuple) else ()
    if several and all(isinstance(one, Optimizer) for one in several):
        return several
    raise PrecisionError(
        f"LostUpdateMeter got {source!r:.80}; allowed: an optimizer, a list of them, or "
        "a halfstep.Precision"
    )


@dataclass(eq=False)
class _Watch:
    """The hooks on one optimizer, and the steps that they have sampled."""

    _optimizer: Optimizer
    _prefix: str
    _choose: Chooser
    _names: Mapping[Tensor, str]
    _every: int
    _count: int
    _open: StepSample | None = None  # the call in progress
    _unread: list[StepSample] = field(default_factory=list)
    _reports: tuple[GroupReport, ...] = ()
    fresh: bool = False

    def hook(self) -> list[RemovableHandle]:
        """Register hooks before and after the optimizer's step."""
        before = self._optimizer.register_step_pre_hook(self._before)
        return [before, self._optimizer.register_step_post_hook(self._after)]

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open = None
        if (self._count + 1) % self._every == 0:
            number = self._count + 1
            self._open = before_step(optimizer, number, self._choose, self._names, args, kwargs)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, self._open = self._open, None
        if step is not None:
            after_step(optimizer, step)
        self._count += 1
        self.fresh = step is not None
        if step is not None:
            kept = self._unread[1 - _UNREAD :] if step.found is not None else []
            self._unread = [*kept, step]

    def report(self) -> tuple[GroupReport, ...]:
        """The reports of the newest measured step that was applied."""
        while self._unread:
            step = self._unread.pop()
            if step.found is None or not float(step.found):
                self._unread = []
                self._reports = self._read(step)
        return self._reports

    def _read(self, step: StepSample) -> tuple[GroupReport, ...]:
        scale = 1.0 if step.scale is None else float(step.scale)
        reports: list[GroupReport] = []
        for number, group in enumerate(step.groups):
            samples = [s.on_cpu() for s in group.samples if s.gradient.numel()]
            if samples:
                name = self._name(number, group.options, {r.group for r in reports})
                options = {key: plain(value) for key, value in group.options.items()}
                multiplier = float(step.multiplier) / scale
                updates = intended_updates(self._optimizer, options, samples, multiplier)
                note = f"{group.sparse} tensors with sparse gradients were not measured"
                rate = options.get("lr")
                reports.append(
                    measure(
                        name,
                        step.number,
                        math.nan if rate is None else float(rate),
                        samples,
                        updates,
                        note if group.sparse else "",
                    )
                )
        return tuple(reports)

    def _name(self, number: int, options: Mapping[str, Any], taken: set[str]) -> str:
        decay = options.get("weight_decay")
        suffix = "" if decay is None else f" (weight decay {float(decay):g})"
        name = f"{self._prefix}{options.get('name') or f'group {number}{suffix}'}"
        return f"{name} (group {number})" if name in taken else name


def intended_updates(
    optimizer: Any, options: dict[str, Any], samples: Sequence[Sample], multiplier: float
) -> list[Tensor] | str:
    """Replay a step by its rule, with the sampled weights in fp64.

    Args:
        optimizer: One of halfstep's, or torch's AdamW, Adam or SGD.
        options: Its group's options at the step, all plain numbers.
        samples: The samples of that group, on the CPU.
        multiplier: The step's factor of every gradient.

    Returns:
        For each sample the change of its elements, fp64 of shape (k,); or why it is not known.
    """
    own, kind = is_own(optimizer), type(optimizer)
    if not own and (kind not in _RULES or options.get("amsgrad")):
        return f"the rule of {kind.__name__} is not one of those that are replayed"
    if options.get("use_muon"):
        return "the directions of Muon are those of whole matrices"
    rule = optimizer.algorithm_of(options) if own else _RULES[kind]
    if options.get("maximize"):
        multiplier = -multiplier
    changes = []
    for sample in samples:
        value, gradient = sample.value().double(), sample.gradient.double() * multiplier
        used = options
        if kind is optim.Adam and not options.get("decoupled_weight_decay"):  # its decay is L2
            gradient = gradient + value * options["weight_decay"]
            used = options | {"weight_decay": 0.0}
        first, second, constants = _before(rule, used, sample)
        changes.append(rule.move(value, gradient, first, second, constants)[0] - value)
    return changes


def _before(
    rule: Algorithm, options: dict[str, Any], sample: Sample
) -> tuple[Tensor, Tensor, tuple[float, ...]]:
    """First and second moment in fp64, and the constants of the step that follows."""
    state, shape = sample.state, sample.weight.shape
    found = [_moment(m, state, signed=i == 0) for i, m in enumerate(rule.moments)]
    zero = torch.zeros(shape, dtype=torch.float64)
    first, *rest = (zero if m is None else m for m in found or [None])
    # torch's SGD counts no steps: what it has is a momentum, from its second step on
    taken = int(state.get("step", state.get("momentum_buffer") is not None))
    return first, rest[0] if rest else first, rule.constants(options, taken + 1)


def _moment(name: str, state: Mapping[str, Any], *, signed: bool) -> Tensor | None:
    """A sampled moment in fp64, whatever its format; None before the first step."""
    values, tops = stored_moment(state, name)
    if values is None:
        return None
    decoded = values if tops is None else decode_elements(values, tops, signed=signed)
    return decoded.double()


def plain(value: Any) -> Any:
    """A group's option with tensors, such as a learning rate, as numbers; may synchronise."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(plain(part) for part in value)
    return value
