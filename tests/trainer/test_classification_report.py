"""Scores against scikit-learn's, and tables that line up."""

import numpy as np
import pytest

from halfstep.trainer.tasks.scores import (
    accuracy,
    class_scores,
    macro_f1,
    report_table,
    report_values,
)


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_scikit_learns(seed):
    oracle = pytest.importorskip("sklearn.metrics")
    drawn = np.random.default_rng(seed)
    size = int(drawn.integers(2, 8))
    matrix = drawn.integers(0, 30, (size, size)) * (drawn.random((size, size)) < 0.6)
    if seed % 3 == 0:
        matrix[int(drawn.integers(size))] = 0  # a class without an example
    if seed % 4 == 0:
        matrix[:, int(drawn.integers(size))] = 0  # a class that is never found
    matrix[0, 0] += 1
    pairs = [(i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) for _ in range(n)]
    true, found = zip(*pairs, strict=True)
    names, counts = [f"c{i}" for i in range(size)], matrix.tolist()
    options = {"labels": list(range(size)), "zero_division": 0}
    expected = oracle.precision_recall_fscore_support(true, found, **options)
    # both are fp64 quotients of the same integers: at most some roundings apart
    for key, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [s[key] for s in class_scores(counts)] == pytest.approx(list(values), rel=1e-14)
    assert accuracy(counts) == pytest.approx(oracle.accuracy_score(true, found), rel=1e-14)
    mean = oracle.f1_score(true, found, average="macro", **options)
    assert macro_f1(counts) == pytest.approx(mean, rel=1e-14)
    values = report_values(counts, names)
    assert (values["accuracy"], values["macro_f1"]) == (accuracy(counts), macro_f1(counts))
    assert [each["label"] for each in values["classes"]] == values["labels"] == names

    lines = report_table(counts, names).splitlines()
    for kind in ("macro", "weighted"):
        *means, _ = oracle.precision_recall_fscore_support(true, found, average=kind, **options)
        (line,) = [line for line in lines if line.startswith(f"{kind} mean")]
        assert line.split()[2:5] == [f"{mean:.4f}" for mean in means]
        assert int(line.split()[5]) == len(true)


def test_a_table_of_wide_letters_lines_up():
    names, matrix = ("喜悦がＡ한", "a", "bb"), ((5, 1, 0), (2, 3, 1), (0, 0, 4))
    head, *tables = report_table(matrix, names).split("\n\n")
    assert head == "accuracy 0.7500 on 16 examples"
    for table in tables:
        lines = table.rstrip("\n").splitlines()
        assert len({len(line) + 5 * (names[0] in line) for line in lines}) == 1, table
    assert [line.split()[-3:] for line in tables[1].splitlines()[1:]] == [
        [str(n) for n in row] for row in matrix
    ]
