"""The command line: the arguments of each command, as a dataclass whose fields are its options.

Every field is an option, described by its type, default and help; a command that starts a run has
the keys of its task's configuration, too. argparse splits the words and prints help; words are
converted to values by the code for TOML files, with the same errors. Nothing here imports torch, so
that --help is quick. docs/decisions/0003-command-line.md says why this is not tyro or jsonargparse.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from importlib import resources
from inspect import getdoc
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from halfstep.errors import ConfigError
from halfstep.option import Count, option
from halfstep.trainer.config.run import BaseConfig, build, did_you_mean
from halfstep.trainer.config.tasks import TASKS, Evaluating, Exporting, Generating, Predicting


@dataclass(frozen=True, kw_only=True)
class Start:
    """The options of every command that starts a run, besides the keys of its configuration."""

    config: str = option(
        "",
        "A TOML file, or a configuration that is shipped: gpt-tiny, gpt-small-cpu, gpt2, "
        "gpt2-medium, gpt2-large, gpt2-xl, classify-scratch, classify-pretrained, lm-lora, "
        "lm-full; default: the task's.",
    )
    resume: Literal["", "newest", "last-good"] = option(
        "",
        "Go on with the run in --output-dir, bit for bit: from its newest checkpoint, or with "
        "last-good from the newest that is not damaged.",
        bare="newest",
    )
    quiet: bool = option(False, "Show no progress on stderr.")
    nproc: Count = option(
        0,
        "Start this many ranks on this machine; options of torchrun may follow after --, such as "
        "-- --max-restarts 3, or -- --nnodes 2 --node-rank 0 --master-addr HOST.",
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """The parsed command line of a command that starts a run."""

    kind: type[BaseConfig]
    """The class of the run's configuration."""
    start: Start
    given: Mapping[str, Any]
    """Configuration keys that the command line sets, with their values as text."""
    words: list[str]
    """The command line itself, without torchrun's options."""
    launcher: list[str]
    """torchrun's options, which follow ``--``."""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Explain what a precision policy means, costs and needs.

    mxfp8,simulate=yes is a policy, too: on a device without products of that format.
    """

    policies: tuple[str, ...] = option(
        (), "Names, field strings or files; default: all.", positional=True
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N.")


@dataclass(frozen=True, kw_only=True)
class OneStep:
    """The options of commands that look at one training step, of which nothing is kept."""

    run: str = field(
        metadata={
            "help": "A run folder; the step after its newest checkpoint is taken.",
            "positional": True,
        }
    )
    device: str = option("", "auto, cpu, cuda or cuda:N; default: the run's.")


@dataclass(frozen=True, kw_only=True)
class Trace(OneStep):
    """Show what one training step really runs: every operation, and in which format.

    The step is the next one of a run; nothing of it is kept. Below the table are the operations
    that ran otherwise than the policy says.
    """

    precision: str = option("", "Policy; default: the run's.")


@dataclass(frozen=True, kw_only=True)
class Memory(OneStep):
    """Measure what one training step holds, by part and format, under several policies.

    The step is the next one of a run; nothing of it is kept.
    """

    precision: tuple[str, ...] = option((), "Policies; default: fp32 and the run's.")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Say where two recorded runs part: the first operation that no rounding explains, and why.

    halfstep.record(model, FOLDER) in a training loop makes a record.
    """

    a: str = field(
        metadata={"help": "A record, or a folder with one in record/.", "positional": True}
    )
    b: str = field(metadata={"help": "The other.", "positional": True})
    floor: tuple[str, ...] = option(
        (), "Records of runs that are as good as A: B may be as far from A as they are."
    )
    json: bool = option(False, "Print one JSON object on stdout.")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say which precision a machine is good for, and why.

    Paste the output of --json into an issue.
    """

    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    json: bool = option(False, "Print one JSON object on stdout.")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one page about one or several runs: what happened to them, and what to do.

    The page is a single file without scripts or network.
    """

    runs: tuple[str, ...] = option((), "Folders of runs.", positional=True)
    out: str = option(
        "",
        "The .html file to write; default: report.html in the run's folder, for several runs in "
        "the current one.",
    )
    lang: Literal["en", "zh"] = option("en", "Language of the page.")


@dataclass(frozen=True, kw_only=True)
class Xray:
    """Say how a checkpoint was trained and saved, by the bits of its numbers.

    Exits with 1 if it holds something that should not be: norms that never moved, fp32 files of
    bf16 numbers, lost masters, rounded steps and statistics, clipped fp8, adapters of zeros.
    """

    folder: str = field(
        metadata={
            "help": "A folder of safetensors, torch.save or torch.distributed.checkpoint; a run's; "
            "or one file.",
            "positional": True,
        }
    )
    base: str = option("", "The checkpoint that it was trained from.")
    json: bool = option(False, "Print one JSON object on stdout.")
    all: bool = option(False, "Show all tensors that differ from the base, not the first 20.")


