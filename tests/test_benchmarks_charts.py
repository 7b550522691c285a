"""The committed charts show what the results say, in both languages."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("peers", "demo", "measured-speed", "measured-quality", "measured-memory",
         "measured-traffic", "measured-optimizer", "recipes")  # fmt: skip


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)<", svg)


@pytest.mark.parametrize(
    "name", [name if name == "peers" else pytest.param(name, marks=pytest.mark.slow)
             for name in NAMES]
)  # fmt: skip
def test_a_chart_is_that_of_its_results(name, benchmarks):
    import charts
    import recipes_figures

    assert {*charts.CHARTS, "recipes"} == set(NAMES)
    contents = [json.loads(path.read_text()) for path in recipes_figures.STUDIES]
    drawn = {name: lambda: charts.chart(name, "en")}
    if name == "recipes":
        found = recipes_figures.FIGURES
        drawn = {n: lambda n=n: recipes_figures.drawn(n, contents, "en") for n in found}
    for figure, draw in drawn.items():
        english = (ROOT / f"docs/figures/{figure}.svg").read_text(encoding="utf-8")
        chinese = (ROOT / f"docs/figures/{figure}.zh.svg").read_text(encoding="utf-8")
        assert texts(english) == texts(draw())
        numbers = [text for text in texts(english) if re.fullmatch(r"[−\d,.%]+", text)]
        assert numbers
        assert [text for text in texts(chinese) if re.fullmatch(r"[−\d,.%]+", text)] == numbers
        assert re.search("[\u4e00-\u9fff]", "".join(texts(chinese)))
