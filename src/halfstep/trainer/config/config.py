"""Configurations from TOML files and overrides, and back.

Text is converted to values here and nowhere else: TOML values and command-line strings to the
fields' types, and the spellings of policy, layout and ``on_nonfinite`` to their objects.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_later
from halfstep.precision.recovery import Recovery
from halfstep.trainer.config.run import BaseConfig, build, did_you_mean, shown
from halfstep.trainer.config.tasks import TASKS, TrainConfig
from halfstep.trainer.data.records import HUB_PREFIX

_PATHS = {"train", "validation", "dev", "tokenizer", "source"}
"""Keys of a section that may name a file or folder, among other things."""
_FOLDERS = ("checkpoint_dir", "second_dir")
"""Keys of section ``run`` that name folders, which need not exist, or URLs."""


def shipped_configs() -> dict[str, str]:
    """Return the TOML text of every configuration that comes with the package, by name."""
    folder = resources.files("halfstep").joinpath("configs")
    files = {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


def read_table(spec: str) -> tuple[str, dict[str, Any]]:
    """Read a configuration as :func:`load_config` does: its name for messages, its raw table."""
    shipped = shipped_configs()
    if spec not in shipped and not spec.endswith(".toml") and "/" not in spec:
        hint, allowed = did_you_mean(spec, shipped), ", ".join(shipped)
        raise ConfigError(
            f"unknown configuration {shown(spec)}{hint}; allowed: {allowed}, or a path to a .toml "
            "file"
        )
    where = f"configuration {'' if spec in shipped else 'file '}{spec}"
    try:
        text = shipped[spec] if spec in shipped else Path(spec).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # also for thousands of brackets
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    table.setdefault("name", Path(spec).stem)
    return where, table


def load_config(
    spec: str,
    overrides: Sequence[tuple[str, Any]] = (),
    *,
    unknown: dict[str, Any] | None = None,
) -> BaseConfig:
    """Read a shipped configuration by name, or a TOML file by path, and apply overrides.

    Args:
        spec: ``"gpt-tiny"`` or ``"path/to/file.toml"``.
        overrides: Pairs of dotted key and value, later ones win; strings are converted to the
            field's type.
        unknown: Takes the keys that are not known, which are refused if it is None. In the file
            that a run has written itself they are those of another version of halfstep.

    Raises:
        ConfigError: Naming the file, the key, what was given and what is allowed.
    """
    where, table = read_table(spec)
    try:
        for key, value in overrides:
            _insert(table, key, value)
            if key == "run.epochs":  # as many as are asked for, however few steps those are
                table["run"].pop("min_steps", None)
        return config_from_table(table, unknown=unknown)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _insert(table: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for name in parents:
        table = table.setdefault(name, {})
    table[last] = value


def config_from_table(
    table: Mapping[str, Any], *, unknown: dict[str, Any] | None = None
) -> BaseConfig:
    """Build a configuration from a nested mapping, as :func:`config_to_table` returns it."""
    values = dict(table)
    task = values.pop("task", TrainConfig.TASK)
    if not isinstance(task, str) or task not in TASKS:
        what = f"key task: {shown(task)}{did_you_mean(str(task), TASKS)}"
        raise ConfigError(f"{what}; allowed: {', '.join(TASKS)}")
    config: BaseConfig = build(TASKS[task], values, unknown=unknown)
    run = config.run
    return replace(
        config,
        precision=parse_later(config.precision),
        run=replace(
            run,
            parallel=run.parallel and Layout.of(run.parallel),
            on_nonfinite=Recovery.parse(run.on_nonfinite),
            on_spike=Recovery.parse(run.on_spike, "on_spike"),
        ),
    )


def config_to_table(config: BaseConfig) -> dict[str, Any]:
    """Return the configuration as nested dicts of plain values, ready for TOML or JSON.

    What names a file or folder becomes absolute, so that a run goes on from any directory.
    """
    table = {"task": config.TASK, **_plain(config)}
    for part in table.values():
        if isinstance(part, dict):
            part |= {key: _absolute(part[key]) for key in _PATHS & part.keys()}
    run = table["run"]
    run |= {k: os.path.abspath(run[k]) for k in _FOLDERS if run[k] and "://" not in run[k]}
    return table


def dotted(config: BaseConfig) -> dict[str, Any]:
    """Return the configuration's plain values by dotted key, such as ``run.max_steps``."""
    return {
        f"{name}.{key}".rstrip("."): value
        for name, part in config_to_table(config).items()
        for key, value in (part.items() if isinstance(part, dict) else [("", part)])
    }


def _absolute(name: Any) -> Any:
    if not isinstance(name, str):
        return tuple(map(_absolute, name))
    if name.startswith(HUB_PREFIX):
        folder, at, split = name.removeprefix(HUB_PREFIX).partition("@")
        return f"{HUB_PREFIX}{_absolute(folder)}{at}{split}"
    return os.path.abspath(name) if name != "bytes" and os.path.exists(name) else name


def _plain(part: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, PrecisionPolicy | Layout | Recovery):
            value = str(value)
        table[field.name] = _plain(value) if is_dataclass(value) else value
    return table


def config_to_toml(config: BaseConfig) -> str:
    """Write the resolved configuration as TOML that :func:`load_config` reads back unchanged."""
    return tomli_w.dumps(config_to_table(config))
