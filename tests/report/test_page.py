"""The page itself: what it holds, in both languages, and that nothing of a run can break it."""

import html.parser
import json
import re

import pytest

from halfstep.cli.main import main
from halfstep.report.page import make_report
from halfstep.report.record import read_run
from report.conftest import line

HOSTILE = [
    "<script>document.title='owned'</script>",
    "\"><img src=x onerror=document.title='owned'>",
    "</title></style><h1>new</h1>",
    "{{ 7*7 }}{% raw %}",
    "$\\frac{1}{2}$ _hidden",
    "| a | b |\n# heading\n[link](javascript:alert(1))",
    "\u202eright to left\x00\x07",
    "名字" * 200,
    "]]><svg onload=alert(1)>",
    "&lt;b&gt;",
]


class Outline(html.parser.HTMLParser):
    """The elements of a page, in order, without their text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def run_named(folder, text, number):
    lines = [
        line(s, lost_updates={text: 0.5}, skip_reason=text, **{f"x{text}": 1}) for s in range(1, 30)
    ]
    path = folder(lines, f"run{number}")
    (path / "config.toml").write_text(
        f"precision = {json.dumps(text)}\nname = {json.dumps(text)}\n[run]\nmax_steps = 29\n"
        f"[model]\npath = {json.dumps(text)}\n",
        encoding="utf-8",
    )
    skipped = {"applied": False, "skip_reason": text, "first_cause": text}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(40, **skipped)) + "\n")
    causes = [{"module": text, "sample": {"text": text}}, {"cause_class": text, "text": text}]
    (path / "causes.jsonl").write_text("".join(json.dumps(c) + "\n" for c in causes))
    return read_run(path)


def test_names_leave_the_structure_of_the_page_unchanged(folder):
    plain = make_report([run_named(folder, "plain", 0)]).to_html()
    expected = Outline(plain)
    assert "Skipped steps" in plain
    for number, text in enumerate(HOSTILE, 1):
        page = make_report([run_named(folder, text, number)]).to_html()
        found = Outline(page)
        outside = [tag for tag in found.tags if tag not in ("g", "path", "use", "defs", "text")]
        assert outside == [
            tag for tag in expected.tags if tag not in ("g", "path", "use", "defs", "text")
        ], text
        assert not [name for name in found.attributes if name.startswith("on")], text
        assert "script" not in found.tags


def test_a_page_needs_nothing_else(folder):
    page = make_report([read_run(folder([line(s) for s in range(1, 60)]))]).to_html()
    assert "default-src 'none'" in page
    outside = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(target.startswith("#") for target in outside)
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", page)
    assert "<svg" in page
    assert "var(--ink)" in page  # figures follow the page's colours
    assert not re.search("#010203|#fdfcfb", page)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_both_languages(folder, language):
    run = read_run(folder([line(s, lost_updates={"a": 0.9}) for s in range(1, 30)]))
    page = make_report([run], language).to_html()
    assert ('lang="zh-CN"' in page) is (language == "zh")
    assert ("丢失的更新" in page) is (language == "zh")
    assert ("Lost updates" in page) is (language == "en")


def test_a_broken_run_has_a_page(folder):
    path = folder([])
    (path / "metrics.jsonl").unlink()
    page = make_report([read_run(path)]).to_html()
    assert "the run took no step" in page
    path = folder(
        [line(s, loss="nan", grad_norm="inf", applied=False) for s in range(1, 30)], "nan"
    )
    make_report([read_run(path)]).to_html()


def test_without_matplotlib_the_page_says_so(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    run = read_run(folder([line(1), line(2)]))
    assert "halfstep[plot]" in make_report([run]).to_html()


def test_a_page_is_written_whole(folder, tmp_path):
    report = make_report([read_run(folder([line(s) for s in range(1, 30)]))])
    path = report.write(tmp_path / "new" / "r.html")
    assert "healthy" in path.read_text(encoding="utf-8")
    assert not [p for p in path.parent.iterdir() if p != path]


def test_several_runs_are_a_table_and_a_page(folder, tmp_path, capsys):
    runs = [folder([line(s, val_loss=s) for s in range(1, n)], f"r{n}") for n in (9, 30)]
    page = tmp_path / "r.html"
    assert main(["report", *map(str, runs), "--lang", "zh", "--out", str(page)]) == 0
    out = capsys.readouterr().out
    assert "r30: 数值正常" in out
    assert re.search(r"^r9 +bf16-mixed +8 / 8 +0 ", out, re.M)
    assert 'lang="zh-CN"' in page.read_text()
    assert main(["report", str(runs[0])]) == 0
    assert capsys.readouterr().out.endswith(f"Written: {runs[0] / 'report.html'}\n")
    report = make_report([read_run(run) for run in runs])
    assert report.differs == {"run.max_steps": ["8", "29"]}
    assert "What differs" in report.to_html()
    assert main(["report"]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
