"""The study of recipes: differences are judged rightly, and a killed run goes on bit by bit."""

import json
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_judge_is_a_regression_on_recipes_and_seeds(benchmarks):
    from scipy import stats

    from recipes_figures import judge

    rng = np.random.default_rng(0)
    names = ["bf16-mixed", "a", "b", "c"]
    table = rng.normal(size=(4, 5)) + rng.normal(size=5) * 10
    judged = judge(dict(zip(names, table, strict=True)))
    # Ordinary least squares: a dummy for each seed, one for each recipe but the first.
    rows = [(r, s) for r in range(4) for s in range(5)]
    design = np.array([[float(s == k) for k in range(5)] + [float(r == k) for k in (1, 2, 3)]
                       for r, s in rows])  # fmt: skip
    y = np.array([table[r, s] for r, s in rows])
    inverse = np.linalg.inv(design.T @ design)
    found = inverse @ design.T @ y
    freedom = len(y) - design.shape[1]
    variance = ((y - design @ found) ** 2).sum() / freedom
    for number, name in enumerate(names[1:], start=5):
        t = found[number] / np.sqrt(variance * inverse[number, number])
        assert judged[name]["difference"] == pytest.approx(found[number], rel=1e-9)
        assert judged[name]["p_pooled"] == pytest.approx(2 * stats.t.sf(abs(t), freedom), rel=1e-9)
        alone = stats.ttest_rel(table[number - 4], table[0]).pvalue
        assert judged[name]["p"] == pytest.approx(alone, rel=1e-9)
    assert judged["a"]["sd"] == pytest.approx(np.std(table[1], ddof=1))


@pytest.mark.parametrize("end", ["", ".zh"])
def test_docs_show_the_judgement_of_the_results(end, benchmarks, capsys):
    import recipes_figures

    page = (BENCHMARKS.parent / "docs" / f"low-bit{end}.md").read_text(encoding="utf-8")
    for path in recipes_figures.STUDIES:
        _, losses = recipes_figures.curves(json.loads(path.read_text()))
        recipes_figures.print_table(recipes_figures.judge({k: v[:, -1] for k, v in losses.items()}))
        judged = capsys.readouterr().out
        if end:  # recipes have names of their own there
            judged = "\n".join(row[row.index("|", 1) :] for row in judged.splitlines()[2:])
            shown = [row[row.find("|", 1) :] for row in page.splitlines()]
            assert judged in "\n".join(shown)
        else:
            assert judged in page
    for figure in recipes_figures.FIGURES:
        assert f"(figures/{figure}{end}.svg)" in page
