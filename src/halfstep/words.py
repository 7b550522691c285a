"""The languages that halfstep speaks, and tables of phrases in each of them.

A chapter that speaks to people keeps a ``words.toml`` beside its code: a name, then the phrase in
every language. A phrase may have names in braces, which values take the place of. ``Told`` reads
them in the language that a command speaks; the library itself speaks English.

What is said at once is ``told("resumed", step=100)``. What is kept first, as the reason in a
result, is ``told.phrase(...)``: a string in English, as values, errors and JSON are in every
language, and :func:`said` tells it in the language spoken when a command shows it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
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


class Phrase(str):
    """English that :func:`said` tells in other languages too, such as :meth:`Told.phrase` makes.

    Only the phrase itself can be told: an f-string of it is plain English.
    """

    _tell: Callable[[str], str]

    @classmethod
    def by(cls, tell: Callable[[str], str]) -> Self:
        """The phrase that a function tells in the language it is given."""
        made = cls(tell("en"))
        made._tell = tell
        return made

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Self:
        """The phrase that is this text in each language."""
        return cls.by(texts.__getitem__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy it as what it says, without what it is made of."""
        return type(self).of, (texts_of(self),)


def said(text: str, language: str = "") -> str:
    """Text in a language, empty for the one spoken, if it is a phrase; other text as it is."""
    return text._tell(language or spoken()) if isinstance(text, Phrase) else text


def texts_of(text: str) -> dict[str, str]:
    """Text in each language, as another process or time may speak one of them."""
    return {language: said(text, language) for language in LANGUAGES}


def joined(parts: Sequence[str], separator: str) -> Phrase:
    """Phrases and other text with a separator between them, as one phrase."""
    return Phrase.by(partial(_join, tuple(parts), separator))


def _join(parts: Sequence[str], separator: str, language: str) -> str:
    return said(separator, language).join(said(part, language) for part in parts)


def phrase_of(make: Callable[[], str]) -> Phrase:
    """What a function says in the language spoken, as one phrase."""
    return Phrase.by(partial(_speak, make))


def _speak(make: Callable[[], str], language: str) -> str:
    with speaking(language):
        return make()


def message(error: BaseException) -> str:
    """An error's message: the phrase that is the whole of it, to be :func:`said`; else text."""
    only = error.args[0] if len(error.args) == 1 else ""
    return only if isinstance(only, Phrase) else str(error)


class Told:
    """The phrases of one package, in the language spoken: ``told("resumed", step=100)``."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __call__(self, name: str, /, **values: Any) -> str:
        """A phrase in the language spoken, with values put in, which may be phrases."""
        return self._fill(name, values, spoken())

    def phrase(self, name: str, /, **values: Any) -> Phrase:
        """A phrase to be kept: English until it is :func:`said`, and its values with it."""
        return Phrase.by(partial(self._fill, name, values))

    def _fill(self, name: str, values: Mapping[str, Any], language: str) -> str:
        ready = {
            key: said(value, language) if isinstance(value, Phrase) else value
            for key, value in values.items()
        }
        return read_phrases(self._package)[name][language].format(**ready)


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
