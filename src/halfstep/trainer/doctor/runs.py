"""The mistakes of precision that can be seen in a run's folder: one table, one entry each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep.diagnostics.nonfinite.cause import Cause
from halfstep.diagnostics.recording.metrics import CAUSES, METRICS
from halfstep.diagnostics.scripts.rules import Finding
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.report.record import number as as_number
from halfstep.trainer.checkpoint.store import list_checkpoints
from halfstep.trainer.config.config import config_from_table, config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.environment import choose_device, policy_on
from halfstep.trainer.run.folder import CHECKPOINTS, run_config
from halfstep.words import Phrase, Told

_phrase = Told("halfstep.trainer.doctor").phrase

_SKIPS = 0.05
"""Share of skipped steps from which a run is told. A dynamic scale that fits skips one step in
``growth_interval``, 2000 by default."""
_LOST = 0.1
"""Share of updates lost from which a run is told."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run's folder says of itself.

    Attributes:
        config: Its configuration.
        policy: The policy that it trains in.
        records: Its lines of ``metrics.jsonl``, as they stand.
        state: ``state.json`` of the newest checkpoint; None where there is none.
        causes: The first causes of ``causes.jsonl``, each after its line, from 1.
    """

    config: BaseConfig
    policy: PrecisionPolicy
    records: list[dict[str, Any]]
    state: Mapping[str, Any] | None
    causes: Sequence[tuple[int, Cause]]


class Found(NamedTuple):
    """A file of the folder, a line in it (0: all of it), what is wrong, and its own remedy."""

    file: str
    line: int
    what: str
    instead: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRule:
    """One kind of mistake in a run.

    Attributes:
        name: Its name in reports, the same as a script's where it is the same mistake.
        find: What is wrong in a run, or None.
        bad: Changes to a healthy run's facts, as tables, with which it is found.
    """

    name: str
    find: Callable[[Facts], Found | None]
    bad: Mapping[str, Any]

    @property
    def why(self) -> Phrase:
        """The harm that it does to the run."""
        return _phrase(f"why {self.name}")

    @property
    def instead(self) -> Phrase:
        """The option or line that mends it."""
        return _phrase(f"instead {self.name}")


def check_run(path: Path) -> list[Finding]:
    """Look for known mistakes in a run's folder, which is only read.

    Raises:
        ConfigError: If the folder holds no run.
    """
    facts = read_facts(path)
    return [
        Finding(
            str(path / found.file),
            found.line,
            rule.name,
            found.what,
            rule.why,
            found.instead or rule.instead,
        )
        for rule in RUN_RULES
        if (found := rule.find(facts)) is not None
    ]


def read_facts(path: Path) -> Facts:
    """Read what :func:`check_run` judges.

    Raises:
        ConfigError: If the folder holds no run, or its files are not what a run writes.
    """
    config = run_config(path)
    try:
        records = _lines(path / METRICS)
        causes = _lines(path / CAUSES)
        saved = list_checkpoints(path / CHECKPOINTS)
        state = json.loads((saved[-1] / "state.json").read_text("utf-8")) if saved else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its metrics or checkpoint cannot be read: {error}") from error
    for name, lines in ((METRICS, records), (CAUSES, causes)):
        if not all(isinstance(line, dict) for line in lines):
            raise ConfigError(f"{path / name}: a line is not a JSON object")
    return facts_of(config, records, state if isinstance(state, dict) else None, causes)


def _lines(path: Path) -> list[Any]:
    """A file of JSON lines, but for a last one that a killed process did not finish."""
    whole, _, _ = (path.read_text(encoding="utf-8") if path.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def facts_of(
    config: BaseConfig,
    records: list[dict[str, Any]],
    state: Mapping[str, Any] | None,
    causes: Sequence[Mapping[str, Any]] = (),
) -> Facts:
    """Put together what is known of a run; its policy is resolved already, or ``auto`` here."""
    policy = policy_on(config.precision, choose_device("auto"))
    known = [(i, cause) for i, line in enumerate(causes, 1) if (cause := Cause.from_json(line))]
    return Facts(config, policy, records, state, known)


def changed(facts: Facts, changes: Mapping[str, Any]) -> Facts:
    """The facts with other values: ``"section.key"`` of the configuration, or a file's lines.

    For the examples of the table, which tests run.
    """
    table = config_to_table(facts.config)
    for key, value in changes.items():
        if key not in ("records", "state", "causes"):
            section, _, name = key.rpartition(".")
            (table[section] if section else table)[name] = value
    return facts_of(
        config_from_table(table),
        changes.get("records", facts.records),
        changes.get("state", facts.state),
        changes.get("causes", [cause.to_json() for _, cause in facts.causes]),
    )


def _first_cause(facts: Facts) -> Found | None:
    if not facts.causes:
        return None
    line, cause = facts.causes[-1]
    return Found(CAUSES, line, cause.summary, cause.remedy)


def _scale_not_saved(facts: Facts) -> Found | None:
    if facts.policy.loss_scale.kind != "dynamic" or facts.state is None:
        return None
    saved = facts.state.get("precision")
    scale = saved.get("loss_scale") if isinstance(saved, dict) else None
    if isinstance(scale, dict) and "value" in scale:
        return None
    return Found(CHECKPOINTS, 0, _phrase("found scaler-not-saved"))


def _schedule_over_skips(facts: Facts) -> Found | None:
    skipped = _skipped(facts)
    if facts.config.schedule.on_skip != "advance" or not skipped:
        return None
    return Found("config.toml", 0, _phrase("found schedule-over-skips", skipped=skipped))


def _eps_underflows(facts: Facts) -> Found | None:
    eps, name = facts.config.optimizer.eps, facts.config.optimizer.name
    if "adam" not in name or facts.policy.master_dtype != torch.float16 or eps >= 2.0**-25:
        return None
    return Found("config.toml", 0, _phrase("found eps-underflows", eps=eps))


def _many_skips(facts: Facts) -> Found | None:
    judged = [record for record in facts.records if not record.get("calibrating")]
    skipped = sum(record.get("applied") is False for record in judged)
    if facts.causes or len(judged) < 20 or skipped <= _SKIPS * len(judged):
        return None  # a known cause says more
    first = next(i for i, r in enumerate(facts.records, 1) if r.get("applied") is False)
    return Found(METRICS, first, _phrase("found many-skips", skipped=skipped, steps=len(judged)))


def _scale_below_one(facts: Facts) -> Found | None:
    if facts.policy.loss_scale.kind != "dynamic":
        return None
    for number, record in enumerate(facts.records, 1):
        scale = record.get("loss_scale")
        if isinstance(scale, int | float) and scale < 1:
            return Found(METRICS, number, _phrase("found scale-below-one", scale=scale))
    return None


def _updates_lost(facts: Facts) -> Found | None:
    for number, record in reversed(list(enumerate(facts.records, 1))):
        lost = record.get("lost_updates")
        shares = lost.items() if isinstance(lost, dict) else ()
        known = {name: share for name, of in shares if math.isfinite(share := _number(of))}
        if known:
            worst = max(known, key=lambda name: known[name])
            if known[worst] <= _LOST:
                return None
            said = _phrase("found updates-lost", share=known[worst], name=worst)
            return Found(METRICS, number, said)
    return None


def _loss_not_finite(facts: Facts) -> Found | None:
    for number, record in enumerate(facts.records, 1):
        finite = math.isfinite(_number(record.get("loss")))
        if not (finite or facts.causes or record.get("skip_reason") == "overflow"):
            said = _phrase("found loss-not-finite", step=record.get("step"))
            return Found(METRICS, number, said)
    return None


def _number(value: Any) -> float:
    """A number of a line; NaN where there is none."""
    found = as_number(value)
    return math.nan if found is None else found


def _skipped(facts: Facts) -> int:
    return sum(record.get("applied") is False for record in facts.records)


_STEP = {"step": 1, "applied": True, "loss": 1.0, "loss_scale": 65536.0}
_SKIP = {**_STEP, "applied": False}
_CAUSE = Cause(
    "overflow", "aten.mm.default", "head", "Linear", "", "forward", torch.float16, 0, 1, 4, ()
)

RUN_RULES: tuple[RunRule, ...] = (
    RunRule(name="first-cause", find=_first_cause, bad={"causes": [_CAUSE.to_json()]}),
    RunRule(
        name="scaler-not-saved",
        find=_scale_not_saved,
        bad={"precision": "fp16-mixed", "state": {"precision": {"policy": "fp16-mixed"}}},
    ),
    RunRule(
        name="schedule-over-skips",
        find=_schedule_over_skips,
        bad={"schedule.on_skip": "advance", "records": [_STEP, _SKIP]},
    ),
    RunRule(
        name="eps-underflows",
        find=_eps_underflows,
        bad={"precision": "fp16-pure", "optimizer.eps": 1e-8},
    ),
    RunRule(
        name="many-skips",
        find=_many_skips,
        bad={"records": [_STEP] * 20 + [_SKIP] * 3},
    ),
    RunRule(
        name="scale-below-one",
        find=_scale_below_one,
        bad={"precision": "fp16-mixed", "records": [_STEP, {**_STEP, "loss_scale": 0.5}]},
    ),
    RunRule(
        name="updates-lost",
        find=_updates_lost,
        bad={"records": [{**_STEP, "lost_updates": {"blocks": 0.4}}]},
    ),
    RunRule(
        name="loss-not-finite",
        find=_loss_not_finite,
        bad={"records": [_STEP, {**_SKIP, "loss": "nan", "skip_reason": "nonfinite_loss"}]},
    ),
)
"""Every rule."""
