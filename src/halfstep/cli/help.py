"""The text of ``--help`` but for the options' own: the list of commands, and how lines break."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from inspect import cleandoc
from typing import Any

from halfstep.cli.commands import COMMANDS

EXIT_CODES = (
    "exit codes: 0 done, 1 failed unexpectedly, 2 usage or refused, 3 stopped by a "
    "numerics guard, 4 interrupted with a checkpoint written; with --nproc, that of the "
    "rank that failed first"
)


def purpose(command: type[Any]) -> str:
    """Return the docstring of a command's dataclass."""
    return cleandoc(command.__doc__ or "")


def overview(names: Sequence[str]) -> str:
    """Return the text that ``halfstep --help`` prints for these commands."""
    width = shutil.get_terminal_size().columns - 2  # as argparse counts
    indent = 4 + max(map(len, names))
    rows = []
    for name in names:
        first, *more = _wrapped(purpose(COMMANDS[name]).split("\n")[0], width - indent)
        rows += [f"  {name:<{indent - 2}}{first}", *(f"{'':<{indent}}{line}" for line in more)]
    parts = [
        "usage: halfstep COMMAND [--help] [options]; halfstep --version",
        "Train in mixed precision, and account for every number on the way.",
        "\n".join(rows),
        "\n".join(_wrapped(EXIT_CODES, width)),
    ]
    return "\n\n".join(parts)


class Formatter(argparse.HelpFormatter):
    """argparse's help with the paragraphs of docstrings, and without breaks in hyphened words."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [_wrapped(paragraph, width - len(indent)) for paragraph in text.split("\n\n")]
        return "\n\n".join("\n".join(indent + line for line in lines) for lines in paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(text, width)


def _wrapped(text: str, width: int) -> list[str]:
    text = " ".join(text.split())
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