@dataclass(frozen=True, kw_only=True)
class ContractRecord:
    """Write the dtypes of a training program as a file: operations, states, collectives.

    Any program of PyTorch, unchanged: halfstep contract record -- torchrun train.py --lr 1e-3
    """

    command: tuple[str, ...] = option((), "The program, after --.", positional=True)
    file: str = option("precision.json", "The file.")
    steps: Count = option(2, "Steps of its optimizer to record; 0: all.")
    stop: bool = option(False, "End the program after these steps.")
    nproc: Count = option(0, "Start the program on this many ranks, by torchrun.")


@dataclass(frozen=True, kw_only=True)
class ContractCheck(ContractRecord):
    """Compare the dtypes of a training program with its file; the code is 1 if they differ.

    Any program of PyTorch, unchanged: halfstep contract check -- torchrun train.py --lr 1e-3
    """

    json: bool = option(False, "Print one JSON object on stdout, and the program's on stderr.")


COMMANDS: Mapping[str, type[Any]] = {
    **{kind.COMMAND: kind for kind in TASKS.values() if kind.COMMAND},
    "predict": Predicting,
    "generate": Generating,
    "evaluate": Evaluating,
    "export": Exporting,
    "explain": Explain,
    "trace": Trace,
    "memory": Memory,
    "compare": Compare,
    "doctor": Doctor,
    "report": Report,
    "xray": Xray,
    "contract record": ContractRecord,
    "contract check": ContractCheck,
}
"""Words of a command to its dataclass of arguments."""

MODULES: Mapping[str, str] = {
    **dict.fromkeys(("explain", "doctor", "report", "trace", "memory"), "small"),
    **dict.fromkeys(("predict", "generate", "evaluate", "export"), "trained"),
    "finetune": "train",
}
"""First word of a command to the module of ``halfstep.cli`` that runs it, where that has another
name."""


# --- the grammar ---------------------------------------------------------------------------------

EXIT_CODES = (
    "exit codes: 0 done, 1 failed unexpectedly, or found what xray, compare or contract look for,\n"
    "2 usage or refused, 3 stopped by a numerics guard, 4 interrupted with a checkpoint written,\n"
    "75 storage failed: start it again; with --nproc, that of a rank that failed"
)
_VALUES = {int: "N", float: "X"}


class Option(NamedTuple):
    """A command-line option: a field of a dataclass, or of a section in it."""

    key: str
    hint: Any
    field: Field[Any]


def read_words(arguments: Sequence[str]) -> tuple[str, Any]:
    """Parse a command line: return the command's name, and its dataclass or a request.

    A command that takes a configuration's keys has a ``Request``.

    Raises:
        ConfigError: For words that do not parse, with a suggestion.
        SystemExit: With code 0, after printing help.
    """
    words, launcher = list(arguments), None
    name = command_of(words)
    kind = COMMANDS[name]
    runs = issubclass(kind, BaseConfig)
    if (runs or "command" in kind.__dataclass_fields__) and "--" in words:
        cut = words.index("--")
        words, launcher = words[:cut], words[cut + 1 :]
    parser = parser_of(name)
    given = vars(parser.parse_args(_spelled(words[len(name.split()) :], parser)))
    if not runs:
        given |= {} if launcher is None else {"command": launcher}
        return name, build(kind, given, named=option_name)
    own = {one.name: given.pop(one.name) for one in fields(Start) if one.name in given}
    start = build(Start, own, named=option_name)
    if launcher is not None and not start.nproc:
        raise ConfigError("what stands after -- is for torchrun, and needs --nproc N before it")
    return name, Request(kind=kind, start=start, given=given, words=words, launcher=launcher or [])


def command_of(words: Sequence[str]) -> str:
    """Return the command that words begin with; with --help, or none, print all and exit.

    Raises:
        ConfigError: If there is no such command, with a suggestion.
    """
    first, given = " ".join(words[:1]), " ".join(words[:2])
    if given in COMMANDS or first in COMMANDS:
        return given if given in COMMANDS else first
    if not words or {"-h", "--help"} & {*words[:2]}:
        rows = [f"  {name:<18}{(getdoc(kind) or '').splitlines()[0]}"
                for name, kind in COMMANDS.items()]  # fmt: skip
        print("usage: halfstep COMMAND [--help] [options]; halfstep --version\n", *rows, sep="\n")
        print(f"\n{EXIT_CODES}")
        raise SystemExit(0)
    hint = did_you_mean(given, [*COMMANDS, "--version"])
    raise ConfigError(f"unknown COMMAND {given!r:.80}{hint}; allowed: {', '.join(COMMANDS)}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; see {self.prog} --help")


