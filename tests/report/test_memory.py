"""The memory of runs in a report, and the figure of several policies."""

import json
from itertools import pairwise

import pytest

from halfstep.diagnostics.memory.table import PARTS, Memory
from halfstep.errors import ConfigError
from halfstep.report.memory import memory_figure, segments, sentence, write_memory_figure
from halfstep.report.page import make_report
from halfstep.report.record import read_run
from report.conftest import line

BYTES = {
    "weights": {"fp32": 16_000_000},
    "gradients": {"fp32": 16_000_000},
    "moments": {"fp32": 32_000_000},
    "cast copies": {"bf16": 8_000_000},
    "activations": {"bf16": 36_000_000, "fp32": 10_000_000},
    "logits": {"fp32": 40_000_000},
    "batch": {"int64": 4096},
}
MIXED = Memory("bf16-mixed", False, BYTES, rows=8)
WIDE = Memory("fp32", True, {"weights": {"fp32": 10**6}, "activations": {"fp32": 10**6}})


@pytest.fixture
def run(folder):
    def write(name="run", memory=MIXED, **changes):
        path = folder([line(s) for s in range(1, 30)], name)
        table = {**memory.to_json(), **changes}
        (path / "memory.json").write_text(json.dumps(table))
        return read_run(path)

    return write


def test_the_pieces_of_a_bar_are_its_bytes():
    for memory in (MIXED, WIDE):
        found = [*segments(memory)]
        assert sum(piece.size for piece in found) == memory.total
        assert [p for p in PARTS if memory.part(p)] == [*dict.fromkeys(p.part for p in found)]


def test_the_sentence_is_the_library_s_own():
    """The English of the page is :meth:`Memory.why_not_half`, to the letter."""
    low = {"weights": {"bf16": 10}, "activations": {"bf16": 10}}
    for memory in (MIXED, WIDE, Memory("bf16-split", True, low)):
        assert sentence(memory, "en") == memory.why_not_half()
    said = sentence(MIXED, "zh")
    # 64, 40, 10, 8 and 36 of 158 MB
    for share in ("41%", "25%", "6%", "5%", "23%"):
        assert share in said
        assert share in MIXED.why_not_half()
    assert "halved" not in WIDE.why_not_half()


def test_a_page_shows_the_memory(run):
    report = make_report([run()])
    page, text = report.to_html(), report.to_markdown()
    for shown in (page, text):
        assert "Memory of a step" in shown
        assert "158 MB" in shown
        assert "500 MB" in shown  # the measured peak of report/conftest.py
        assert "which a" in shown
    assert "一步占用的内存" in make_report([run("zh")], "zh").to_html()
    (found,) = report.to_json()["runs"]
    assert found["memory"]["bytes"] == BYTES
    assert (found["memory"]["peak_bytes"], found["memory"]["total"]) == (5e8, MIXED.total)
    assert found["memory"]["text"] == MIXED.why_not_half()


def test_runs_beside_each_other(run, folder):
    runs = [run("mixed"), run("wide", WIDE), read_run(folder([line(1)], "older"))]
    page = make_report(runs).to_html()
    assert "<b>mixed:</b>" in page
    assert "<b>wide:</b>" in page
    assert "<b>older:</b>" not in page
    text = make_report(runs).to_markdown()
    assert "\n| mixed " in text
    assert "\n| older " not in text


def test_an_older_run_has_no_such_section(folder):
    report = make_report([read_run(folder([line(1)]))])
    assert "Memory of a step" not in report.to_html()
    assert "memory" not in report.to_json()["runs"][0]


@pytest.mark.parametrize(
    "changes",
    [{"bytes": []}, {"bytes": {"weights": {"fp32": "1"}}}, {"bytes": {"weights": {"fp32": -1}}},
     {"rows": 10**30}, {"ranks": None},
     {"bytes": {"weights": {"fp32": True}}}],
)  # fmt: skip
def test_a_damaged_file_is_told(run, changes):
    record = run(**changes)
    assert record.memory is None
    assert record.damaged == {"memory.json": 1}
    make_report([record]).to_html()


def test_hostile_names_are_text(run):
    name = "<script>alert(1)</script>$\\frac{1}{2}$"
    record = run(bytes={"activations": {"<img src=x>": 46_000_000}}, policy=name)
    report = make_report([record])
    page = report.to_html()
    assert "<script" not in page
    assert "<img" not in page
    assert "<script" not in report.to_markdown()


def test_a_figure_of_policies(tmp_path):
    bars = [("fp32", WIDE, None), ("bf16-mixed", MIXED, 2e8)]
    axes = memory_figure(bars).axes[0]
    wide, mixed = ([b for b in axes.patches if round(b.get_y() + 0.31) == i] for i in (0, 1))
    # bars are stacked without gaps, and as long as the memory
    ends = [(b.get_x(), b.get_x() + b.get_width()) for b in mixed if b.get_width()]
    assert ends[0][0] == 0
    assert ends[-1][1] == pytest.approx(MIXED.total / 1e6, abs=0.1)
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(ends))
    assert max(b.get_x() + b.get_width() for b in wide) == pytest.approx(2.0)
    assert axes.get_xlabel() == "MB"
    for suffix, begin in ((".svg", b"<?xml"), (".PNG", b"\x89PNG")):
        path = tmp_path / f"m{suffix}"
        assert write_memory_figure(bars, path)
        assert path.read_bytes().startswith(begin)
    with pytest.raises(ConfigError, match=r"ends in \.svg or \.png"):
        write_memory_figure(bars, tmp_path / "m.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_memory_figure(bars, tmp_path / "file" / "m.svg")
    large = Memory("fp32", False, {"weights": {"fp32": 20 * 10**9}})
    assert memory_figure([("a", large, None)]).axes[0].get_xlabel() == "GB"


def test_without_matplotlib_the_page_has_the_table(run, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    page = make_report([run()]).to_html()
    assert "158 MB" in page
    assert write_memory_figure([("a", MIXED, None)], tmp_path / "m.svg") is False
