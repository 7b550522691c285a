"""Which of several runs is ahead, and by what measure."""

from dataclasses import replace

import pytest

from halfstep.report.page import compare
from halfstep.report.record import read_run
from report.conftest import line

CONFIG = """{task}
precision = "{precision}"
[run]
seed = {seed}
output_dir = "{name}"
max_steps = 20
[data]
train = ["{data}"]
"""


@pytest.fixture
def made(folder):
    """A run that ends with a validation loss."""

    def make(precision, loss, *, task='task = "pretrain"', data="a.txt", steps=(20,), seed=1):
        name = f"{precision}-{loss}-{len(steps)}"
        lines = [line(s, **({"val_loss": loss} if s in steps else {})) for s in range(1, 21)]
        path = folder(lines, name)
        text = CONFIG.format(task=task, precision=precision, seed=seed, name=name, data=data)
        (path / "config.toml").write_text(text, encoding="utf-8")
        return read_run(path)

    return make


def said(*runs, language="en"):
    return compare(runs, language).verdict


def test_runs_are_ranked_at_the_last_common_step_and_one_of_nan_is_last(made):
    runs = [made("fp16-pure", "nan"), made("bf16-pure", 4.0, steps=(10, 20)), made("fp32", 3.005)]
    found = compare(runs)
    assert found.verdict.startswith(
        "Validation loss at step 20, best first: fp32-3.005-1 3.0050, bf16-pure-4.0-2 4.0000, "
        "fp16-pure-nan-1 nan."
    )
    assert found.differs == {"precision": ["fp16-pure", "bf16-pure", "fp32"]}
    assert compare(runs[:1]) is None


def test_accuracies_are_better_when_higher(folder):
    runs = [read_run(folder([line(1, val_accuracy=v)], str(v))) for v in (0.5, 0.9)]
    assert [value for _, value in compare(runs).values] == ["90.00%", "50.00%"]


def test_what_cannot_be_ranked_says_why(made, folder):
    first = made("fp32", 3.0)
    assert "cannot be ranked: they differ in data.train, so" in said(
        first, made("bf16", 3.0, data="b")
    )
    often = made("bf16-pure", 3.5, steps=(3, 6, 9, 12))
    assert said(first, often).endswith(
        "fp32-3.0-1 was last evaluated at step 20 (evaluations: 1); "
        "bf16-pure-3.5-4 was last evaluated at step 12 (evaluations: 4)."
    )
    broken = read_run(folder([line(s) for s in range(1, 5)], "nan", steps=20))
    loop = read_run(folder([line(s) for s in range(1, 30)], "loop"))
    text = said(first, loop, broken)
    assert "loop has no validation results; nan has no validation results" in text
    assert "无法排序：nan 没有验证结果" in said(first, broken, language="zh")


def test_runs_of_different_tasks_are_told_so_in_a_line(made):
    """Of such runs nearly every key differs."""
    runs = [made("fp32", 3.0), made("bf16", 0.5, task='task = "classify"', data="b.csv")]
    runs += [made("fp32", 1.0, task="")]  # of halfstep.Recorder
    assert said(*runs).endswith(
        "ranked: fp32-3.0-1 is a run of train; bf16-0.5-1 is a run of finetune classify; "
        "fp32-1.0-1 is a run of your program."
    )
    assert compare(runs).differs == {}


def test_the_same_seed_with_other_contents_is_not_ranked(made):
    first, second = (replace(made(p, 3.0), made_with={"data": p, "model": p})
                     for p in ("fp32", "bf16-pure"))  # fmt: skip
    assert "they differ in what their data held" in said(first, second)
    other = replace(made("bf16-pure", 3.1, seed=2), made_with={"data": "b"})
    assert "best first" in said(first, other)
    assert "best first" in said(first, replace(second, made_with={"model": 3}))
