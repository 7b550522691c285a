"""Scores against scikit-learn's, tables that line up, and pictures of any labels."""

import json
import unicodedata

import numpy as np
import pytest

from halfstep.trainer.tasks.scores import (
    accuracy,
    class_scores,
    macro_f1,
    report_table,
    report_values,
    write_report,
)

NAMES = ("joy", "sad", "怒")
MATRIX = ((5, 1, 0), (2, 3, 1), (0, 0, 4))


def random_matrix(seed):
    """2 to 7 classes; some have no example, some are never found."""
    drawn = np.random.default_rng(seed)
    size = int(drawn.integers(2, 8))
    matrix = drawn.integers(0, 30, (size, size)) * (drawn.random((size, size)) < 0.6)
    if seed % 3 == 0:
        matrix[int(drawn.integers(size))] = 0
    if seed % 4 == 0:
        matrix[:, int(drawn.integers(size))] = 0
    matrix[0, 0] += not matrix.any()
    return matrix


def true_and_found(matrix):
    """The labels of examples that make up the matrix."""
    pairs = [(i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) for _ in range(n)]
    return tuple(zip(*pairs, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_scores_are_scikit_learns(seed):
    oracle = pytest.importorskip("sklearn.metrics")
    matrix = random_matrix(seed)
    true, found = true_and_found(matrix)
    classes = list(range(len(matrix)))
    options = {"labels": classes, "zero_division": 0}
    expected = oracle.precision_recall_fscore_support(true, found, **options)
    scores = class_scores(matrix.tolist(), [f"c{i}" for i in classes])
    assert [s.label for s in scores] == [f"c{i}" for i in classes]
    # both are fp64 quotients of the same integers: at most some roundings apart
    for key, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [getattr(s, key) for s in scores] == pytest.approx(list(values), rel=1e-14), key
    assert accuracy(matrix.tolist()) == pytest.approx(oracle.accuracy_score(true, found), rel=1e-14)
    mean = oracle.f1_score(true, found, average="macro", **options)
    assert macro_f1(matrix.tolist()) == pytest.approx(mean, rel=1e-14)

    lines = report_table(matrix.tolist(), [f"c{i}" for i in classes]).splitlines()
    for kind in ("macro", "weighted"):
        *means, _ = oracle.precision_recall_fscore_support(true, found, average=kind, **options)
        (line,) = [line for line in lines if line.startswith(f"{kind} mean")]
        assert line.split()[2:5] == [f"{mean:.4f}" for mean in means]
        assert int(line.split()[5]) == len(true)


def test_no_example_at_all_is_no_error():
    empty = [[0, 0], [0, 0]]
    assert (accuracy(empty), macro_f1(empty)) == (0, 0)
    assert "accuracy 0.0000 on 0 examples" in report_table(empty, ["a", "b"])


def columns_of(text):
    """Columns that a terminal gives a line, by hand for the letters used here."""
    wide, none = set("怒喜悦がＡ한"), {"\u0301", "\u3099"}
    return sum(2 if c in wide else 0 if c in none else 1 for c in text)


@pytest.mark.parametrize(
    "names",
    [
        ("joy", "怒", "sadness"),
        ("喜悦がＡ한", "a", "bb"),
        ("e\u0301te\u0301", "か\u3099".replace("か", "が"), "été"),
        ("tab\there", "line\nend", "\x1b[31mred"),
    ],
)
def test_a_table_lines_up(names):
    assert {unicodedata.category(c) for c in "\u0301\u3099"} == {"Mn"}
    text = report_table(MATRIX, names)
    assert all(c.isprintable() or c == "\n" for c in text)
    head, *tables = text.split("\n\n")
    assert head == "accuracy 0.7500 on 16 examples"
    assert len(tables) == 2
    for table in tables:
        lines = table.rstrip("\n").splitlines()
        assert len({columns_of(line) for line in lines}) == 1, table
    assert [line.split()[-3:] for line in tables[1].splitlines()[1:]] == [
        [str(n) for n in row] for row in MATRIX
    ]
    scores = tables[0].splitlines()
    assert scores[0].split() == ["precision", "recall", "F1", "examples"]
    assert [line.split()[-1] for line in scores[1:]] == ["6", "6", "4", "16", "16"]


def strict(text):
    """JSON without Python's own NaN and Infinity."""

    def refuse(name):
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def test_the_files(tmp_path):
    about = {"step": 7, "loss": 0.25, "precision": "fp32"}
    write_report(tmp_path, MATRIX, NAMES, about)
    assert {p.name for p in tmp_path.iterdir()} == {"report.txt", "report.json"}
    assert (tmp_path / "report.txt").read_text("utf-8") == report_table(MATRIX, NAMES)
    text = (tmp_path / "report.json").read_text("utf-8")
    assert "怒" in text
    found = strict(text)
    assert found == about | report_values(MATRIX, NAMES)
    assert found["labels"] == list(NAMES)
    assert found["confusion"] == [list(row) for row in MATRIX]
    assert found["accuracy"] == 0.75
    assert found["classes"][2] == {
        "label": "怒", "precision": 0.8, "recall": 1.0, "f1": pytest.approx(8 / 9), "support": 4,
    }  # fmt: skip

    write_report(tmp_path, [[1, 0], [0, 1]], ["a", "b"], {"step": 8, "loss": float("nan")})
    found = strict((tmp_path / "report.json").read_text("utf-8"))
    assert (found["step"], found["loss"], found["labels"]) == (8, None, ["a", "b"])
    assert {p.name for p in tmp_path.iterdir()} == {"report.txt", "report.json"}
