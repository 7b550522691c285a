"""The phrases of a report, from words.toml, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.words import Phrases, read_phrases

PHRASES: Phrases = read_phrases("halfstep.report")


def phrase(name: str, language: str, values: Mapping[str, Any] | None = None) -> str:
    """A phrase in a language, with values put in; they are not escaped for any format yet."""
    return PHRASES[name][language].format(**(values or {}))
