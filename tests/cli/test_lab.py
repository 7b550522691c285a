"""``halfstep lab``: what it lists, writes and says."""

from __future__ import annotations

import json

from halfstep.lab.course import EXPERIMENTS


def test_it_lists_every_experiment_with_its_question(halfstep):
    done = halfstep("lab", "--lang", "en")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*EXPERIMENTS]
    assert all(line.rstrip().endswith("?") for line in lines)
    assert "？" in halfstep("lab", "--lang", "zh").stdout


def test_it_writes_numbers_and_a_figure_in_each_language(halfstep, tmp_path):
    done = halfstep("lab", "formats", "value=70000", "--out", tmp_path, "--lang", "zh")
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "formats.json", "formats.svg", "formats.zh.svg"
    ]  # fmt: skip
    made = json.loads((tmp_path / "formats.json").read_text(encoding="utf-8"))
    assert made["experiment"] == "formats"
    assert made["machine"]["cores"] >= 1
    assert made["options"] == {"value": 70000.0, "at": 1.0}
    assert made["data"]["formats"]["fp16"]["nearest"] == "inf"
    assert str(tmp_path / "formats.zh.svg") in done.stdout
    assert "指数位" in (tmp_path / "formats.zh.svg").read_text(encoding="utf-8")
    assert "指数位" not in (tmp_path / "formats.svg").read_text(encoding="utf-8")


def test_it_writes_a_notebook_in_the_language_spoken(halfstep, tmp_path):
    done = halfstep("lab", "formats", "at=2", "--notebook", "--out", tmp_path, "--lang", "zh")
    assert done.returncode == 0
    assert str(tmp_path / "formats.ipynb") in done.stdout
    book = json.loads((tmp_path / "formats.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    assert book["cells"][0]["source"].startswith("# 指数位")
    assert "measure('formats', at=2.0)" in book["cells"][1]["source"]
    assert book["cells"][1]["outputs"][0]["text"].strip() in done.stdout


def test_what_there_is_not_is_refused(halfstep):
    done = halfstep("lab", "underfow")
    assert done.returncode == 2
    assert "did you mean 'underflow'" in done.stderr
    assert "takes no settings" in halfstep("lab", "all", "steps=3").stderr
