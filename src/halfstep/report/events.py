"""What interrupted a run's course: skipped steps, spikes, values that were not finite; and why.

``causes.jsonl`` holds a first cause in English; a page in another language translates its class
and its remedy, and quotes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from halfstep.diagnostics.nonfinite.cause import OR_BF16, REMEDIES
from halfstep.report.record import Line, RunRecord, number
from halfstep.report.translation import gettext

EventKind = Literal["calibration", "overflow", "nonfinite", "spike"]
KINDS: Mapping[str, EventKind] = {
    "overflow": "overflow",
    "nan_gradients": "overflow",
    "loss_spike": "spike",
    "gradient_spike": "spike",
}
"""A step's ``skip_reason`` to the kind of its event; any other reason is "nonfinite"."""
MOST_ROWS = 12
"""Events that a page tells one by one."""


@dataclass(frozen=True, slots=True)
class Event:
    """A step that did not update the weights.

    Attributes:
        step: Its number.
        kind: ``calibration`` while a loss scale searched for its level, ``overflow`` where a lower
            scale cured it, ``nonfinite`` where none could, ``spike`` for a finite outlier.
        loss: Its loss; None where the run's file does not tell.
        grad_norm: Its gradient norm, likewise.
        loss_scale: Its loss scale, likewise.
        cause: The operation that made its first NaN or infinity, in a line; or empty.
        batches: Batches that ``exclude.jsonl`` lists for it.
    """

    step: int
    kind: EventKind
    loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    cause: str = ""
    batches: int = 0


def events(run: RunRecord) -> list[Event]:
    """The steps of a run that did not update the weights, in order."""
    batches: dict[int, int] = {}
    for line in run.excluded:
        at = line.get("spike_step")
        if isinstance(at, int):
            batches[at] = batches.get(at, 0) + 1
    return [
        Event(
            step=line["step"],
            kind=_kind(line),
            loss=number(line.get("loss")),
            grad_norm=number(line.get("grad_norm")),
            loss_scale=number(line.get("loss_scale")),
            cause=str(line.get("first_cause") or ""),
            batches=batches.get(line["step"], 0),
        )
        for line in run.skipped
    ]


def _kind(line: Line) -> EventKind:
    reason = line.get("skip_reason")
    kind = KINDS.get(reason, "nonfinite") if isinstance(reason, str) else "overflow"
    return "calibration" if kind == "overflow" and line.get("calibrating") else kind


def told(found: Sequence[Event]) -> list[Event]:
    """The events that a reader should look at one by one, at most :data:`MOST_ROWS`."""
    return [e for e in found if e.kind in ("nonfinite", "spike") or e.cause][:MOST_ROWS]


def cause_words(name: str, language: str) -> str:
    """The class of a first cause; one that is not known here as it is."""
    return gettext(name, language)


def remedy_words(line: Line, language: str) -> str:
    """What to do about a cause; what another version of halfstep advised, in its own words."""
    name, wrote = str(line.get("cause_class")), str(line.get("remedy"))
    known = REMEDIES.get(name, "")
    if known and wrote == OR_BF16.format(remedy=known):
        return gettext(OR_BF16, language).format(remedy=gettext(known, language))
    return gettext(wrote, language) if wrote == known else wrote
