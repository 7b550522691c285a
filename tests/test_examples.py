"""Every example runs and shows what is true; the minimal loop has at most four changed lines."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
HERE = ("minimal_loop", "own_module", "step_in_backward")
ELSEWHERE = (  # run by the tests of what they show
    "accelerate_loop",
    "deepspeed_observed",
    "distributed_loop",
    "gpt2_lora",
    "lightning_module",
    "torchtitan_override",
    "lightning_sharded",
    "ray_train",
    "transformers_trainer",
)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-pure"])
def test_minimal_loop_learns_under_every_policy(policy, capsys):
    main = runpy.run_path(str(EXAMPLES / "minimal_loop.py"))["main"]
    results = main(policy)
    losses = [result.loss for result in results]
    assert sum(losses[-20:]) < 0.4 * sum(losses[:20])
    shown = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert shown[-1] < 0.2 * shown[0]  # to be seen by a newcomer
    assert sum(result.applied for result in results) == results[-1].skipped_total * -1 + 100


@pytest.mark.slow
def test_own_module_learns_digits(tmp_path):
    main = runpy.run_path(str(EXAMPLES / "own_module.py"))["main"]
    trained = main("bf16-mixed", str(tmp_path / "r"))
    assert trained.best.measures["accuracy"] > 0.9  # by chance: 0.1; on the author's machine 0.96


def test_a_step_in_backward_learns():
    losses = runpy.run_path(str(EXAMPLES / "step_in_backward.py"))["main"]()
    assert sum(losses[-20:]) < 0.4 * sum(losses[:20])


def test_minimal_loop_marks_its_changed_lines():
    text = (EXAMPLES / "minimal_loop.py").read_text()
    marks = [line for line in text.splitlines() if "  # " in line and line.split("  # ")[1][0] in
             "123456789"]  # fmt: skip
    assert len(marks) == 4
    halfstep_lines = [x for x in text.splitlines() if "halfstep" in x or "precision" in x.lower()]
    unmarked = [x for x in halfstep_lines if x not in marks]
    # What is left only names types and prints.
    assert all(x.startswith(('"""', "Run:", "def main", '"""A')) or not x.strip() for x in unmarked)


def test_every_example_is_tested_and_on_the_page_with_its_command():
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == {*HERE, *ELSEWHERE}
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    for name in ELSEWHERE:
        assert any(name in text for text in tests), name
    for page in ("examples.md", "examples.zh.md"):
        rows = [
            line for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
            if line.startswith("| [`")
        ]  # fmt: skip
        assert len(rows) == len(found), page
        for name in found:
            (row,) = [line for line in rows if f"(../examples/{name}.py)" in line]
            assert f"examples/{name}.py" in row.split("|")[-2], "its command"
