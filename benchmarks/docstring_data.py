"""A classification task that every Python carries: which package a docstring comes from.

Docstrings of modules, classes and functions of the largest packages of the standard library. Names
of the packages and of their modules are masked in all texts, equal texts are kept once, and a file
is either in train or in dev.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfstep.trainer.data.corpus import standard_library

PACKAGES, LEAST_FILES, LEAST_CHARACTERS, DEV_SHARE = 10, 4, 20, 0.2
MASK = "thing"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Labelled:
    """A text, its class, and the file that it comes from."""

    text: str
    label: str
    file: str


def docstrings() -> list[Labelled]:
    """All of the largest packages, in an order that depends on nothing but the files."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {s.path: s.path.relative_to(root).as_posix() for s in standard_library()}
    nested = {path: name for path, name in names.items() if "/" in name}
    files = {name: _of_file(path) for path, name in sorted(nested.items(), key=lambda f: f[1])}
    size, many = Counter(), Counter()
    for name, texts in files.items():
        size[_package(name)] += len(texts)
        many[_package(name)] += bool(texts)
    chosen = {p for p, _ in size.most_common() if many[p] >= LEAST_FILES}
    chosen = set(sorted(chosen, key=lambda p: (-size[p], p))[:PACKAGES])
    mask = _mask(chosen, (name for name in files if _package(name) in chosen))
    found: dict[str, Labelled] = {}
    twice = set()
    for name, texts in files.items():
        if _package(name) not in chosen:
            continue
        for text in texts:
            masked = mask.sub(MASK, text)
            first = found.setdefault(masked, Labelled(masked, _package(name), name))
            if first.label != _package(name):
                twice.add(masked)  # nobody could tell
    return [one for text, one in found.items() if text not in twice]


def split(examples: Sequence[Labelled]) -> tuple[list[Labelled], list[Labelled]]:
    """Train and dev; of each package whole files, drawn by their hash, are dev up to a fifth."""
    dev_files = set()
    by_package: dict[str, Counter] = {}
    for one in examples:
        by_package.setdefault(one.label, Counter())[one.file] += 1
    for counts in by_package.values():
        room = DEV_SHARE * counts.total()
        for file in sorted(counts, key=_rank):
            if counts[file] <= room:
                dev_files.add(file)
                room -= counts[file]
    train = sorted((x for x in examples if x.file not in dev_files), key=lambda x: _rank(x.text))
    return train, [x for x in examples if x.file in dev_files]


def write(folder: Path) -> tuple[Path, Path, dict]:
    """Write train.jsonl and dev.jsonl; also what there is to tell of them."""
    parts = dict(zip(("train", "dev"), split(docstrings()), strict=True))
    for name, examples in parts.items():
        write_jsonl(folder / f"{name}.jsonl", ((x.text, x.label) for x in examples))
    counts = {name: dict(Counter(x.label for x in part)) for name, part in parts.items()}
    about = {
        "task": "standard-library package of a docstring",
        "examples": {name: len(part) for name, part in parts.items()},
        "files": {name: len({x.file for x in part}) for name, part in parts.items()},
        "classes": counts,
        "largest_class_of_dev": max(counts["dev"].values()) / len(parts["dev"]),
    }
    return folder / "train.jsonl", folder / "dev.jsonl", about


def write_jsonl(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    lines = [json.dumps({"text": t, "label": x}, ensure_ascii=False) + "\n" for t, x in rows]
    path.write_text("".join(lines), encoding="utf-8")


def _of_file(path: Path) -> list[str]:
    """Docstrings of a file, blanks made single."""
    tree = ast.parse(path.read_bytes())
    texts = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, DOCUMENTED)]
    return [" ".join(text.split()) for text in texts if len(text) >= LEAST_CHARACTERS]


def _package(name: str) -> str:
    return name.partition("/")[0]


def _mask(packages: Iterable[str], files: Iterable[str]) -> re.Pattern:
    """Any word with a package's name in it, and the modules' names as words of their own."""
    modules = {part for name in files for part in name.removesuffix(".py").split("/")[1:]}
    words = {name for name in modules if len(name) > 1 and not name.startswith("__")}
    inside = "|".join(map(re.escape, sorted(packages)))
    whole = "|".join(map(re.escape, sorted(words)))
    return re.compile(rf"\w*(?:{inside})\w*|\b(?:{whole})\b", re.IGNORECASE)


def _rank(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
