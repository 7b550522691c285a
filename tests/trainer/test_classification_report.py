"""Scores against scikit-learn's, and tables that line up."""

import numpy as np
import pytest

from halfstep.trainer.tasks.classify import report_table, report_values


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
    values = report_values(counts, names)
    # both are fp64 quotients of the same integers: at most some roundings apart
    for key, wanted in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [s[key] for s in values["classes"]] == pytest.approx(list(wanted), rel=1e-14)
    assert values["accuracy"] == pytest.approx(oracle.accuracy_score(true, found), rel=1e-14)
    assert [each["label"] for each in values["classes"]] == values["labels"] == names
    *means, _ = oracle.precision_recall_fscore_support(true, found, average="macro", **options)
    assert values["macro_f1"] == pytest.approx(means[2], rel=1e-14)
    (line,) = [line for line in report_table(values).splitlines() if line.startswith("macro mean")]
    assert line.split()[2:] == [*(f"{mean:.4f}" for mean in means), str(len(true))]
