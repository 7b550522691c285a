"""A field of a dataclass that is an option of a command, with its help."""

from __future__ import annotations

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def option(default: T, help: str, **metadata: object) -> T:
    """Return a field with a default and the text that ``--help`` shows of it.

    Args:
        default: The value where the option is not given.
        help: A sentence or two.
        **metadata: ``positional=True`` for an argument without a name; ``bare="100"`` for what the
            option means without a value.
    """
    return field(default=default, metadata={"help": help, **metadata})
