"""The budget: figures of the source that may fall, and rise only in a commit that says why.

``budget.toml`` holds them. Whoever takes something away lowers them::

    python tests/architecture/test_budget.py --write

which refuses to raise one: that is done by hand, in the file, with the reason in the commit. Where
two branches have lowered it, take either file and write it anew.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "halfstep"
BUDGET = Path(__file__).with_name("budget.toml")
Figures = dict[str, dict[str, int]]


# --- what stands in the files ---


def static_figures() -> Figures:
    """Count what can be read without running anything."""
    paths = sorted(SOURCE.rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    for path in paths:
        room = path.relative_to(SOURCE).parts[0] if path.parent != SOURCE else "root"
        for name in (room, "total"):
            lines[name] += len(texts[path].splitlines())
            statements[name] += count_statements(trees[path])
    tests = [*(ROOT / "tests").rglob("*.py")]
    return {
        "lines": dict(lines),
        "statements": dict(statements),
        "source": {
            "files": len(paths),
            "cpp_lines": count_lines([*SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.h")]),
            "one_importer": len(with_one_importer(trees)),
            "functions_over_50_lines": len(long_functions(trees)),
            "public_names": len(public_names()),
        },
        "tests": {"lines": count_lines(tests)},
    }


def count_lines(paths: Any) -> int:
    """Count the lines of files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def count_statements(tree: ast.AST) -> int:
    """Count statements, docstrings and other lone strings left out."""

    def is_string(node: ast.stmt) -> bool:
        return (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )

    return sum(isinstance(node, ast.stmt) and not is_string(node) for node in ast.walk(tree))


def with_one_importer(trees: dict[Path, ast.Module]) -> list[str]:
    """List modules that one other module imports, and nobody else: halves of that one, perhaps.

    ``from package import module`` imports that module. An ``__init__.py`` is no such module, but
    imports; what is imported by name at run time, as commands are, has no importer here.
    """
    modules = {}
    for path in trees:
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for importer, path in modules.items():
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inside = {alias: f"{node.module}.{alias.name}" for alias in node.names}
                names = [n if n in modules else str(node.module) for n in inside.values()]
            else:
                continue
            for name in names:
                importers[name].add(importer)
    return sorted(
        name
        for name, path in modules.items()
        if path.name != "__init__.py" and len(importers[name]) == 1
    )


def long_functions(trees: dict[Path, ast.Module]) -> list[str]:
    """List functions of more than 50 lines, without their decorators."""
    return [
        f"{path.relative_to(SOURCE)}: {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > 50
    ]


def public_names() -> set[str]:
    """List what ``__init__.pyi`` offers."""
    tree = ast.parse((SOURCE / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


# --- what a run enters ---


def dynamic_figures() -> Figures:
    """Run the programs below in a process of its own, in which nobody has imported anything."""
    words = [sys.executable, "-W", "ignore", __file__, "--measure"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def train_figures() -> dict[str, int]:
    """Count modules of ours that a run touches, and how often it parses a policy.

    Parsing goes by the name ``_parse_text``, which a policy that is a value already never enters:
    if it is renamed, so is this.
    """
    from halfstep.cli.main import main

    parses = 0

    def enter(frame: Any, event: str, _: object) -> None:
        nonlocal parses
        parses += event == "call" and frame.f_code.co_name == "_parse_text"

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("the quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
        words = f"train --config gpt-tiny --data {text} --tokenizer bytes --max-steps 2"
        words += f" --precision bf16-mixed --device cpu --output-dir {folder}/run --quiet"
        sys.setprofile(enter)
        code = main(words.split())
        sys.setprofile(None)
    assert code == 0
    return {"modules": len(ours(sys.modules)), "parses": parses}


def ours(names: Any) -> list[str]:
    """List the modules of this project."""
    return [name for name in names if name == "halfstep" or name.startswith("halfstep.")]


def step_figures(policy: str) -> dict[str, int]:
    """Count the files of ours that forward, backward and step enter, and calls of our functions.

    ``bf16-mixed`` steps torch's AdamW, ``bf16-split`` ours.
    """
    import torch
    from torch import nn

    import halfstep

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))
    adamw = torch.optim.AdamW if policy == "bf16-mixed" else halfstep.optim.AdamW
    optimizer = adamw(model.parameters(), lr=1e-3)
    precision = halfstep.Precision(policy, model, optimizer)
    files: Counter[str] = Counter()

    def enter(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            files[frame.f_code.co_filename] += 1

    def step() -> None:
        with precision.autocast():
            loss = model(torch.ones(8, 32)).square().mean()
        precision.step(loss, max_norm=1.0)

    step()  # the first one makes what later ones find
    sys.setprofile(enter)
    step()
    sys.setprofile(None)
    return {"files": len(files), "calls": files.total()}


def measure() -> Figures:
    """Take all figures that need a run; of a step they depend on whether bf16 is simulated."""
    figures = {"train": train_figures()}
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    native = bool({"avx512_bf16", "amx_bf16"} & {*words})
    for name, policy in (("step_mixed", "bf16-mixed"), ("step_split", "bf16-split")):
        found = step_figures(policy)
        end = "" if native else "_simulated"
        figures[name] = {f"{key}{end}": number for key, number in found.items()}
    return figures


# --- the budget ---


def read_budget() -> Figures:
    """Read the figures that hold."""
    return tomllib.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}


def risen(figures: Figures, budget: Figures) -> list[str]:
    """Name every figure that is above its budget."""
    return [
        f"{table}.{name} is {number:,}, above {allowed:,}"
        for table, values in figures.items()
        for name, number in values.items()
        if number > (allowed := budget.get(table, {}).get(name, number))
    ]


def write(figures: Figures, budget: Figures) -> None:
    """Write the figures; those of a step where bf16 is simulated, or is not, stay if not taken."""
    text = "# Figures that may fall, and rise only in a commit that says what it is worth.\n"
    text += "# python tests/architecture/test_budget.py --write lowers them to the tree's.\n"
    for table, values in figures.items():
        elsewhere = budget.get(table, {}) if table.startswith("step") else {}
        text += f"\n[{table}]\n"
        for name, number in sorted((elsewhere | values).items(), key=lambda item: item[0]):
            text += f"{name} = {number}\n"
    BUDGET.write_text(text, encoding="utf-8")


def test_no_figure_of_the_source_has_risen():
    figures, budget = static_figures(), read_budget()
    assert not risen(figures, budget)
    for table, values in figures.items():
        assert set(values) <= set(budget[table]), "a room without a budget"


def test_no_figure_of_a_run_has_risen():
    figures = dynamic_figures()
    assert figures["train"]["parses"] > 0, "_parse_text has another name now"
    assert not risen(figures, read_budget())


def main(words: list[str]) -> int:
    """Measure, or lower the budget."""
    if words == ["--measure"]:
        sys.stdout.write(json.dumps(measure()) + "\n")
        return 0
    if words != ["--write"]:
        sys.stderr.write("usage: python tests/architecture/test_budget.py --write\n")
        return 2
    figures, budget = static_figures() | dynamic_figures(), read_budget()
    if up := risen(figures, budget):
        sys.stderr.write("\n".join(["not written, since figures have risen:", *up, ""]))
        return 1
    write(figures, budget)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
