"""The library's front door: names, lazy import, and what importing must not do."""

import ast
import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from every import every

STUB = Path(halfstep.__file__).with_name("__init__.pyi")
NAMES = {
    alias.asname or alias.name: node.module
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for alias in node.names
}


def test_every_public_name_resolves_to_the_object_of_its_module():
    def check(name):
        module = __import__(f"halfstep.{NAMES[name]}", fromlist=[name])
        assert getattr(halfstep, name) is getattr(module, name)
        assert name in halfstep.__all__
        assert name in dir(halfstep)

    every(NAMES, check)


def test_importing_halfstep_imports_no_torch_and_starts_nothing():
    code = (
        "import sys, json, threading, halfstep; v = halfstep.__version__; dir(halfstep);"
        "halfstep.PrecisionError; halfstep.NonFiniteError;"  # which can be caught at once
        "heavy = [m for m in ('torch', 'numpy', 'transformers', 'tokenizers', 'rich') "
        "if m in sys.modules];"
        "threads = threading.active_count(); name = str(halfstep.parse_policy('bf16'));"
        "print(json.dumps([heavy, threads, v, name]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], 1, halfstep.__version__, "bf16-mixed"]


def test_examples_in_docstrings_are_right():
    for name in ("step", "explain", "casting.autocast", "policy.spelling"):
        module = importlib.import_module(f"halfstep.precision.{name}")
        result = doctest.testmod(module)
        assert result.attempted >= 1, name
        assert result.failed == 0, name


@pytest.mark.slow
def test_the_library_needs_no_module_that_windows_lacks():
    """The trainer does; what Python lacks on Windows is taken away here."""
    code = (
        "import sys, importlib\n"
        "for name in ('fcntl', 'grp', 'pwd', 'resource', 'termios'):\n"
        "    sys.modules[name] = None\n"
        "for module in ('halfstep', 'halfstep.optim', 'halfstep.distributed'):\n"
        "    module = importlib.import_module(module)\n"
        "    for name in sorted(set(module.__all__) - {'Trainer', 'TrainResult'}):\n"
        "        getattr(module, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
