"""The languages that halfstep speaks, and tables of phrases in each of them.

A chapter that speaks to people keeps a ``words.toml`` beside its code: a name, then the phrase in
every language. A phrase may have names in braces, which values take the place of. ``Told`` reads
them in the language that a command speaks; the library itself speaks English.

What also goes into files, JSON or a program is :class:`Said`: a string in English, which a command
tells in its own language.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from typing import Any, Literal, Self, get_args

from halfstep.errors import ConfigError

Language = Literal["en", "zh"]
LANGUAGES: tuple[str, ...] = get_args(Language)
Phrases = Mapping[str, Mapping[str, str]]
"""Name to language to phrase."""
_SPOKEN: ContextVar[str] = ContextVar("language", default="en")


def spoken() -> str:
    """The language of what is being said: English, but within :func:`speaking`."""
    return _SPOKEN.get()


@contextmanager
def speaking(language: str) -> Iterator[None]:
    """Speak a language within the block, as a command does."""
    token = _SPOKEN.set(language)
    try:
        yield
    finally:
        _SPOKEN.reset(token)


class Said(str):
    """A text in English, as files and programs take it, that can be told in each language.

    Args:
        texts: Language to text.

    Example:
        >>> text = Said({"en": "a CPU", "zh": "CPU 上"})
        >>> with speaking("zh"):
        ...     print(text, in_language(text))
        a CPU CPU 上
    """

    texts: Mapping[str, str]

    def __new__(cls, texts: Mapping[str, str]) -> Self:
        """Make a string of the English text."""
        made = super().__new__(cls, texts["en"])
        made.texts = texts
        return made

    def __getnewargs__(self) -> tuple[Any]:
        """What a copy, in this process or another one, is made of."""
        return (dict(self.texts),)


def said(make: Callable[[], str]) -> Said:
    """What a function says, in each language."""
    texts = {}
    for language in LANGUAGES:
        with speaking(language):
            texts[language] = make()
    return Said(texts)


def in_language(value: object) -> str:
    """A text or an error's message in the language spoken; one that was not said so, as it is."""
    if isinstance(value, BaseException) and len(value.args) == 1:
        value = value.args[0]
    return value.texts[spoken()] if isinstance(value, Said) else str(value)


class Told:
    """The phrases of one package, in the language spoken: ``told("resumed", step=100)``."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __call__(self, name: str, /, **values: Any) -> str:
        """A phrase, with values put in."""
        values = {
            key: in_language(value) if isinstance(value, Said | BaseException) else value
            for key, value in values.items()
        }
        return read_phrases(self._package)[name][spoken()].format(**values)

    def said(self, name: str, /, **values: Any) -> Said:
        """A phrase in each language, with values put in."""
        return said(lambda: self(name, **values))


@cache
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
