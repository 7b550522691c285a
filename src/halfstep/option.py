"""A field of a dataclass that is an option of a command, with its help and its range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may hold; annotates the field's type, as in ``Count``."""

    allowed: str
    """The range as error messages print it."""
    holds: Callable[[Any], bool]


Count: TypeAlias = Annotated[int, Range("integers >= 0", lambda x: x >= 0)]
AtLeast1: TypeAlias = Annotated[int, Range("integers >= 1", lambda x: x >= 1)]
Amount: TypeAlias = Annotated[float, Range(">= 0", lambda x: 0 <= x < math.inf)]
Positive: TypeAlias = Annotated[float, Range("> 0", lambda x: 0 < x < math.inf)]
Fraction: TypeAlias = Annotated[float, Range("0 to 1", lambda x: 0 <= x <= 1)]
Share: TypeAlias = Annotated[float, Range("0 <= x < 1", lambda x: 0 <= x < 1)]


def option(default: T, help: str, **metadata: object) -> T:
    """Return a field with a default and the text that ``--help`` shows of it.

    Args:
        default: The value where the option is not given.
        help: A sentence or two.
        **metadata: ``positional=True`` for an argument without a name; ``bare="100"`` for what the
            option means without a value.
    """
    return field(default=default, metadata={"help": help, **metadata})
