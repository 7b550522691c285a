"""The run configuration: one tree of frozen dataclasses, from TOML and dotted overrides.

Each leaf lives with the code that reads it; this file only assembles them, converts what a file or
a command line gives, and names the key in every complaint.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from halfstep.data.config import DataConfig
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.models.gpt_config import GPTConfig
from halfstep.precision.nonfinite import OnNonFinite
from halfstep.precision.parse import parse_policy
from halfstep.training.optimizer import OptimizerConfig
from halfstep.training.schedule import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How long, how much at a time, where to, and on what."""

    max_steps: int = 300
    """Optimizer steps, skipped ones included."""
    max_seconds: float = 0.0
    """Stop, evaluate and save after this many seconds; 0: no limit."""
    batch_size: int = 8
    """Sequences in one optimizer step, over all ranks and micro-batches."""
    block_size: int = 0
    """Tokens of one training sequence; 0: the model's block_size."""
    grad_accum: int = 1
    """Micro-batches that one step's batch is split into; divides batch_size."""
    seed: int = 1337
    """Seed of the initial weights, the batches and dropout."""
    eval_every: int = 100
    """Evaluate every this many steps and at the end; 0: at the end only."""
    eval_batches: int = 16
    """Validation batches per evaluation, spread over the file; 0: all of it."""
    on_nonfinite: str = "stop"
    """What to do where no loss scale can help: "stop", "skip:K" (leave out up to K steps in a row)
    or "rollback:N" (go back up to N steps to a copy in memory, once)."""
    lost_update_every: int = 50
    """Measure lost updates every this many applied steps (docs/diagnostics.md); 0: never."""
    save_every: int = 100
    """Save a checkpoint every this many steps and at the end; 0: at the end only."""
    keep: int = 2
    """Checkpoints to keep; older ones are removed after a newer one is safely written."""
    output_dir: str = ""
    """Run folder; empty: runs/NAME-PRECISION-TIME."""
    report_to: Literal["none", "tensorboard"] = "none"
    """Where metrics go besides metrics.jsonl."""
    parallel: str = ""
    """Sizes of the mesh axes that ranks share the work on: "data=2", "shard=2", "tensor=2" or
    "data=2,tensor=2" (docs/distributed.md); empty: data over all ranks."""
    sequence_parallel: bool = False
    """With tensor ranks: split norms and residual streams between them along the sequence."""
    agree_every: int = 100
    """Compare loss scale, counts and replicated weights between ranks every this many steps; 0:
    at the start only."""
    rank_timeout: float = 300.0
    """Seconds after which a rank that does not answer ends the run."""
    background_save: bool = True
    """Write checkpoints beside training; a step then waits for a copy only."""
    device: str = "auto"
    """"auto" (CUDA where there is one, else CPU), "cpu", "cuda" or "cuda:N"."""
    compile: bool = False
    """Run the model through torch.compile."""
    init_from: str = ""
    """A local Hugging Face GPT-2 folder to start from instead of random weights. Its shape takes
    the place of ``model``'s, whose dropout and activation_checkpointing stay."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range or that contradict each other."""
        for name in ("max_steps", "batch_size", "grad_accum", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name}={getattr(self, name)}; allowed: integers >= 1")
        for name in (
            "max_seconds", "block_size", "eval_every", "eval_batches", "save_every",
            "lost_update_every", "agree_every",
        ):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ConfigError(f"run.{name}={getattr(self, name)}; allowed: >= 0")
        if not self.rank_timeout > 0:
            raise ConfigError(f"run.rank_timeout={self.rank_timeout}; allowed: seconds > 0")
        Layout.parse(self.parallel)
        OnNonFinite.parse(self.on_nonfinite)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"run.seed={self.seed}; allowed: 0 to 2^63 - 1")
        if self.batch_size % self.grad_accum:
            raise ConfigError(
                f"run.batch_size={self.batch_size} cannot be split into run.grad_accum="
                f"{self.grad_accum} equal micro-batches"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a training run depends on."""

    name: str = "custom"
    """A name for the run folder."""
    precision: str = "bf16-mixed"
    """A precision policy: a name, a field string or a .toml file."""
    model: GPTConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Raise for contradictions between the parts."""
        # Spelled out, so that a run does not depend on a policy file after it has started.
        object.__setattr__(self, "precision", str(parse_policy(self.precision)))
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
        if self.schedule.warmup_steps > self.run.max_steps:
            raise ConfigError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} is longer than the run of "
                f"run.max_steps={self.run.max_steps}; lower --schedule.warmup_steps"
            )

    @property
    def block_size(self) -> int:
        """Tokens of one training sequence."""
        return self.run.block_size or self.model.block_size


