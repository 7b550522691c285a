"""The law of imports: one direction, at the top of the file, no cycles, small rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "halfstep"
FILES = sorted(SOURCE.rglob("*.py"))

# Room -> rooms it may import besides itself. The whole law.
ALLOWED = {
    "errors": set(),
    "files": set(),
    "formats": set(),
    "torch_version": {"errors"},
    "precision": {"errors", "formats"},
    "models": {"errors", "files"},
    "data": {"errors", "files"},
    "optim": {"errors", "formats", "precision"},
    "diagnostics": {"errors", "formats", "precision", "optim"},
    "integrations": {"errors", "formats", "precision", "optim", "diagnostics"},
    "distributed": {"errors", "precision"},
    "checkpoint": {"errors", "files", "optim"},
    "training": {
        "errors",
        "files",
        "formats",
        "precision",
        "models",
        "data",
        "optim",
        "diagnostics",
        "distributed",
        "checkpoint",
        "torch_version",
    },
    # cli may import training, diagnostics, integrations and errors; and, as training's own values
    # pass through its hands, what training may import.
    "cli": {
        "formats",
        "errors",
        "torch_version",
        "precision",
        "models",
        "data",
        "training",
        "integrations",
        "diagnostics",
        "distributed",
    },
    "__init__": set(),
    "__main__": {"cli"},
}
# A missing optional dependency is the one import that may stand inside a function.
OPTIONAL = {
    ("training/tensorboard.py", "torch.utils.tensorboard"),
    ("data/hub_datasets.py", "datasets"),
    ("integrations/hf_trainer.py", "transformers"),
    ("integrations/lightning.py", "lightning.pytorch"),
    ("integrations/lightning.py", "lightning.pytorch.callbacks"),
    ("integrations/lightning.py", "lightning.pytorch.plugins"),
    ("integrations/lightning.py", "lightning.pytorch.trainer.states"),
    ("integrations/lightning.py", "lightning.pytorch.utilities"),
    ("integrations/lightning.py", "lightning.pytorch.utilities.model_helpers"),
    ("integrations/fabric.py", "lightning.fabric"),
    ("integrations/fabric.py", "lightning.fabric.plugins"),
    ("models/pretrained_hub.py", "transformers"),
    ("models/pretrained_hub.py", "peft"),
    ("models/pretrained_hub.py", "huggingface_hub.errors"),
    ("models/pretrained_hub.py", "huggingface_hub.utils"),
    ("training/classification_report.py", "matplotlib.figure"),
    ("training/classification_report.py", "matplotlib"),
    ("optim/cuda.py", "halfstep.optim.triton_scaling"),  # which needs triton at its top
}


def room(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def project_imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
    return [name for name in found if name == "halfstep" or name.startswith("halfstep.")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_imports_only_what_the_table_allows(path):
    for name in project_imports(ast.parse(path.read_text())):
        parts = name.split(".")
        target = parts[1] if len(parts) > 1 else "__init__"
        if target == "__init__":
            assert path.name == "main.py", f"{path}: only the command line imports the package root"
            continue
        own = room(path)
        assert target == own or target in ALLOWED[own], f"{path.name} of {own} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_stand_at_the_top(path):
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_a_room(path):
    assert len(path.read_text().splitlines()) <= 600


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_nothing_is_ever_unpickled_or_evaluated(path):
    banned = {"eval", "exec"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
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
            if name == "torch.load":
                assert any(k.arg == "weights_only" for k in node.keywords), path


def test_commands_are_loaded_by_name_in_one_place_only():
    users = {str(p.relative_to(SOURCE)) for p in FILES if "import_module" in p.read_text()}
    # The package's front door and the probe of torch's own modules, which load no command.
    assert users == {"cli/main.py", "__init__.py", "torch_version.py"}


SHORTEST = 4  # words: with fewer, a docstring restates the name


def test_a_docstring_says_more_than_the_name():
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = ast.get_docstring(node)
                if text is not None and len(text.split()) < SHORTEST:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno} {text}")
    assert not found
