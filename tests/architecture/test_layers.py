"""The law of imports: one direction, at the top of the file, no cycles, small rooms."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "halfstep"
FILES = sorted(SOURCE.rglob("*.py"))

# Chapter -> chapters it may import besides itself and its parents; the longest entry counts.
BASE = {"errors", "files", "formats", "option", "shown"}
LIBRARY = {*BASE, "kernels", "precision", "optim", "diagnostics", "distributed"}
ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "formats": {"errors", "shown"},
    "option": set(),
    "shown": set(),
    "kernels": {"errors", "formats"},
    "precision": {"errors", "formats", "kernels", "shown"},
    "precision.policy": {
        *("errors", "formats", "precision.border", "precision.scaling"),
        "precision.masters.rounding",  # the table of rounding modes, which imports errors alone
    },
    "optim": {"errors", "formats", "kernels", "precision"},
    "diagnostics": {
        *("errors", "files", "formats", "kernels", "precision", "optim", "shown"),
    },
    "distributed": {"errors", "precision"},
    "integrations": {"errors", "formats", "precision", "optim", "diagnostics"},
    "report": {"errors", "files", "formats", "diagnostics", "precision.policy", "shown"},
    "trainer": {*LIBRARY, "report"},
    "trainer.models": {"errors", "files", "kernels", "option", "precision"},
    "trainer.data": {"errors", "files", "option", "trainer.models"},
    "trainer.checkpoint": {"distributed", "errors", "files", "optim", "trainer.shards"},
    "trainer.shards": {"errors", "files", "optim", "precision"},
    "cli": {*LIBRARY, "integrations", "report", "trainer"},
    "__init__": set(),
    "__main__": {"cli"},
}
# A missing optional dependency is the one import that may stand inside a function.
OPTIONAL = {
    ("trainer/data/records.py", "datasets"),
    ("report/page.py", "matplotlib.figure"),
    ("report/page.py", "matplotlib"),
    # which need triton at their top
    ("optim/kernels/cuda.py", "halfstep.optim.kernels.triton_kernels"),
    ("precision/loss_head.py", "halfstep.kernels.softmax_triton"),
}


def module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def chapter(name: str) -> str:
    """The longest entry of the table that a module's name begins with."""
    entries = [e for e in ALLOWED if name == e or name.startswith(f"{e}.")]
    return max(entries, key=len)


def project_imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
    return [name for name in found if name == "halfstep" or name.startswith("halfstep.")]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_a_chapter_imports_only_what_the_table_allows():
    for path in FILES:
        own = (
            chapter(module(path).removeprefix("halfstep.")) if path.parent != SOURCE else path.stem
        )
        for name in project_imports(tree_of(path)):
            target = name.removeprefix("halfstep").removeprefix(".")
            if not target:
                assert path.name == "main.py", f"{path}: only the command line imports the root"
                continue
            allowed = {own, *ALLOWED[own]}
            assert any(target == a or target.startswith(f"{a}.") for a in allowed), (
                f"{path}: {own} imports {name}"
            )


def test_imports_stand_at_the_top():
    for path in FILES:
        tree = tree_of(path)
        top = {id(node) for node in tree.body}
        for node in tree.body:  # names of types that load nothing at run time
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                top |= {id(inner) for inner in node.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top:
                name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert (str(path.relative_to(SOURCE)), name) in OPTIONAL, (
                    f"{path}: {name} below the top"
                )


def test_there_is_no_cycle():
    edges = {module(p): set(project_imports(ast.parse(p.read_text()))) for p in FILES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join([*path, name])}"
        if name not in done:
            for target in edges.get(name, ()):
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_a_folder_has_few_files_and_a_file_is_no_book():
    for folder in {path.parent for path in FILES} - {SOURCE / "cli"}:
        assert len([f for f in folder.glob("*.py") if f.name != "__init__.py"]) <= 10, folder
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 600, path


def test_nothing_is_ever_unpickled_or_evaluated():
    banned = {"eval", "exec"}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert name not in banned, f"{path}: {name}"
            assert name.split(".")[0] not in {"pickle", "joblib", "marshal"}, f"{path}: {name}"
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                assert (keyword.arg, value) not in {
                    ("weights_only", "False"),
                    ("allow_pickle", "True"),
                    ("shell", "True"),
                    ("trust_remote_code", "True"),
                }, f"{path}: {keyword.arg}={value}"
