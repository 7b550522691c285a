"""The text of ``--help``: where it stands, in which language, and how its lines break.

The English is in the docstrings of the dataclasses; ``help.zh.toml`` has the Chinese, by class and
field, so that a field that many commands share is translated once.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any
from unicodedata import category

from halfstep.cli.commands import COMMANDS
from halfstep.cli.words import told
from halfstep.shown import columns, is_wide
from halfstep.words import spoken

DOC = "doc"
"""The key of a class's own docstring among those of its fields."""
# Source: Unicode Standard, table 4-4: opening and initial; closing, final and other punctuation.
_OPENING, _CLOSING = {"Ps", "Pi"}, {"Pe", "Pf", "Po"}


def english(cls: type[Any]) -> Mapping[str, str]:
    """What the source of a dataclass says of it and of the fields that it defines itself."""
    texts = {DOC: inspect.cleandoc(cls.__doc__ or "")}
    for field, text in pairwise(_classes(cls.__module__)[cls.__name__].body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                texts[name] = " ".join(doc.replace("``", "").split())
    return texts


@cache
def chinese() -> Mapping[str, Mapping[str, str]]:
    """Class to field to text, of ``help.zh.toml``."""
    file = resources.files("halfstep.cli").joinpath("help.zh.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def docstrings(cls: type[Any]) -> Mapping[str, str]:
    """Map fields, also inherited ones, and ``DOC`` to their texts in the language spoken."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if is_dataclass(base)]):
        texts |= english(base)
        if spoken() == "zh":
            texts |= chinese().get(base.__name__, {})
    return texts


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Parse a module's source, and return its classes by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def overview(names: Sequence[str]) -> str:
    """Return the text that ``halfstep --help`` prints for these commands."""
    width, indent = terminal_width(), 4 + max(map(len, names))
    rows = []
    for name in names:
        first, *more = wrapped(docstrings(COMMANDS[name])[DOC].split("\n")[0], width - indent)
        rows += [f"  {name:<{indent - 2}}{first}", *(f"{'':<{indent}}{line}" for line in more)]
    parts = [told("usage_of_all"), told("purpose"), "\n".join(rows)]
    return "\n\n".join([*parts, "\n".join(wrapped(told("exit_codes"), width))])


def terminal_width() -> int:
    """Columns that help may take, as argparse counts them."""
    return shutil.get_terminal_size().columns - 2


class Formatter(argparse.HelpFormatter):
    """argparse's help with the paragraphs of docstrings, in the language spoken."""

    def _format_usage(self, *arguments: Any) -> str:
        return super()._format_usage(*arguments).replace("usage: ", told("usage"), 1)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [wrapped(paragraph, width - len(indent)) for paragraph in text.split("\n\n")]
        return "\n\n".join("\n".join(indent + line for line in lines) for lines in paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)


def wrapped(text: str, width: int) -> list[str]:
    """Break text into lines of at most so many columns, between words or wide characters.

    A wide character (as Chinese ones) takes two columns. No line begins with a closing mark or ends
    with an opening one; what is longer than a line stays whole.
    """
    lines = [""]
    for word in text.split():
        for number, unit in enumerate(_units(word)):
            gap = " " if number == 0 and lines[-1] else ""
            if lines[-1] and columns(lines[-1] + gap + unit) > width:
                lines.append(unit)
            else:
                lines[-1] += gap + unit
    return lines


def _units(word: str) -> list[str]:
    """Split a word where a line may break: beside wide characters, but for marks."""
    units = [word[0]]
    for before, character in pairwise(word):
        wide = is_wide(before) or is_wide(character)
        bound = category(character) in _CLOSING or category(before) in _OPENING
        if bound or not wide:
            units[-1] += character
        else:
            units.append(character)
    return units
