"""Gathers the sentences of the report page into its catalogue, and compiles it: ``make catalogue``.

A sentence is what stands in ``gettext("...")`` or ``N_("...")`` in the package or its templates.
Translations stay; what is new has an empty one, and what is gone leaves.
"""

from __future__ import annotations

import gettext
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

from halfstep.diagnostics.health import WORDS
from halfstep.diagnostics.nonfinite.cause import OF_OPERATION, REMEDIES

REPORT = Path(__file__).parents[1] / "src/halfstep/report"
PO = REPORT / "locale/zh/LC_MESSAGES/halfstep.po"
MO = PO.with_suffix(".mo")
METHODS = [("**.py", "python"), ("templates/**.j2", "jinja2")]
WITH_FIGURES = (
    " is up to ", ": ", "its operand",
    "clamp or scale down what it reads", "clamp the argument", "reload or shrink the weight",
    "scale the loss down, or clamp what this operation reads",
)  # fmt: skip
QUOTED = (
    *REMEDIES, *REMEDIES.values(), *OF_OPERATION.values(), *WITH_FIGURES, *WORDS.values()
)  # fmt: skip
"""What other packages say and a page translates."""


def gathered() -> Catalog:
    """Return a catalogue of every sentence that a page can say, without translations."""
    catalog = Catalog(locale="zh", project="halfstep", fuzzy=False)
    for _, _, message, _, _ in extract_from_dir(REPORT, METHODS):
        catalog.add(message)
    for message in QUOTED:
        catalog.add(message)
    return catalog


def translated() -> dict[str, str]:
    """Return the catalogue in the repository: English to Chinese."""
    with PO.open("rb") as file:
        return {message.id: message.string for message in read_po(file) if message.id}


def compiled() -> dict[str, str]:
    """Return what the program reads: the compiled catalogue, without its header."""
    with MO.open("rb") as file:
        table = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    return {key: text for key, text in table.items() if key}


def main() -> None:
    """Write both files."""
    catalog, known = gathered(), translated()
    for message in catalog:
        if message.id:
            message.string = known.get(message.id, "")
    with PO.open("wb") as file:
        write_po(file, catalog, width=0, sort_output=True, no_location=True)
    with MO.open("wb") as file:
        write_mo(file, catalog)


if __name__ == "__main__":
    main()
