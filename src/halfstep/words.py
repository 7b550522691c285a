"""The languages that halfstep speaks, and tables of phrases in each of them.

A chapter that speaks to people keeps a ``words.toml`` beside its code: a name, then the phrase in
every language. A phrase may have names in braces, which values take the place of.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Literal, get_args

from halfstep.errors import ConfigError

Language = Literal["en", "zh"]
LANGUAGES: tuple[str, ...] = get_args(Language)
Phrases = Mapping[str, Mapping[str, str]]
"""Name to language to phrase."""


def read_phrases(package: str) -> Phrases:
    """The table of a package's ``words.toml``."""
    text = resources.files(package).joinpath("words.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def chosen_language(asked: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """The language asked for; else the locale's, where halfstep speaks it; else English.

    Raises:
        ConfigError: If halfstep does not speak the language asked for.

    Source:
        The order of variables is that of POSIX.1-2017, section 8.2, and of gettext's ``LANGUAGE``.
    """
    if asked:
        if asked not in LANGUAGES:
            raise ConfigError(f"--lang {asked}; allowed: {', '.join(LANGUAGES)}")
        return asked
    locale = next(
        (environ[key] for key in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(key)), ""
    )
    if locale in ("C", "POSIX") or locale.startswith("C."):
        return "en"
    wanted = (environ.get("LANGUAGE") or locale).split(":")[0]
    short = wanted.replace("-", "_").partition("_")[0].partition(".")[0].lower()
    return short if short in LANGUAGES else "en"
