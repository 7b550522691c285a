"""Builds frozen dataclasses from TOML tables and command-line strings; errors name the key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from halfstep.errors import ConfigError

_KINDS = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a string",
}
"""A type to what a user may write for it."""


def insert(table: dict[str, Any], key: str, value: Any) -> None:
    """Set ``section.key`` in a nested table.

    Raises:
        ConfigError: If one of the parents is a value, not a section.
    """
    *parents, last = key.split(".")
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"key {key}: {name} is a value, not a section")
    table[last] = value


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
    if hint is str and isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where}: {shown(value)} holds a NUL character")
    try:
        return _scalar(value, hint)
    except (ValueError, OverflowError):
        raise _refused(value, where, _KINDS[hint.__name__]) from None


def _refused(value: Any, where: str, allowed: str) -> ConfigError:
    return ConfigError(f"{where}: {shown(value)}; allowed: {allowed}")


def _scalar(value: Any, hint: Any) -> Any:
    """Convert to a scalar type; raise ValueError or OverflowError where that is impossible."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
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
    raise ValueError


def shown(value: Any) -> str:
    """Represent any value in an error message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-17:]}"


def did_you_mean(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Suggest the known name closest to a misspelt one; empty if none is close."""
    close = difflib.get_close_matches(word[:100], list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
