"""Fields of dataclasses that are options: their help and range, and how text becomes their values.

Imports no torch, so that ``--help`` is quick.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from halfstep.errors import ConfigError

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


# From TOML tables and command lines to such dataclasses.


_KINDS = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a string",
}
"""A type to what a user may write for it."""


def build(
    cls: type[Any],
    table: Any,
    path: str = "",
    named: Callable[[str], str] = "key {}".format,
    unknown: dict[str, Any] | None = None,
) -> Any:
    """Build a dataclass, and the dataclasses in its fields, from a nested mapping.

    Args:
        cls: A dataclass.
        table: Field name to value or section; strings are converted to the field's type.
        path: Prefix of the table's keys in error messages: ``""``, or ``"section."``.
        named: Formats a dotted key for error messages.
        unknown: Takes the keys that no field has; if None, such a key is refused.

    Raises:
        ConfigError: For an unknown or missing key, or a value of another type.
    """
    if not isinstance(table, Mapping):
        where = named(path.rstrip("."))
        raise ConfigError(f"{where}: {shown(table)} given, a section is expected")
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names and unknown is not None:
            unknown[path + key] = value
            continue
        if key not in names:
            hint, allowed = did_you_mean(key, names), ", ".join(names)
            raise ConfigError(f"unknown key {path}{key:.80}{hint}; allowed: {allowed}")
        if is_dataclass(hints[key]):
            values[key] = build(hints[key], value, f"{path}{key}.", named, unknown)
        else:
            values[key] = found = _convert(value, hints[key], named(path + key))
            ranges = getattr(hints[key], "__metadata__", ())
            if ranges and not ranges[0].holds(found):
                raise ConfigError(f"{path}{key}={found}; allowed: {ranges[0].allowed}")
    for f in fields(cls):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values:
            raise ConfigError(f"{named(path + f.name)} is missing")
    return cls(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Annotated):  # X | None, or X in a range
        return _convert(value, parts[0], where)
    if origin is Literal:
        if value in parts:
            return value
        allowed = ", ".join(str(choice) or "''" for choice in parts)
        raise _refused(value, where, allowed)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, Sequence):
            raise _refused(value, where, "a list of strings")
        return tuple(_convert(item, parts[0], where) for item in items)
    try:
        return _scalar(value, hint)
    except (ValueError, TypeError, OverflowError):
        raise _refused(value, where, _KINDS[hint.__name__]) from None


def _refused(value: Any, where: str, allowed: str) -> ConfigError:
    return ConfigError(f"{where}: {shown(value)}; allowed: {allowed}")


def _scalar(value: Any, hint: Any) -> Any:
    if hint is bool and isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower())
    if hint in (int, float) and not isinstance(value, bool):
        number = hint(value)
        if math.isfinite(number) and (isinstance(value, str) or number == value):
            return number
    elif type(value) is hint:
        return value
    raise ValueError


def shown(value: Any) -> str:
    """Represent any value in an error message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-17:]}"


def did_you_mean(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Suggest the known name closest to a misspelt one; empty if none is close."""
    close = difflib.get_close_matches(word[:100], list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
