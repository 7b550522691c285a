"""What a run left, as a page: its record, findings, figures and words; from files alone.

This says a page's sentences in its reader's language, by a catalogue of gettext's.

English stands where it is said. ``locale/zh/LC_MESSAGES/halfstep.po`` has the Chinese, and
``make catalogue`` gathers new sentences into it and compiles it.
"""

from __future__ import annotations

from functools import cache
from gettext import NullTranslations, translation
from pathlib import Path


def gettext(message: str, language: str) -> str:
    """Return a sentence in a language; in English where the catalogue does not have it."""
    return _catalogue(language).gettext(message)


def N_(message: str) -> str:
    """Mark a sentence for the catalogue that :func:`gettext` is given later."""
    return message


@cache
def _catalogue(language: str) -> NullTranslations:
    folder = Path(__file__).parent / "locale"
    return translation("halfstep", folder, languages=[language], fallback=True)
