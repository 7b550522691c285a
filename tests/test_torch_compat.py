"""Every private name of torch that the source uses is listed, probed, and refused by name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import halfstep
from halfstep import torch_compat
from halfstep.errors import ConfigError
from halfstep.torch_compat import EVERYTHING, PRIVATE, missing, require_torch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "halfstep"
LISTED = {name for names in PRIVATE.values() for name in names.split()}
# Private attributes of objects that are not torch's, with whose they are.
OTHERS = {
    "hashlib._Hash": "Python, for a type",
    "sys._current_frames": "Python",
    "sys._getframe": "Python",
    "os._exit": "Python",
    "?._cdata": "a tensor's address, in torch's own tests of identity",
    "?._model_mapping": "transformers",
    "auto._model_mapping": "transformers",
    "optimizer._optimizer_step_pre_hooks": "an optimizer made for a probe would load Dynamo",
    "optimizer._optimizer_step_post_hooks": "an optimizer made for a probe would load Dynamo",
    "?._option_string_actions": "argparse",
    "parser._option_string_actions": "argparse",
    "self._actions": "argparse",
    "self._option_string_actions": "argparse",
    "accelerator._models": "accelerate",
    "accelerator._optimizers": "accelerate",
    "trainer.accelerator._optimizers": "accelerate",
    "self.accelerator._models": "accelerate",
    "self._after_closure": "Lightning",
    "self.core.config._attn_implementation": "transformers",
}
# How the objects whose private attributes are used are called in the source.
OBJECTS = {
    "_parameters": "Module._parameters",
    "_modules": "Module._modules",
    "_forward_pre_hooks": "Module._forward_pre_hooks",
    "_forward_hooks": "Module._forward_hooks",
    "_forward_pre_hooks_with_kwargs": "Module._forward_pre_hooks_with_kwargs",
    "_backward_hooks": "Module._backward_hooks",
    "_backward_pre_hooks": "Module._backward_pre_hooks",
    "_version": "Tensor._version",
    "_optimizer_step_pre_hooks": "Optimizer._optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks": "Optimizer._optimizer_step_post_hooks",
    "_values": "Tensor._values",
    "_sequence_nr": "Node._sequence_nr",
}


@pytest.fixture(autouse=True)
def anew():
    """What one test breaks, the next one probes again."""
    missing.cache_clear()
    yield
    missing.cache_clear()


def dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "?", *reversed(parts)])


def private(name: str) -> bool:
    return any(re.match(r"_(?!_)", part) for part in name.split("."))


def defined() -> set[str]:
    """Private names that the package itself defines, on any object of its own."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Assign):
                found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found


def uses(own: set[str]) -> dict[str, str]:
    """Private names that are not ours, each with a file that uses it."""
    found = {}
    for file in SOURCE.rglob("*.py"):
        if file.name == "torch_compat.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
                names = [dotted(node).replace("_aten.", "torch.ops.aten.", 1)]
            for name in names:
                if private(name) and not name.startswith(("halfstep.", "_aten", "__future__")):
                    found.setdefault(name, str(file.relative_to(SOURCE)))
    return found


def listed(name: str) -> bool:
    """Whether a name of the source, or what it is an attribute of, is in the table."""
    last = name.rpartition(".")[2]
    if name in OTHERS or last in ("_asdict", "_fields", "_replace"):  # of Python's named tuples
        return True
    if not name.startswith("torch."):
        return OBJECTS.get(last) in LISTED or f"GradScaler.{last}" in LISTED
    return any(name == known or name.startswith(f"{known}.") for known in LISTED)


def test_every_private_name_of_the_source_is_probed():
    unlisted = {name: file for name, file in uses(defined()).items() if not listed(name)}
    assert not unlisted, "add these to halfstep.torch_compat.PRIVATE"


def test_nothing_is_probed_that_no_source_uses():
    text = "\n".join(
        file.read_text() for file in SOURCE.rglob("*.py") if "torch_compat" not in file.name
    )
    for name in LISTED:
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", text), f"{name} is used no more"


def test_the_scan_sees_a_private_name(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(
        "import torch\ntorch._foreach_sqrt([])\nfrom torch._x import y\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert uses(set()) == {"torch._foreach_sqrt": "a.py", "torch._x.y": "a.py"}
    assert not listed("torch._foreach_sqrt")


@pytest.mark.parametrize("feature", sorted(PRIVATE))
def test_this_torch_has_all_of_it(feature):
    assert missing(feature) == ()
    require_torch(feature)


@pytest.mark.parametrize(
    ("owner", "name", "listed_as", "feature"),
    [
        (torch, "_foreach_norm", "torch._foreach_norm", EVERYTHING),
        (torch._C, "_current_graph_task_id", "torch._C._current_graph_task_id", "trace_nonfinite"),
        (
            torch.amp.GradScaler,
            "_found_inf_per_device",
            "GradScaler._found_inf_per_device",
            "GradScaler",
        ),
    ],
)
def test_a_name_that_is_gone_is_refused_by_name(monkeypatch, owner, name, listed_as, feature):
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        ConfigError, match=rf"torch \d.*for {feature}: {re.escape(listed_as)} is mis"
    ):
        require_torch(feature)
    public = "Precision" if feature == EVERYTHING else feature
    monkeypatch.delitem(vars(halfstep), public, raising=False)  # where it was loaded before
    with pytest.raises(ConfigError, match=re.escape(listed_as)):
        getattr(halfstep, public)


def test_what_only_tracing_needs_does_not_hinder_training(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    require_torch()
    assert halfstep.Precision


def test_a_module_that_is_gone_is_told_by_name_and_not_as_an_import_error():
    code = """
import sys, torch
import halfstep, torch._functorch
sys.modules["torch._functorch.config"] = None
vars(torch._functorch).pop("config", None)
try:
    halfstep.Precision
except halfstep.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch._functorch.config is missing" in done.stdout


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "2.9.0+cpu"])
def test_a_torch_that_is_too_old(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ConfigError, match=r"2\.11 or newer"):
        require_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.14.0", "2.16.0a0+git1", "3.0.1+cu140"])
def test_a_newer_torch_is_not_refused_for_its_number(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    require_torch()


def test_no_version_of_torch_is_too_new():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    least = ".".join(map(str, torch_compat.LEAST))
    assert [(s.operator, s.version) for s in wanted.specifier] == [(">=", least)]


def test_probing_draws_no_random_numbers():
    """The first use of a public name must not change what a seeded script draws next."""
    before = torch.get_rng_state()
    torch_compat.missing.cache_clear()
    for feature in PRIVATE:
        torch_compat.missing(feature)
    assert torch.equal(torch.get_rng_state(), before)
