"""halfstep data: sample files that train as they are, and are never written over another file."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from halfstep.errors import DataError
from halfstep.trainer.data.emotions import emotions
from halfstep.trainer.data.instructions.config import InstructionsConfig
from halfstep.trainer.data.labelled.config import LabelledConfig
from halfstep.trainer.data.labelled.labelled import read_labelled
from halfstep.trainer.data.samples import instructions

NAMES = ("其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴")


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_instructions_are_docstrings_of_public_things(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(
        '''def open_all():
    """Open all of the files.

    A second paragraph.
    """

def _hidden():
    """Nobody is told of this one."""

class Box:
    """A box that holds a value,
    and nothing else."""

    def put(self):
        """Put a value into the box."""

    def short(self):
        """Short."""

class _Inner:
    def get(self):
        """Get a value out of the box."""
'''
    )
    (tmp_path / "_own.py").write_text('def f():\n    """This module is nobody else\'s."""\n')
    (tmp_path / "damaged.py").write_text("def (")
    found = instructions(3, tmp_path)
    assert {(each["instruction"], each["output"]) for each in found} == {
        ("What does open_all of the module pack do?", "Open all of the files."),
        ("What is Box of the module pack?", "A box that holds a value, and nothing else."),
        ("What does Box.put of the module pack do?", "Put a value into the box."),
    }
    assert all(each["input"] == "" for each in found)
    with pytest.raises(DataError, match="gives 3 instructions; ask for at most 3"):
        instructions(4, tmp_path)


def test_posts_differ_and_have_the_shares_of_the_grammar():
    names, posts = emotions(1000, seed=3)
    assert names == NAMES
    assert len({post.text for post in posts}) == 1000
    counts = Counter(post.label for post in posts)
    want = {"其他": 300, "喜好": 160, "悲伤": 140, "厌恶": 140, "愤怒": 100, "高兴": 160}
    assert counts == want
    assert " " not in "".join(post.text for post in posts).replace("@小明 ", "")
    assert sum(" " in post.words for post in posts) == 1000
    assert emotions(1000, seed=3)[1] == posts
    assert emotions(1000, seed=4)[1] != posts
    with pytest.raises(DataError, match="ask for at most"):
        emotions(10**6)


def test_the_records_and_the_pairs_hold_the_same_posts(tmp_path, halfstep, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = halfstep("data", "emotions-sample", "--count", 90)
    assert code == 0, err
    assert "emotions.jsonl: 90 synthetic posts of 6 emotions" in out
    code, out, err = halfstep("data", "emotions-sample", "--count", 90, "--format", "pairs")
    assert code == 0, err
    (words,) = [line for line in out.splitlines() if line.startswith("next: ")]
    assert words.endswith("--train emotions.json --labels-file emotions.labels.json --join-words")
    records = LabelledConfig(train=("emotions.jsonl",), labels=NAMES)
    pairs = LabelledConfig(
        train=("emotions.json",), labels_file="emotions.labels.json", join_words=True
    )
    assert read_labelled(records, 0) == read_labelled(pairs, 0)
    text, label = json.loads((tmp_path / "emotions.json").read_text(encoding="utf-8"))[0]
    assert " " in text
    assert type(label) is int


def test_three_commands_from_nothing_to_labels(tmp_path, halfstep, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # it takes half of the time
    assert halfstep("data", "emotions-sample", "--count", 300)[0] == 0
    code, _, err = halfstep(
        "finetune", "classify", "--train", "emotions.jsonl", "--model", "scratch:tiny", "--quiet",
        "--max-steps", 6, "--device", "cpu", "--precision", "fp32", "--output-dir", "r",
    )  # fmt: skip
    assert code == 0, err
    (tmp_path / "post.txt").write_text("这部电影太过分了！\n", encoding="utf-8")
    code, out, err = halfstep("predict", "--run", "r", "--input", "post.txt")
    assert code == 0, err
    assert json.loads(out)["label"] in NAMES


def test_instructions_are_a_format_that_finetune_lm_knows(tmp_path, halfstep):
    path = tmp_path / "a.jsonl"
    code, out, err = halfstep("data", "alpaca-sample", "--out", path, "--count", 30)
    assert code == 0, err
    assert f"next: halfstep finetune lm --train {path} --model FOLDER" in out
    records = lines_of(path)
    assert len(records) == 30
    assert all(list(record) == ["instruction", "input", "output"] for record in records)
    assert len({record["instruction"] for record in records}) == 30
    assert InstructionsConfig(train=(str(path),)).format == "auto"


def test_no_file_is_written_over(tmp_path, halfstep):
    path = tmp_path / "mine.jsonl"
    path.write_text("mine")
    for what in ("alpaca-sample", "emotions-sample"):
        code, out, err = halfstep("data", what, "--out", path)
        assert (code, out) == (2, "")
        assert f"{path} exists already; choose another --out" in err
        assert path.read_text() == "mine"
    (tmp_path / "mine.labels.json").write_text("mine")
    code, _, err = halfstep("data", "emotions-sample", "--format", "pairs",
                            "--out", tmp_path / "mine.json")  # fmt: skip
    assert code == 2
    assert "mine.labels.json exists already" in err
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["emotions-sample", "--count", 0], "--count 0; allowed: integers >= 1"),
        (["emotions-sample", "--out", "x.json"], "--format records is written to .jsonl"),
        (["emotions-sample", "--out", "nowhere/x.jsonl"], "cannot be written"),
        (["alpaca-sample", "--count", 10**9], "ask for at most"),
        (["poems"], "unknown command 'poems'"),
    ],
)
def test_what_cannot_be_made_is_refused(words, says, tmp_path, halfstep, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if words[-1] == 10**9:
        monkeypatch.setattr("halfstep.cli.data.instructions", lambda n: instructions(n, tmp_path))
        (tmp_path / "one.py").write_text('def f():\n    """A function that is alone here."""\n')
    code, out, err = halfstep("data", *words)
    assert (code, out) == (2, "")
    assert says in err
