"""What each command is asked for: a dataclass, whose fields are its options.

The grammar derives option, type, default and help from the fields; of the commands that start a
run it does so from the task's configuration. Nothing here imports torch, so that --help is quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TASKS
from halfstep.trainer.config.use import Evaluating, Exporting, Generating, Predicting

POSITIONAL = {"positional": True}
"""Metadata of a field that is given by its place."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What every command that starts a run takes besides the keys of its configuration."""

    config: str = ""
    """A shipped configuration (halfstep configs ls) or a TOML file; default: the task's."""
    resume: bool = False
    """Go on with the run in --output-dir, bit for bit."""
    quiet: bool = False
    """No progress on stderr."""
    nproc: int | None = None
    """Start so many ranks on this machine; options of torchrun may follow after --, such as
    -- --max-restarts 3, or -- --nnodes 2 --node-rank 0 --master-addr HOST."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run that was asked for."""

    kind: type[BaseConfig]
    """The class of its configuration."""
    start: Start
    given: Mapping[str, Any]
    """Keys of the configuration that the command line sets, and the words that it gives them."""
    words: list[str]
    """The command line itself, without torchrun's options."""
    launcher: list[str]
    """torchrun's options, which stood behind ``--``."""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """What a precision policy means, costs and needs."""

    policies: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    """Names, field strings or files; default: all."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The number formats, and what each makes of a number.

    Without VALUE: range and precision of every format. With VALUE, read as fp64: the number that
    each format rounds it to, once, to the nearest, ties to even; bit by bit, and what is lost.
    """

    value: str | None = field(default=None, metadata=POSITIONAL)
    """Decimal (0.1, -1e-8), hexadecimal (0x1.8p-3), inf or nan."""
    json: bool = False
    """One JSON object on stdout."""


@dataclass(frozen=True, kw_only=True)
class Env:
    """What this machine is and how fast each precision is here."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: bool = False
    """One JSON object on stdout."""


@dataclass(frozen=True, kw_only=True)
class ListConfigs:
    """Names and first lines of the shipped configurations."""


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Print a configuration with every key, default ones included."""

    name: str = field(metadata=POSITIONAL)
    """A shipped configuration or a TOML file."""


@dataclass(frozen=True, kw_only=True)
class CopyConfig:
    """Copy a configuration to a file to edit."""

    name: str = field(metadata=POSITIONAL)
    """A shipped configuration or a TOML file."""
    path: str = field(metadata=POSITIONAL)
    """The file to write, or its folder."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train the same model in several precisions, one after the other, and compare."""

    config: str = "gpt-small-cpu"
    """A shipped configuration or a TOML file."""
    precisions: tuple[str, ...] = ("fp32", "bf16-mixed")
    """Policies to train in."""
    max_steps: int = 100
    """Optimizer steps of each."""
    output_dir: str = ""
    """Folder of the runs; default runs/demo-TIME."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print what makes a shell complete commands and options."""

    shell: Literal["bash", "zsh", "fish", "words"] = field(metadata=POSITIONAL)
    """The shell; words: what may follow the words that come next, for the shells' scripts."""
    words: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    """Words of a command line so far, after --."""


COMMANDS: Mapping[str, type[Any]] = {
    **{kind.COMMAND: kind for kind in TASKS.values() if kind.COMMAND},
    "predict": Predicting,
    "generate": Generating,
    "evaluate": Evaluating,
    "export": Exporting,
    "explain": Explain,
    "formats": Formats,
    "env": Env,
    "configs ls": ListConfigs,
    "configs show": ShowConfig,
    "configs cp": CopyConfig,
    "demo": Demo,
    "completion": Completion,
}
"""A command's words, and what it is asked for; ``cli/NAME.py``, of the first word, runs it."""
