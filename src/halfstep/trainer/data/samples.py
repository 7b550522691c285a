"""Makes sample instructions for fine-tuning from what every machine has: docstrings."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypeGuard

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.prepare import standard_library

LEAST, MOST = 20, 400
"""Characters of an answer: shorter docstrings say nothing, longer ones are no short answer."""
EACH = 20
"""Most records of one file, so that no module prevails."""


def instructions(count: int, folder: Path | None = None) -> list[dict[str, str]]:
    """Makes records in alpaca's format: what a function or a class of the standard library is.

    Args:
        count: Number of records; files are read until there are so many.
        folder: Where the standard library is; by default that of the running Python.

    Raises:
        DataError: If the standard library has fewer.
    """
    found = list(islice(_instructions(folder), count))
    if len(found) < count:
        raise DataError(
            f"this Python's standard library gives {len(found)} instructions; ask for at most "
            f"{len(found)} by --count"
        )
    return found


def _instructions(folder: Path | None) -> Iterator[dict[str, str]]:
    root = folder or Path(sysconfig.get_path("stdlib"))
    for source in standard_library(root):
        parts = source.path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and not any(part.startswith("_") for part in parts):
            yield from islice(_documented(source.path, ".".join(parts)), EACH)


def _documented(path: Path, module: str) -> Iterator[dict[str, str]]:
    """Yields a record for each public function and class of a file, and each public method."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    public = [node for node in tree.body if _is_public(node)]
    classes = [node for node in public if isinstance(node, ast.ClassDef)]
    methods = [(node, f"{c.name}.") for c in classes for node in c.body if _is_public(node)]
    for node, prefix in [*((node, "") for node in public), *methods]:
        answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if LEAST <= len(answer) <= MOST:
            called = f"{prefix}{node.name} of the module {module}"
            what = f"What is {called}?" if isinstance(node, ast.ClassDef) else (
                    f"What does {called} do?")  # fmt: skip
            yield {"instruction": what, "input": "", "output": answer}


def _is_public(node: ast.AST) -> TypeGuard[ast.ClassDef | ast.FunctionDef]:
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
