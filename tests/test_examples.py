"""Every example runs; the minimal loop has at most four changed lines."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-pure"])
def test_minimal_loop_learns_under_every_policy(policy, capsys):
    main = runpy.run_path(str(EXAMPLES / "minimal_loop.py"))["main"]
    results = main(policy)
    losses = [result.loss for result in results]
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    assert sum(result.applied for result in results) == results[-1].skipped_total * -1 + 100


def test_minimal_loop_marks_its_changed_lines():
    text = (EXAMPLES / "minimal_loop.py").read_text()
    marks = [line for line in text.splitlines() if "  # " in line and line.split("  # ")[1][0] in
             "123456789"]  # fmt: skip
    assert len(marks) == 4
    halfstep_lines = [x for x in text.splitlines() if "halfstep" in x or "precision" in x.lower()]
    unmarked = [x for x in halfstep_lines if x not in marks]
    # What is left only names types and prints.
    assert all(x.startswith(('"""', "Run:", "def main", '"""A')) or not x.strip() for x in unmarked)
