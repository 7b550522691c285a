"""Reads what a run left in its folder, however it ended.

A report is wanted most of all for a run that broke. So a line that was cut by a crash is counted
and left out, a file that is missing is named, and a value of the wrong kind is treated as absent.
Nothing that is read is evaluated, unpickled or fetched.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from halfstep.diagnostics.lost_updates import lost_share
from halfstep.diagnostics.metrics import CAUSES, HEALTH, METRICS
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_saved

Line = Mapping[str, Any]


EventKind = Literal["calibration", "overflow", "nonfinite", "spike"]
KINDS: Mapping[str, EventKind] = {
    "overflow": "overflow",
    "nan_gradients": "overflow",
    "loss_spike": "spike",
    "gradient_spike": "spike",
}
"""A step's ``skip_reason`` to the kind of its event; any other reason is "nonfinite"."""


BROKEN: Sequence[EventKind] = ("nonfinite", "overflow")
"""Kinds of the event at which a run breaks off."""


class Event(NamedTuple):
    """A step that did not update the weights."""

    step: int
    kind: EventKind
    """``calibration`` while a loss scale searched for its level, ``overflow`` where a lower scale
    cured it, ``nonfinite`` where none could, ``spike`` for a finite outlier."""
    loss_scale: float | None
    cause: str
    """The operation that made its first NaN or infinity, in a line; or empty."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run's folder holds.

    Attributes:
        name: The folder's name.
        config: The resolved configuration, by table and key; empty where it cannot be read.
        environment: ``env.json``: the machine that the run began on.
        steps: The lines of ``metrics.jsonl``, by step.
        health: The lines of ``health.jsonl``: each layer's numbers, and the alarms.
        causes: What made a step's loss or gradients not finite, where that was found out.
        scores: ``report.json``: a classifier's answers to its validation examples, at their best.
        damaged: File name to the number of its lines that could not be read.
        known_policy: The policy as a value, where the run itself asks; None: that of ``config``.
    """

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: Sequence[Line]
    health: Sequence[Line] = ()
    causes: Sequence[Line] = ()
    scores: Line = field(default_factory=dict)
    damaged: Mapping[str, int] = field(default_factory=dict)
    known_policy: PrecisionPolicy | None = None

    @property
    def policy(self) -> str:
        """The precision policy; "?" where the configuration does not tell."""
        found = self.config.get("precision")
        return found if isinstance(found, str) else "?"

    @property
    def parsed(self) -> PrecisionPolicy:
        """The policy as a value; fp32's where it cannot be read."""
        return self.known_policy or parse_saved(self.policy) or PrecisionPolicy()

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run was to take."""
        run = self.config.get("run")
        found = run.get("max_steps") if isinstance(run, dict) else None
        return found if isinstance(found, int) and found > 0 else None

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps whose line has a number under ``key``, and these numbers; NaN is one."""
        found = [
            (line["step"], value)
            for line in self.steps
            if (value := number(line.get(key))) is not None
        ]
        return [step for step, _ in found], [value for _, value in found]

    def groups(self, key: str) -> dict[str, tuple[list[int], list[float]]]:
        """As :meth:`series`, for a key that holds a number for each of several groups."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for line in self.steps:
            table = line.get(key)
            for group, given in table.items() if isinstance(table, dict) else ():
                value = number(given)
                if value is not None:
                    steps, values = found.setdefault(group, ([], []))
                    steps.append(line["step"])
                    values.append(value)
        return found

    @property
    def applied(self) -> RunRecord:
        """The run without its skipped steps, whose losses are of bad batches; whole if all are."""
        kept = [line for line in self.steps if line.get("applied") is not False]
        return replace(self, steps=kept) if kept else self

    @property
    def skipped(self) -> list[Line]:
        """The lines of steps that did not update the weights."""
        return [line for line in self.steps if line.get("applied") is False]

    @property
    def stopped(self) -> EventKind | None:
        """The kind of the step that ended a run by an error, whose line has no result."""
        last = self.steps[-1] if self.steps else {}
        ended = last.get("applied") is False and last.get("skipped_total") is None
        return _kind(last) if ended else None

    @property
    def lost_shares(self) -> dict[str, float]:
        """The share of updates that each parameter group lost, where measured steps tell."""
        rates = dict(zip(*self.series("learning_rate"), strict=True))
        peak = max(filter(math.isfinite, rates.values()), default=math.nan)
        shares = {
            group: lost_share(
                zip((rates.get(s, math.nan) for s in steps), values, strict=True), peak
            )
            for group, (steps, values) in self.groups("lost_updates").items()
        }
        return {group: share for group, share in shares.items() if not math.isnan(share)}

    @property
    def events(self) -> list[Event]:
        """The steps that did not update the weights, in order."""
        return [
            Event(
                step=line["step"],
                kind=_kind(line),
                loss_scale=number(line.get("loss_scale")),
                cause=str(line.get("first_cause") or ""),
            )
            for line in self.skipped
        ]


def _kind(line: Line) -> EventKind:
    reason = line.get("skip_reason")
    kind = KINDS.get(reason, "nonfinite") if isinstance(reason, str) else "overflow"
    return "calibration" if kind == "overflow" and line.get("calibrating") else kind


def number(value: Any) -> float | None:
    """A number as a run's files write it: JSON's own, or "nan", "inf" and "-inf" as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def read_run(folder: Path, policy: PrecisionPolicy | None = None) -> RunRecord:
    """Read a run's folder; ``policy`` is the run's as a value, where the caller has it.

    Raises:
        ConfigError: If it holds neither a configuration nor metrics, so is no run's.
    """
    if not (folder / "config.toml").is_file() and not (folder / METRICS).is_file():
        raise ConfigError(
            f"{folder} holds no run: neither config.toml nor {METRICS} is there. Give the folder "
            "that run.output_dir names"
        )
    damaged: dict[str, int] = {}
    lines = {
        name: [*_objects((_text(folder / name) or "").splitlines(), name, damaged)]
        for name in (METRICS, CAUSES, HEALTH)
    }
    by_step = {line["step"]: line for line in lines[METRICS] if _is_count(line.get("step"))}
    return RunRecord(
        name=folder.resolve().name,
        config=_toml(folder / "config.toml", damaged),
        environment=_json(folder / "env.json", damaged),
        steps=[by_step[step] for step in sorted(by_step)],
        health=lines[HEALTH],
        causes=lines[CAUSES],
        scores=_scores(folder / "report.json", damaged),
        damaged=damaged,
        known_policy=policy,
    )


def _scores(path: Path, damaged: dict[str, int]) -> Line:
    """A classifier's labels and confusion matrix; empty unless both are whole."""
    found = _json(path, damaged)
    rows, labels = found.get("confusion"), found.get("labels")
    if not isinstance(labels, list) or not isinstance(rows, list) or len(rows) != len(labels):
        return {}
    square = all(isinstance(row, list) and len(row) == len(rows) for row in rows)
    whole = square and all(_is_count(n) for row in rows for n in row)
    return found if whole and any(map(any, rows)) else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _objects(lines: Sequence[str], name: str, damaged: dict[str, int]) -> Iterator[Line]:
    for line in lines:
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            yield found
        else:
            damaged[name] = damaged.get(name, 0) + 1


def _json(path: Path, damaged: dict[str, int]) -> Line:
    text = _text(path)
    return {} if text is None else next(_objects([text], path.name, damaged), {})


def _toml(path: Path, damaged: dict[str, int]) -> Line:
    text = _text(path)
    if text is None:
        return {}
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        damaged[path.name] = 1
        return {}