@cache
def parser_of(name: str) -> argparse.ArgumentParser:
    """Make the parser of one command; its result has only options that are given, as text."""
    kind = COMMANDS[name]
    runs = issubclass(kind, BaseConfig)
    parser = _Parser(
        prog=f"halfstep {name}",
        usage="%(prog)s [options] [-- options of torchrun]" if runs else None,
        description=getdoc(kind),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for each in leaves(Start if runs else kind):
        _add(parser, each, [option_name(each.key)], each.field.default)
    if runs:
        _add_keys(parser, kind)
    return parser


def _add_keys(parser: _Parser, kind: type[BaseConfig]) -> None:
    """Add a configuration's keys, with the defaults of the one that the command starts from."""
    file = resources.files("halfstep").joinpath("configs", f"{kind.shipped({})}.toml")
    shipped = tomllib.loads(file.read_text(encoding="utf-8"))
    shorts = short_options(kind)
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for each in leaves(kind):
        section, _, last = each.key.rpartition(".")
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        short = [f"--{short}" for short, key in shorts.items() if key == each.key]
        names = list(dict.fromkeys([*short, option_name(each.key)]))
        default = (shipped.get(section, {}) if section else shipped).get(last)
        _add(groups[section], each, names, each.field.default if default is None else default)


def _add(parser: Any, each: Option, names: list[str], default: Any) -> None:
    """Add one option, whose help says the default where its text does not."""
    hint = get_args(each.hint)[0] if get_origin(each.hint) is UnionType else each.hint
    several = get_origin(hint) is tuple
    text = each.field.metadata.get("help", "")
    if default not in (MISSING, "", None, ()) and default is not False and "efault" not in text:
        items = default if isinstance(default, tuple | list) else [default]
        text += f" Default: {' '.join(map(str, items))}."
    more: dict[str, Any] = {"help": text.replace("%", "%%")}
    if choices_of(hint):
        more["metavar"] = "|".join(choices_of(hint))
    elif hint is not bool:
        more["metavar"] = _VALUES.get(hint, each.key.rpartition(".")[2].upper())
    if "positional" in each.field.metadata:
        if each.field.default is not MISSING:
            more["nargs"] = "*" if several else "?"
        parser.add_argument(each.key, **more)
        return
    if hint is bool:
        more |= {"nargs": "?", "const": "true", "metavar": "true|false"}
    elif several:
        more["nargs"] = "+"
    elif "bare" in each.field.metadata:  # what the option means without a value
        more |= {"nargs": "?", "const": each.field.metadata["bare"]}
    parser.add_argument(*names, dest=each.key, **more)


def choices_of(hint: Any) -> list[str]:
    """Return the words allowed for a field, or for each item of a tuple; empty if any is."""
    one = get_args(hint)[0] if get_origin(hint) is tuple else hint
    return [word for word in get_args(one) if word] if get_origin(one) is Literal else []


def leaves(cls: type[Any], prefix: str = "") -> Iterator[Option]:
    """Yield the fields of a dataclass and of its sections as options, in order."""
    hints = get_type_hints(cls)
    for one in fields(cls):
        hint, key = hints[one.name], prefix + one.name
        if is_dataclass(hint):
            yield from leaves(hint, f"{key}.")  # type: ignore[arg-type]
        else:
            yield Option(key, hint, one)


def short_options(kind: type[BaseConfig]) -> dict[str, str]:
    """Map short options to keys: each key's last part (first section wins), and ``SHORT``."""
    short = dict(kind.SHORT)
    for each in leaves(kind):
        short.setdefault(option_name(each.key.rpartition(".")[2])[2:], each.key)
    return short


def option_name(key: str) -> str:
    """Spell a key as an option: ``run.max_steps`` as ``--run.max-steps``."""
    return f"--{key.replace('_', '-')}"


def _spelled(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Spell options with hyphens instead of underscores; ConfigError for unknown options."""
    done: list[str] = []
    for i, word in enumerate(words):
        if word == "--":
            return [*done, *words[i:]]
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            name = name.replace("_", "-")
            if name not in parser._option_string_actions:
                hint = did_you_mean(name, parser._option_string_actions)
                raise ConfigError(f"unknown option {name:.80}{hint}; see {parser.prog} --help")
        done.append(name + equals + value)
    return done