def shipped_configs() -> dict[str, str]:
    """Name to TOML text of the configurations that come with the package."""
    folder = resources.files("halfstep").joinpath("configs")
    files = {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


def load_config(spec: str, overrides: Sequence[tuple[str, Any]] = ()) -> TrainConfig:
    """Read a shipped configuration by name, or a TOML file by path, and apply overrides.

    Args:
        spec: ``"gpt-tiny"`` or ``"path/to/file.toml"``.
        overrides: Pairs of dotted key and value, later ones win; strings are converted to the
            field's type.

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
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read: {error}") from error
    else:
        raise ConfigError(
            f"unknown configuration {spec!r}{_did_you_mean(spec, shipped)}; allowed: "
            f"{', '.join(shipped)}, or a path to a .toml file"
        )
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    table.setdefault("name", Path(spec).stem)
    try:
        for key, value in overrides:
            _insert(table, key, value)
        return config_from_table(table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def config_from_table(table: Mapping[str, Any]) -> TrainConfig:
    """A configuration from a nested mapping, as :func:`config_to_table` gives it."""
    config: TrainConfig = _build(TrainConfig, table, "")
    return config


def config_to_table(config: TrainConfig) -> dict[str, Any]:
    """The configuration as nested plain values."""
    return dataclasses.asdict(config)


def config_to_toml(config: TrainConfig) -> str:
    """The resolved configuration as TOML that :func:`load_config` reads back to an equal value."""
    return tomli_w.dumps(config_to_table(config))


def _insert(table: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"key {key}: {name} is a value, not a section")
    table[last] = value


def _build(cls: type[Any], table: Any, path: str) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"key {path.rstrip('.')}: {table!r} given, a section is expected")
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names:
            raise ConfigError(
                f"unknown key {path}{key}{_did_you_mean(key, names)}; allowed: {', '.join(names)}"
            )
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(hint, value, f"{path}{key}.")  # type: ignore[arg-type]
        else:
            values[key] = _convert(value, hint, f"{path}{key}")
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"key {path}{f.name} is missing")
    return cls(**values)


def _convert(value: Any, hint: Any, path: str) -> Any:
    """Convert a TOML value or a command-line string to a field's type, or complain."""
    origin = get_origin(hint)
    if origin is Literal:
        if value in get_args(hint):
            return value
        allowed = ", ".join(map(str, get_args(hint)))
        raise ConfigError(f"key {path}: {value!r}; allowed: {allowed}")
    if origin in (Union, types.UnionType):
        raise AssertionError(f"{path}: optional fields are spelled with an empty value")
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, Sequence):
            raise ConfigError(f"key {path}: {value!r}; allowed: a list of strings")
        return tuple(_convert(item, get_args(hint)[0], path) for item in items)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if hint is bool and isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if hint is int and (isinstance(value, str) or (number and float(value).is_integer())):
            return int(value)
        if hint is float and (isinstance(value, str) or number):
            converted = float(value)
            if converted != converted or abs(converted) == float("inf"):
                raise ValueError
            return converted
        if hint in (bool, str) and type(value) is hint:
            return value
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"key {path}: {value!r}; allowed: {_ALLOWED.get(hint, hint)}")


_ALLOWED = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}


def _did_you_mean(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
