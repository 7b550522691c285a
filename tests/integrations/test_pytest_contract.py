"""The pytest fixture fails a test whose step runs in other dtypes than its file says."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]
TEST = """
import torch
def test_step(precision_contract):
    model = torch.nn.Linear(4, 4){after}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with precision_contract("contracts/step.json"):
        model(torch.ones(2, 4, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()
"""


@pytest.fixture
def ran(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(after, *words):
        pytester.makepyfile(TEST.format(after=after))
        plugin = ("-p", "halfstep.integrations.pytest_contract")
        return pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider", *words)

    return run


def test_a_file_is_written_on_request_and_a_difference_fails(ran, pytester):
    missing = ran("")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines("*contracts/step.json: No such file*")
    ran("", "--contract-update").assert_outcomes(passed=1)
    assert (pytester.path / "contracts" / "step.json").exists()
    ran("").assert_outcomes(passed=1)
    other = ran(".bfloat16()")
    other.assert_outcomes(failed=1)
    other.stdout.fnmatch_lines(
        ["  - weight: fp32", "  + weight: bf16", "*pytest --contract-update"]
    )


def test_the_plugin_imports_no_torch():
    code = "import sys, halfstep.integrations.pytest_contract; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
