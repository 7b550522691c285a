"""An experiment as a Jupyter notebook, and the two calls that its cells make.

>>> made = measure("formats", value=0.2)
>>> picture(made)
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from halfstep.errors import ConfigError
from halfstep.lab.course import experiment
from halfstep.lab.experiment import Made, Say, make
from halfstep.lab.figure import drawn
from halfstep.report.figures import standalone_svg

Cell = dict[str, Any]
"""A cell of nbformat 4."""


def measure(name: str, /, **settings: object) -> Made:
    """Make an experiment: its options, its numbers, and the sentence that follows from them.

    Args:
        name: The experiment's name, as in ``halfstep lab NAME``.
        **settings: What to change, such as ``steps=20``.

    Raises:
        ConfigError: If there is no such experiment or option, or a value is not allowed.
    """
    return make(experiment(name), {key: str(value) for key, value in settings.items()})


@dataclass(frozen=True)
class Picture:
    """A figure that a notebook shows: SVG whose letters are drawn in the reader's own fonts."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({len(self.svg)} bytes of SVG)"


def picture(made: Made, language: str = "en") -> Picture:
    """The figure of an experiment that was made.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    figure = drawn(made, language)
    if figure is None:
        raise ConfigError(Say(made.experiment.name, language)("no_figure"))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of glyphs here
        svg = standalone_svg(figure, salt=made.experiment.name)
    return Picture(_numbered(svg[svg.index("<svg") :]))


def _numbered(svg: str) -> str:
    """The picture with its parts numbered, so that the same figure is the same text.

    matplotlib names a clip path by a hash of its corners, whose last bits differ from one layout
    to the next.
    """
    names = dict.fromkeys(re.findall(r'\bid="([a-z][0-9a-f]{10})"', svg))
    plain = svg
    for number, name in enumerate(names):
        plain = plain.replace(name, f"part-{number}.")
    # names of another picture on the same page must be others
    return plain.replace("part-", f"part-{sha256(plain.encode()).hexdigest()[:8]}-")


def notebook(made: Made, language: str) -> dict[str, Any]:
    """The experiment as a notebook of nbformat 4.5, with the figure and verdict of this time.

    **Source:** https://nbformat.readthedocs.io/en/latest/format_description.html
    """
    cells = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(_cells(made, language))]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _cells(made: Made, language: str) -> Iterator[Cell]:
    name, say = made.experiment.name, Say(made.experiment.name, language)
    options, usual = asdict(made.options), asdict(made.experiment.options())
    given = {key: value for key, value in options.items() if value != usual[key]}
    yield _prose(f"# {say('title')}\n\n{say('question')}")
    yield _code(
        "from halfstep.lab.notebook import measure, picture\n\n"
        f"made = {_call(name, given)}\nprint(made.verdict({language!r}))",
        {"output_type": "stream", "name": "stdout", "text": made.verdict(language) + "\n"},
    )
    shown = picture(made, language)
    data = {"image/svg+xml": shown.svg, "text/plain": repr(shown)}
    result = {"output_type": "execute_result", "execution_count": 2, "metadata": {}, "data": data}
    yield _code(f"picture(made, {language!r})", result, number=2)
    yield _prose(say("look"))
    changes = made.experiment.changeable(language)
    listed = "\n".join(f"- `{option}={default!r}`: {shows}" for option, default, shows in changes)
    yield _prose(f"## {say('changes')}\n\n{say('edit')}\n\n{listed}")
    yield _code(
        f"changed = {_call(name, options)}\nprint(changed.verdict({language!r}))\n"
        f"picture(changed, {language!r})"
    )
    yield _prose(f"## {say('how')}")
    source = inspect.getsource(made.experiment.measure)
    yield _code(
        "from inspect import getsource\n\nprint(getsource(made.experiment.measure))",
        {"output_type": "stream", "name": "stdout", "text": source + "\n"},
        number=3,
    )


def _call(name: str, settings: dict[str, Any]) -> str:
    words = [repr(name), *(f"{key}={value!r}" for key, value in settings.items())]
    return f"measure({', '.join(words)})"


def _prose(text: str) -> Cell:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def _code(source: str, output: Cell | None = None, number: int = 1) -> Cell:
    """A cell of code, with what came of it; None: it is for the reader to run."""
    count, outputs = (None, []) if output is None else (number, [output])
    return {
        "cell_type": "code",
        "metadata": {},
        "source": source,
        "execution_count": count,
        "outputs": outputs,
    }
