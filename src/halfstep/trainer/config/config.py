"""Configurations from TOML files and overrides, and back.

Text becomes values here and nowhere else: TOML and words of the command line become the fields'
types, and the spellings of policy, layout and ``on_nonfinite`` what they mean.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import OnNonFinite
from halfstep.trainer.config.optimizer import ScheduleConfig
from halfstep.trainer.config.read import FAMILY, build, did_you_mean, insert, sections, shown
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TASKS, TrainConfig


def shipped_configs() -> dict[str, str]:
    """Name to TOML text of the configurations that come with the package."""
    folder = resources.files("halfstep").joinpath("configs")
    files = {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


def read_table(spec: str) -> tuple[str, dict[str, Any]]:
    """What to call a configuration in messages, and its TOML, unchecked; the rest as below."""
    shipped = shipped_configs()
    if spec in shipped:
        text, where = shipped[spec], f"configuration {spec}"
    elif spec.endswith(".toml") or "/" in spec:
        where = f"configuration file {spec}"
        try:
            text = Path(spec).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            raise ConfigError(f"{where}: cannot be read: {error}") from error
    else:
        raise ConfigError(
            f"unknown configuration {shown(spec)}{did_you_mean(spec, shipped)}; allowed: "
            f"{', '.join(shipped)}, or a path to a .toml file"
        )
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # thousands of digits or of brackets, too
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    table.setdefault("name", Path(spec).stem)
    return where, table


def load_config(spec: str, overrides: Sequence[tuple[str, Any]] = ()) -> BaseConfig:
    """Read a shipped configuration by name, or a TOML file by path, and apply overrides.

    Args:
        spec: ``"gpt-tiny"`` or ``"path/to/file.toml"``.
        overrides: Pairs of dotted key and value, later ones win; strings are converted to the
            field's type. A ``run.max_steps`` shorter than the file's warm-up shortens that too.

    Raises:
        ConfigError: Naming the file, the key, what was given and what is allowed.
    """
    where, table = read_table(spec)
    try:
        for key, value in overrides:
            insert(table, key, value)
        given = {key for key, _ in overrides}
        # A warm-up that is given beside the length of the run stays: the two contradict each other.
        if "run.max_steps" in given and "schedule.warmup_steps" not in given:
            _shorten_warmup(table)
        return config_from_table(table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _shorten_warmup(table: dict[str, Any]) -> None:
    """Let a file's warm-up end with a run that the command line makes shorter than it."""
    schedule = table.setdefault("schedule", {})
    try:
        steps = int(table["run"]["max_steps"])
        warmup = int(schedule.get("warmup_steps", ScheduleConfig().warmup_steps))
    except (AttributeError, TypeError, ValueError):
        return  # refused, with the key, when the configuration is built
    if 1 <= steps < warmup:
        schedule["warmup_steps"] = steps


def config_from_table(table: Mapping[str, Any]) -> BaseConfig:
    """A configuration from a nested mapping, as :func:`config_to_table` gives it."""
    values = dict(table)
    task = values.pop("task", TrainConfig.TASK)
    if not isinstance(task, str) or task not in TASKS:
        raise ConfigError(
            f"key task: {shown(task)}{did_you_mean(str(task), TASKS)}; allowed: {', '.join(TASKS)}"
        )
    config: BaseConfig = build(TASKS[task], values)
    run = config.run
    return replace(
        config,
        # a value from here on, so that a run does not depend on a policy file after it has started
        precision=parse_policy(config.precision),
        run=replace(
            run,
            parallel=run.parallel and Layout.of(run.parallel),
            on_nonfinite=OnNonFinite.parse(run.on_nonfinite),
        ),
    )


def config_to_table(config: BaseConfig) -> dict[str, Any]:
    """The configuration as nested plain values."""
    return {"task": config.TASK, **_plain(config)}


def _plain(part: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    hints = get_type_hints(type(part))
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, PrecisionPolicy | Layout | OnNonFinite):
            value = str(value)
        table[field.name] = _plain(value) if is_dataclass(value) else value
        if type(value) in sections(hints[field.name])[1:]:  # the first needs no name
            table[field.name] = {FAMILY: value.FAMILY, **table[field.name]}
    return table


def config_to_toml(config: BaseConfig) -> str:
    """The resolved configuration as TOML that :func:`load_config` reads back to an equal value."""
    return tomli_w.dumps(config_to_table(config))
