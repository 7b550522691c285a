"""Reads the docstrings as they are written: ``Example:``, and the roles of Sphinx."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Spells docstrings as griffe's reader of Google's style expects them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Make a section of examples, and code of a reference, in one object's docstring."""
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
