"""The committed charts show what the results say, in both languages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("peers", "demo", "measured-speed", "measured-quality", "measured-memory",
         "measured-traffic", "measured-optimizer")  # fmt: skip


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)<", svg)


@pytest.mark.parametrize(
    "name", [name if name == "peers" else pytest.param(name, marks=pytest.mark.slow)
             for name in NAMES]
)  # fmt: skip
def test_a_chart_is_that_of_its_results(name, benchmarks):
    import charts

    assert set(charts.CHARTS) == set(NAMES)
    drawn = charts.chart(name, "en")
    english = (ROOT / f"docs/figures/{name}.svg").read_text(encoding="utf-8")
    chinese = (ROOT / f"docs/figures/{name}.zh.svg").read_text(encoding="utf-8")
    assert texts(english) == texts(drawn)
    numbers = [text for text in texts(english) if re.fullmatch(r"[\d,.]+", text)]
    assert numbers
    assert [text for text in texts(chinese) if re.fullmatch(r"[\d,.]+", text)] == numbers
    assert re.search("[\u4e00-\u9fff]", "".join(texts(chinese)))
