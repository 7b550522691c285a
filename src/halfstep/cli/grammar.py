"""Derives the command line's grammar from dataclasses: ``commands.py`` and the configurations.

Every field is an option, described by its type, default and help. argparse splits the words and
prints help; words are converted to values by the code for TOML files, with the same errors.
docs/decisions/0003-command-line.md says why this is not tyro or jsonargparse.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from importlib import resources
from inspect import getdoc
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from halfstep.cli.commands import COMMANDS, Request, Start
from halfstep.errors import ConfigError
from halfstep.trainer.config.read import build, did_you_mean
from halfstep.trainer.config.run import BaseConfig

EXIT_CODES = (
    "exit codes: 0 done, 1 failed unexpectedly, 2 usage or refused, 3 stopped by a numerics\n"
    "guard, 4 interrupted with a checkpoint written; with --nproc, that of a rank that failed"
)
_VALUES = {int: "N", float: "X"}


class Option(NamedTuple):
    """A command-line option: a field of a dataclass, or of a section in it."""

    key: str
    hint: Any
    field: Field[Any]
    text: str


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
    if runs and "--" in words:
        cut = words.index("--")
        words, launcher = words[:cut], words[cut + 1 :]
    parser = parser_of(name)
    given = vars(parser.parse_args(_spelled(words[len(name.split()) :], parser)))
    if not runs:
        return name, build(kind, given, named=option_name)
    own = {field.name: given.pop(field.name) for field in fields(Start) if field.name in given}
    start = build(Start, own, named=option_name)
    if launcher is not None and not start.nproc:
        raise ConfigError("what stands after -- is for torchrun, and needs --nproc N before it")
    return name, Request(kind=kind, start=start, given=given, words=words, launcher=launcher or [])


def command_of(words: Sequence[str]) -> str:
    """Return the command that words begin with; with --help instead, print the commands and exit.

    Raises:
        ConfigError: If there is no such command, with a suggestion.
    """
    first, given = " ".join(words[:1]), " ".join(words[:2])
    if given in COMMANDS or first in COMMANDS:
        return given if given in COMMANDS else first
    if {"-h", "--help"} & {*words[:2]}:
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
    # Not only -1, but also -1e-8, -.5, -0x1p3 and -inf are values, not options.
    parser._negative_number_matcher = re.compile(r"-\.?\d|-inf|-nan", re.IGNORECASE)
    for option in leaves(Start if runs else kind):
        _add(parser, option, [option_name(option.key)], option.field.default)
    if runs:
        _add_keys(parser, kind)
    return parser


def _add_keys(parser: _Parser, kind: type[BaseConfig]) -> None:
    """Add a configuration's keys, with the defaults of the one that the command starts from."""
    file = resources.files("halfstep").joinpath("configs", f"{kind.shipped({})}.toml")
    shipped = tomllib.loads(file.read_text(encoding="utf-8"))
    shorts = short_options(kind)
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for option in leaves(kind):
        section, _, last = option.key.rpartition(".")
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        short = [f"--{short}" for short, key in shorts.items() if key == option.key]
        names = list(dict.fromkeys([*short, option_name(option.key)]))
        default = (shipped.get(section, {}) if section else shipped).get(last)
        _add(groups[section], option, names, option.field.default if default is None else default)


def _add(parser: Any, option: Option, names: list[str], default: Any) -> None:
    """Add one option, whose help says the default where its text does not."""
    hint = get_args(option.hint)[0] if get_origin(option.hint) is UnionType else option.hint
    several = get_origin(hint) is tuple
    text = option.text
    if default not in (MISSING, "", None, ()) and default is not False and "efault" not in text:
        items = default if isinstance(default, tuple | list) else [default]
        text += f" Default: {' '.join(map(str, items))}."
    more: dict[str, Any] = {"help": text.replace("%", "%%")}
    if choices_of(hint):
        more["metavar"] = "|".join(choices_of(hint))
    elif hint is not bool:
        more["metavar"] = _VALUES.get(hint, option.key.rpartition(".")[2].upper())
    if "positional" in option.field.metadata:
        if option.field.default is not MISSING:
            more["nargs"] = "*" if several else "?"
        parser.add_argument(option.key, **more)
        return
    if hint is bool:
        more |= {"nargs": "?", "const": "true", "metavar": "true|false"}
    elif several:
        more["nargs"] = "+"
    elif "bare" in option.field.metadata:  # what the option means without a value
        more |= {"nargs": "?", "const": option.field.metadata["bare"]}
    parser.add_argument(*names, dest=option.key, **more)


def choices_of(hint: Any) -> list[str]:
    """Return the words allowed for a field, or for each item of a tuple; empty if any is."""
    one = get_args(hint)[0] if get_origin(hint) is tuple else hint
    return [word for word in get_args(one) if word] if get_origin(one) is Literal else []


def leaves(cls: type[Any], prefix: str = "") -> Iterator[Option]:
    """Yield the fields of a dataclass and of its sections as options, in order."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint, key = hints[field.name], prefix + field.name
        if is_dataclass(hint):
            yield from leaves(hint, f"{key}.")  # type: ignore[arg-type]
        else:
            yield Option(key, hint, field, field.metadata.get("help", ""))


def short_options(kind: type[BaseConfig]) -> dict[str, str]:
    """Map short options to keys: each key's last part (first section wins), and ``SHORT``."""
    short = dict(kind.SHORT)
    for option in leaves(kind):
        short.setdefault(option_name(option.key.rpartition(".")[2])[2:], option.key)
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
