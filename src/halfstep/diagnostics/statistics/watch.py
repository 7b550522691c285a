"""``halfstep.watch``: statistics of the weights, activations and gradients of a model.

It is a context around anybody's loop. Every so many steps it counts, for each tensor, how many
numbers have which binary exponent; the other steps run without its hooks. Weights and losses are
bit for bit those of a run without it, wherever a model computes the same with hooks as without.
Where compiled kernels compute a block of halfstep's own GPT, a watched step is torch's instead.
``docs/watch.md`` says how to read what it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from halfstep.diagnostics.metrics import append_line
from halfstep.diagnostics.statistics.numerics import StepNumerics
from halfstep.diagnostics.statistics.steps import StepListener
from halfstep.diagnostics.statistics.values import Collector
from halfstep.precision.step import Precision


class Watch(StepListener):
    """The context that :func:`watch` makes; it can be read inside and afterwards."""

    _last: StepNumerics | None = None

    def __enter__(self) -> Self:
        """Watch the loop's steps from now on.

        Raises:
            CheckpointError: If the file of ``to`` cannot be written.
        """
        if self._steps is None:
            self._begin()
        return self

    def report(self) -> StepNumerics | None:
        """The newest watched step, of this process; None before the first has ended."""
        return self._last

    def __str__(self) -> str:
        return str(self._last or "no step has been watched yet")

    def _collect(self, step: int) -> Collector | None:
        watched = self._steps is not None and (step % self._every == 0 or step == 1)
        return Collector(self._model, self._steps.scale) if watched and self._steps else None

    def _measured(self, applied: bool) -> None:
        collector = self.collector
        self._last = StepNumerics(
            step=self._step,
            applied=applied,
            loss_scale=collector.scale,
            policy="" if self._precision is None else str(self._precision.policy),
            tensors=tuple(collector.read()),
        )
        if self._to is not None:
            append_line(self._to, asdict(self._last))


def watch(
    model: nn.Module,
    source: Precision | Optimizer | Sequence[Optimizer] | None = None,
    *,
    scaler: Any = None,
    every: int = 100,
    to: str | Path | None = None,
    start: int = 0,
) -> Watch:
    """Count the exponents of a model's weights, activations and gradients in a loop.

    Use it as a context around the loop. The first step and every ``every``-th are watched. With
    several ranks each counts its own numbers, and rank 0 writes the file.

    Args:
        model: The model that is trained; modules that ``torch.compile`` runs show no activations.
        source: The loop's :class:`halfstep.Precision`, its optimizer, or all of several that step
            in turn. None: any optimizer that holds one of the model's parameters.
        scaler: The loop's gradient scaler (torch's or halfstep's), where it has one: gradients are
            shown without its scale, and steps that it skips are counted.
        every: Watch every this many steps, skipped ones included.
        to: A file that gets one line of JSON for each watched step: ``numerics.jsonl``.
        start: Steps before this context's first, in a resumed run: the file goes on after them.

    Returns:
        The context. Its ``report()`` gives the newest watched step as values, and ``print`` shows
        what fp16 would make of it.

    Raises:
        PrecisionError: If an argument is not one of these.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with watch(model, optimizer, every=1) as watched:
        ...     model(torch.ones(8, 4)).sum().backward()
        ...     optimizer.step()
        >>> [(one.kind, one.name, one.absmax) for one in watched.report().of("gradient")]
        [('gradient', 'weight', 8.0), ('gradient', 'bias', 8.0)]
    """
    return Watch("watch", model, source, scaler, every, to, start)
