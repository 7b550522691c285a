"""The memory of runs in a report."""

import json

import pytest

from halfstep.diagnostics.memory import Memory
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


def test_a_page_shows_the_memory(run):
    report = make_report([run()])
    page = report.to_html()
    assert "Memory of a step" in page
    assert "158 MB" in page
    assert "500 MB" in page  # the measured peak of report/conftest.py
    assert "一步占用的内存" in make_report([run("zh")], "zh").to_html()


def test_runs_beside_each_other(run, folder):
    runs = [run("mixed"), run("wide", WIDE), read_run(folder([line(1)], "older"))]
    page = make_report(runs).to_html()
    table = page[page.index("Memory of a step") :]
    table = table[: table.index("</table>")]
    assert [name in table for name in ("mixed", "wide", "older")] == [True, True, False]


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
