"""The run configuration: one tree of frozen dataclasses, from TOML and dotted overrides.

Each leaf lives with the code that reads it; this file only assembles them and finds the class of a
file's task.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import tomli_w

from halfstep.errors import ConfigError
from halfstep.trainer.config.finetune import ClassifyConfig, LMConfig
from halfstep.trainer.config.read import build, did_you_mean, insert, shown
from halfstep.trainer.config.run import BaseConfig, RunConfig
from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.models.gpt.config import GPTConfig
from halfstep.trainer.optimizer import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRunConfig(RunConfig):
    """How a GPT is trained on text."""

    block_size: int = 0
    """Tokens of one training sequence; 0: the model's block_size."""
    init_from: str = ""
    """A local Hugging Face GPT-2 folder to start from instead of random weights. Its shape takes
    the place of ``model``'s, whose dropout and activation_checkpointing stay."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        RunConfig.__post_init__(self)
        if self.block_size < 0:
            raise ConfigError(f"run.block_size={self.block_size}; allowed: >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(BaseConfig):
    """A GPT trained on text."""

    TASK: ClassVar[str] = "pretrain"

    model: GPTConfig
    data: DataConfig = field(default_factory=DataConfig)
    run: TextRunConfig = field(default_factory=TextRunConfig)

    def __post_init__(self) -> None:
        """Raise for contradictions between the parts."""
        BaseConfig.__post_init__(self)
        if self.run.init_from and self.data.tokenizer.startswith("bpe:"):
            raise ConfigError(
                f"data.tokenizer={self.data.tokenizer} would give the words of run.init_from="
                f"{self.run.init_from} other ids than it was trained with; give --tokenizer its "
                "tokenizer.json or folder"
            )
        if not self.run.init_from and self.block_size > self.model.block_size:
            raise ConfigError(
                f"run.block_size={self.run.block_size} is over model.block_size="
                f"{self.model.block_size}; shorten the sequences or raise --model.block_size"
            )

    @property
    def block_size(self) -> int:
        """Tokens of one training sequence."""
        return self.run.block_size or self.model.block_size


TASKS: Mapping[str, type[BaseConfig]] = {
    kind.TASK: kind for kind in (TrainConfig, ClassifyConfig, LMConfig)
}
"""The value of a file's key ``task``, absent for ``pretrain``, to the class of its tree."""


def shipped_configs() -> dict[str, str]:
    """Name to TOML text of the configurations that come with the package."""
    folder = resources.files("halfstep").joinpath("configs")
    files = {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


def load_config(spec: str, overrides: Sequence[tuple[str, Any]] = ()) -> BaseConfig:
    """Read a shipped configuration by name, or a TOML file by path, and apply overrides.

    Args:
        spec: ``"gpt-tiny"`` or ``"path/to/file.toml"``.
        overrides: Pairs of dotted key and value, later ones win; strings are converted to the
            field's type. A ``run.max_steps`` shorter than the file's warm-up shortens that too.

    Raises:
        ConfigError: Naming the file, the key, what was given and what is allowed.
    """
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
    try:
        for key, value in overrides:
            insert(table, key, value)
        _shorten_warmup(table, {key for key, _ in overrides})
        return config_from_table(table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _shorten_warmup(table: dict[str, Any], given: Set[str]) -> None:
    """Let a file's warm-up end with a run that the command line makes shorter than it.

    A warm-up that is given beside the length of the run stays: the two contradict each other.
    """
    if "run.max_steps" not in given or "schedule.warmup_steps" in given:
        return
    run, schedule = table.get("run"), table.setdefault("schedule", {})
    try:
        steps = int(run["max_steps"]) if isinstance(run, Mapping) else 0
        own = ScheduleConfig().warmup_steps if table.get("task", "") in ("", "pretrain") else 0
        warmup = int(schedule.get("warmup_steps", own))
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
    config: BaseConfig = build(TASKS[task], values, "")
    return config


def config_to_table(config: BaseConfig) -> dict[str, Any]:
    """The configuration as nested plain values."""
    return {"task": config.TASK, **dataclasses.asdict(config)}


def config_to_toml(config: BaseConfig) -> str:
    """The resolved configuration as TOML that :func:`load_config` reads back to an equal value."""
    return tomli_w.dumps(config_to_table(config))
