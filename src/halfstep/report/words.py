"""The phrases of a report, from words.toml, in English and in Chinese."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[str, ...] = get_args(Language)
PHRASES: Mapping[str, Mapping[str, str]] = tomllib.loads(
    resources.files("halfstep.report").joinpath("words.toml").read_text(encoding="utf-8")
)
"""Name to language to phrase; a phrase may have names in braces, which values take the place of."""


def phrase(name: str, language: str, values: Mapping[str, Any] | None = None) -> str:
    """A phrase in a language, with values put in; they are not escaped for any format yet."""
    return PHRASES[name][language].format(**(values or {}))
