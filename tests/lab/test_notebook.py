"""An experiment as a notebook: its cells run as they stand, and say what the command says."""

from __future__ import annotations

import ast
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from halfstep.errors import ConfigError
from halfstep.lab.course import EXPERIMENTS
from halfstep.lab.experiment import PHRASES, Made, make
from halfstep.lab.experiments.costs import speed
from halfstep.lab.experiments.numbers import loss_scale
from halfstep.lab.notebook import _numbered, measure, notebook, picture

MEASURED = Path(__file__).parents[2] / "docs" / "figures" / "lab"
SHORT = {
    "formats": {"value": 0.3},
    "small-updates": {"steps": 5, "seeds": 2},
    "underflow": {"small": 1, "large": 2, "steps": 1},
    "loss-scale": {"micro_batches": 2, "seeds": 1},
    "overflow": {"powers": 2, "steps": 1, "layers": 1},
    "lost-updates": {"steps": 2, "seeds": 1},
    "accumulation": {"length": 8, "micro_batches": 2},
    "memory": {"sequences": 1, "width": 32, "vocabulary": 100},
    "communication": {"width": 32},
    "speed": {"width": 32, "rounds": 1},
    "parity": {"steps": 2, "seeds": 1},
    "low-bit": {"draws": 1, "trained": 2},
}


def run_cells(book) -> list[tuple[str, object]]:
    """What each cell of code prints, and the value of its last line, as a kernel shows it."""
    names: dict[str, object] = {"__name__": "__main__"}
    shown = []
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse(cell["source"])
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, "<cell>", "exec"), names)
            value = last and eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        shown.append((printed.getvalue(), value))
    return shown


def measured(name: str, **settings: object) -> Made:
    """With the numbers that the site shows, so that a notebook is there without measuring."""
    options = EXPERIMENTS[name].options_of({key: str(value) for key, value in settings.items()})
    found = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
    return Made(EXPERIMENTS[name], options, found["data"])


def require_run(book, name: str, language: str) -> None:
    (told, _), (_, figure), (changed, other), (source, _) = run_cells(book)
    for sentence, svg in ((told, figure._repr_svg_()), (changed, other._repr_svg_())):
        assert sentence.rstrip().endswith(".。"[["en", "zh"].index(language)])
        assert svg.startswith("<svg")
        assert PHRASES[f"{name}.title"][language] in svg
    assert source.startswith("def measure(options: Options) -> Data:")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_cells_run(name, monkeypatch):
    monkeypatch.setattr(loss_scale, "STEPS", 3)
    monkeypatch.setattr(speed, "WIDTHS", (32, 64))
    monkeypatch.setattr(speed, "SEQUENCES", (1, 2))
    language = ("en", "zh")[[*EXPERIMENTS].index(name) % 2]
    book = notebook(measured(name, **SHORT[name]), language)
    for key, value in SHORT[name].items():
        assert book["cells"][1]["source"].count(f"{key}={value!r}") == 1
    require_run(book, name, language)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_cells_run_as_they_are(name):
    require_run(notebook(measured(name), "en"), name, "en")


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_notebook_asks_shows_and_names_what_to_change(name, language):
    made = measured(name)
    book = notebook(made, language)
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    prose = [cell["source"] for cell in book["cells"] if cell["cell_type"] == "markdown"]
    assert prose[0].endswith(PHRASES[f"{name}.question"][language])
    assert f"measure({name!r})" in code[0]["source"]
    assert code[0]["outputs"][0]["text"] == made.verdict(language) + "\n"
    assert code[1]["outputs"][0]["data"]["image/svg+xml"] == picture(made, language).svg
    assert code[2]["outputs"] == []
    for option, default, shows in made.experiment.changeable(language):
        assert f"{option}={default!r}" in code[2]["source"]
        assert f"- `{option}={default!r}`: {shows}" in prose[2]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_notebook_is_what_jupyter_reads(name):
    nbformat = pytest.importorskip("nbformat")
    book = json.loads(json.dumps(notebook(measured(name), "zh"), allow_nan=False))
    nbformat.validate(nbformat.from_dict(book))


def test_measure_is_what_the_command_makes_and_refuses_what_there_is_not():
    assert (
        measure("formats", value=70000).data
        == make(EXPERIMENTS["formats"], {"value": "70000"}).data
    )
    with pytest.raises(ConfigError, match="did you mean 'formats'"):
        measure("format")
    with pytest.raises(ConfigError, match="value"):
        measure("formats", valu=1)


def test_the_same_figure_is_the_same_text_whatever_its_parts_are_called():
    def named(one, other):
        return f'<svg><clipPath id="{one}"/><g id="{other}" clip-path="url(#{one})"/></svg>'

    once = _numbered(named("pd5f4127c67", "m0123456789"))
    assert once == _numbered(named("pcdbfde0874", "mabcdefabcd"))
    (clip, mark) = re.findall(r' id="(\S+?)"', once)
    assert once == named(clip, mark)
    assert clip != mark
    larger = _numbered('<svg width="1"><clipPath id="pd5f4127c67"/></svg>')
    assert clip not in larger  # two pictures on one page do not share names
