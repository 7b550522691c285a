"""A task's own file, unedited: pairs of a text and the id of a class."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from tests.trainer.classifiers import checkpoint_of, metrics

NAMES = ["其他", "高兴", "愤怒"]
WORDS = {0: ["今天", "我们", "看"], 1: ["高兴", "好", "喜欢"], 2: ["气", "恨", "骂"]}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # they take half of the time


@pytest.fixture
def own(tmp_path):
    """A folder with train.json, which holds 60 pairs."""
    pairs = []
    for number in range(60):
        words = WORDS[number % 3]
        pairs.append([f"{words[number % 2]} 的 {words[number // 3 % 3]} ！", number % 3])
    (tmp_path / "train.json").write_text(json.dumps(pairs, ensure_ascii=False))
    return tmp_path


def words_of(own, run, *more):
    return ["--train", own / "train.json", "--labels", *NAMES, "--model", "scratch:tiny",
            "--device", "cpu", "--precision", "fp32", "--batch-size", 20, "--eval-every", 3,
            "--save-every", 1, "--keep", 9, "--quiet", "--output-dir", run, *more]  # fmt: skip


def test_it_trains_resumes_evaluates_and_predicts_with_names(own, tmp_path, halfstep):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first = ["--max-steps", 6, "--schedule.warmup_steps", 1]
    for run in (whole, cut):
        more = [*first, "--max-seconds", 1e-9] if run == cut else first
        code, _, err = halfstep("finetune", "classify", *words_of(own, run, *more))
        assert code == 0, err
    assert len(metrics(cut)) < 6
    code, _, err = halfstep(
        "finetune", "classify", *words_of(own, cut, *first, "--max-seconds", 0), "--resume"
    )
    assert code == 0, err
    assert metrics(cut)[-1]["step"] == 6
    for name, tensor in checkpoint_of(whole).weights.items():
        assert torch.equal(tensor, checkpoint_of(cut).weights[name])

    report = json.loads((whole / "report.json").read_text())
    assert [each["label"] for each in report["classes"]] == NAMES
    assert all(name in (whole / "report.txt").read_text() for name in NAMES)
    code, out, err = halfstep("evaluate", "--run", whole, "--data", own / "train.json", "--json")
    assert code == 0, err
    assert json.loads(out)["examples"] == 60

    code, out, err = halfstep("predict", "--run", whole, "--input", own / "train.json")
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["text"] for each in found[:2]] == ["今天 的 今天 ！", "好 的 高兴 ！"]
    assert {each["label"] for each in found} <= set(NAMES)


def test_an_id_outside_the_table_is_one_line(own, tmp_path, halfstep):
    words = words_of(own, tmp_path / "r", "--labels", *NAMES[:2])
    code, out, err = halfstep("finetune", "classify", *words)
    assert (code, out) == (2, "")
    assert "train.json: item 3: unknown label '2' (allowed: " in err
