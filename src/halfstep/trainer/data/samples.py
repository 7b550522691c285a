"""Makes small sample data for the fine-tuning tasks from what every machine has.

Instructions are docstrings of the standard library. Posts with an emotion are synthetic: they come
from the grammar in ``emotions.toml``, so a classifier learns them almost without a mistake.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import tomllib
import warnings
from collections.abc import Iterator
from importlib import resources
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.prepare import standard_library
from halfstep.trainer.data.labelled.texts import join_words

LEAST, MOST = 20, 400
"""Characters of an answer: shorter docstrings say nothing, longer ones are no short answer."""
EACH = 20
"""Most records of one file, so that no module prevails."""


class Post(NamedTuple):
    """A text, cut into words by blanks, and the name of its emotion."""

    words: str
    label: str

    @property
    def text(self) -> str:
        """The post as people write it."""
        return join_words(self.words)


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


def emotions(count: int, seed: int = 0) -> tuple[tuple[str, ...], list[Post]]:
    """Makes posts with one of six emotions, all different, from a grammar of templates.

    Returns:
        The emotions in the order of their ids, and the posts in random order.

    Raises:
        DataError: If the grammar has fewer posts.
    """
    text = resources.files(__package__).joinpath("emotions.toml").read_text(encoding="utf-8")
    grammar = tomllib.loads(text)
    drawn, shares = random.Random(seed), grammar["shares"]
    names, total = tuple(grammar["phrases"]), sum(shares.values())
    posts = []
    for number, name in enumerate(names):
        every = _posts(grammar, name)
        before = sum(shares[other] for other in names[:number])
        wanted = count * (before + shares[name]) // total - count * before // total
        if wanted > len(every):
            most = len(every) * total // shares[name]
            raise DataError(f"the grammar cannot make {count} posts; ask for at most {most}")
        posts += [Post(words, name) for words in drawn.sample(every, wanted)]
    drawn.shuffle(posts)
    return names, posts


def _posts(grammar: dict[str, Any], name: str) -> list[str]:
    """Lists all posts of one emotion, each once."""
    parts = grammar["openings"], grammar["topics"], grammar["phrases"][name], grammar["endings"]
    every = (" ".join(part for part in one if part) for one in product(*parts))
    return list(dict.fromkeys(every))
