"""Which of several runs is ahead, and by what."""

from dataclasses import replace

import pytest

from halfstep.report.compare import compare, grouped
from halfstep.report.record import read_run
from report.conftest import line

CONFIG = """task = "{task}"
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

    def make(precision, seed, loss, *, task="pretrain", data="a.txt", step=20, key="val_loss"):
        name = f"{precision}-{seed}-{task}-{data}-{loss}"
        lines = [line(s) for s in range(1, step)] + [line(step, **{key: loss})]
        path = folder(lines, name)
        text = CONFIG.format(task=task, precision=precision, seed=seed, name=name, data=data)
        (path / "config.toml").write_text(text, encoding="utf-8")
        return read_run(path)

    return make


def said(runs, language="en"):
    return " ".join(compare(runs, language).verdict)


def test_runs_that_differ_in_their_seed_are_one_group(made):
    runs = [made(p, s, 3 + s / 100) for p in ("fp32", "bf16-mixed") for s in (1, 2, 3)]
    assert [(g.name, len(g.runs)) for g in grouped(runs)] == [("fp32", 3), ("bf16-mixed", 3)]
    one = compare(runs[:3])
    assert "All runs repeat one configuration: 3.0200 ± 0.0100 at step 20" in one.verdict[0]
    assert compare(runs[:1]) is None


def test_groups_are_told_by_mean_deviation_and_number(made):
    runs = [made("bf16-pure", s, v) for s, v in ((1, 4.0), (2, 4.01), (3, 4.02))]
    runs += [made("fp32", s, v) for s, v in ((4, 3.0), (5, 3.01))]
    found = compare(runs)
    assert [group.name for group in found.groups] == ["fp32", "bf16-pure"]
    assert found.verdict[0] == (
        "fp32 (3.0050 ± 0.0071; seeds: 2) is ahead of bf16-pure (4.0100 ± 0.0100; seeds: 3) by "
        "1 at step 20. Of one seed nobody can tell whether that is more than its noise."
    )
    assert found.differs == {"precision": ["fp32", "bf16-pure"]}


def test_what_cannot_be_ranked_says_why(made, folder):
    runs = [made("fp32", 1, 3.0), made("fp32", 1, 0.5, task="classify", data="b.csv")]
    assert "cannot be ranked: they differ in task, data.train, so" in said(runs)
    runs[1] = made("bf16-pure", 1, 3.5, step=15)
    assert said(runs).endswith(
        "fp32-1-pretrain-a.txt-3.0 was evaluated at step 20; "
        "bf16-pure-1-pretrain-a.txt-3.5 was evaluated at step 15."
    )
    broken = read_run(folder([line(s) for s in range(1, 5)], "nan", steps=20))
    table = {**broken.config, "run": {"max_steps": 20, "eval_every": "x"}}
    assert "before its first" in said([runs[0], replace(broken, config=table)])
    assert "cannot be ranked: nan ended at step 4, before its first" in said([runs[0], broken])
    loop = read_run(folder([line(s) for s in range(1, 30)], "loop"))
    text = said([runs[0], loop, broken])
    assert "loop has no validation results; nan ended at step 4" in text
    assert "无法排序：nan 在第 4 步" in said([runs[0], broken], "zh")


def test_the_same_seed_with_other_contents_is_not_ranked(made):
    first, second = (replace(made(p, 1, 3.0), made_with={"data": p, "model": p})
                     for p in ("fp32", "bf16-pure"))  # fmt: skip
    assert "they differ in what their data held" in said([first, second])
    other = replace(made("bf16-pure", 2, 3.1), made_with={"data": "b"})
    assert "is ahead" in said([first, other])
    assert "is ahead" in said([first, replace(second, made_with={"model": 3})])


def test_a_seed_that_comes_twice_is_no_repetition(made):
    one = made("fp32", 1, 3.0)
    assert "fp32 (3.0000; seeds: 1)" in said([one, one, made("bf16-pure", 1, 4.0)])


def test_accuracies_are_better_when_higher(made):
    found = compare([made("fp32", s, 0.5 + s / 1000, key="val_accuracy") for s in (1, 2, 3)]
                    + [made("bf16-pure", s, 0.9 + s / 1000, key="val_accuracy") for s in (1, 2, 3)]
                    )  # fmt: skip
    assert found.groups[0].name == "bf16-pure"
    assert found.verdict[0].startswith("bf16-pure (90.20% ± 0.10%; seeds: 3) is ahead")


def test_a_run_that_became_nan_is_named_and_never_the_best(made):
    runs = [made("fp32", s, 3 + s / 100) for s in (1, 2)] + [made("fp16-pure", 1, "nan")]
    found = compare(runs)
    assert "No finite validation result at step 20: fp16-pure-1" in found.verdict[0]
    assert found.groups[0].name == "fp32"
    assert len(found.verdict) == 1
