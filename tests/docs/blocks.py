"""The blocks of code on the pages of docs/, and how a page says what trying them needs.

A fence is labelled by what is in it: ``python``; ``sh`` for commands; ``console`` for commands
after ``$ `` with what they print; ``text`` for output, formulas and forms with ``[...]``.

**Python** blocks run one by one, each in an empty folder and by itself, with the names that a
reader has: ``reader`` below makes them (``model``, ``optimizer``, ``batches``, ``loss_fn``, ...;
``precision`` too, where the block uses it and does not make it). A comment directly above the fence
changes that; the site does not show it:

    <!-- continues -->                      with the names of the page's Python block before it
    <!-- setup                              with names that this code makes, run before the block
    batch = torch.ones(2, 4)
    -->
    <!-- not run: needs a GPU -->           only compiled; the reasons allowed are REASONS below

Several comments may stand above one fence. A block that contains ``precision.step(`` must change
the model's weights, so that a loop that trains nothing is noticed.

**Commands**: each ``halfstep ...`` is read by the command line's own grammar; those that only print
(``explain``) are run too, and the others are run short in the slow tier, in a folder that has the
files of ``FILES`` and, under every ``runs/NAME`` that they name, a short run. ``...`` in a command
stands for what the page leaves out: it is read and not run. Of other programs, ``pip``, ``make``,
``python FILE`` and ``torchrun`` are checked: there must be such an extra, target or file.

The same block on the Chinese page may differ in comments only; it is compared, and not run again.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import halfstep

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

REASONS = {
    "needs a GPU", "needs several GPUs", "needs several machines", "needs several ranks",
    "needs the network", "needs a Mac", "needs DeepSpeed", "needs a captured spike",
    "needs two records",
}  # fmt: skip
"""Why a block may not run: what a machine for tests does not have."""

FILES = (
    "book.txt", "train.txt", "reviews.csv", "posts.csv", "train.csv", "dev.csv", "train.jsonl",
    "dev.jsonl", "texts.txt", "notes.jsonl", "instructions.jsonl", "alpaca.jsonl",
    "trainer.py", "train.py",
)  # fmt: skip
"""The reader's own files, by the names that the pages use."""

SHELLS = ("sh", "bash", "console")
LANGUAGES = {*SHELLS, "python", "toml", "yaml", "json", "csv", "diff", "text", "html", ""}
_FENCE = re.compile(
    r"(?P<above>(?:^ *<!--(?:(?!-->).)*-->\n+)*)"
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)(?P=ticks) *$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fence with the comments above it."""

    page: str
    line: int
    language: str
    code: str
    setup: str
    not_run: str
    continues: bool

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, comments and pipes left out; without the output of console."""
        return commands_of(self.code, console=self.language == "console")


def pages(folder: Path = DOCS) -> list[Path]:
    """The pages of the site, in both languages."""
    left_out = (folder / "plan.md", folder / "decisions")
    return [
        path for path in sorted(folder.rglob("*.md"))
        if not any(path.is_relative_to(other) for other in left_out)
    ]  # fmt: skip


def blocks_of(path: Path) -> list[Block]:
    """Every fence of a page, in order."""
    text = path.read_text(encoding="utf-8")
    page = str(path.relative_to(DOCS) if path.is_relative_to(DOCS) else path.name)
    found = []
    for match in _FENCE.finditer(text):
        lines = match["code"].splitlines()
        code = "\n".join(line.removeprefix(match["indent"]) for line in lines)
        setup, reason, continues = "", "", False
        for comment in re.findall(r"<!--(.*?)-->", match["above"], re.DOTALL):
            said = comment.strip()
            if said.startswith("setup\n"):
                setup += said.removeprefix("setup\n") + "\n"
            elif said.startswith("not run:"):
                reason = said.removeprefix("not run:").strip()
            elif said == "continues":
                continues = True
        line = text.count("\n", 0, match.start("ticks")) + 1
        found.append(Block(page, line, match["language"], code, setup, reason, continues))
    return found


def unread_comments(text: str) -> list[str]:
    """Comments that are meant for this file, and stand where it does not read them."""
    read = "".join(match["above"] for match in _FENCE.finditer(text))
    meant = [
        comment for comment in re.findall(r"<!--.*?-->", text, re.DOTALL)
        if re.match(r"<!--\s*(setup|not run|continues)\b", comment)
    ]  # fmt: skip
    return [comment for comment in meant if comment not in read]


def commands_of(code: str, *, console: bool = False) -> list[list[str]]:
    """The simple commands of a shell's text; of a console, the lines after ``$`` alone."""
    joined = code.replace("\\\n", " ").splitlines()
    if console:
        joined = [line[2:] for line in joined if line.startswith("$ ")]
    found = []
    for line in joined:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                if words:
                    found.append(words)
                words = []
            else:
                words.append(word)
    return [_without_redirections(words) for words in found]


def _without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if set(word) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        elif kept or not re.fullmatch(r"\w+=\S*", word):  # CUDA_VISIBLE_DEVICES=0 halfstep ...
            kept.append(word)
    return kept


def without_comments(block: Block) -> object:
    """What a block does, to be compared with its twin in another language."""
    if block.language == "python":
        return ast.dump(ast.parse(block.code))
    if block.language in ("sh", "bash"):
        return block.commands
    return [line.partition("  #")[0].rstrip() for line in block.code.splitlines()]


def is_the_same(block: Block, twin: Block) -> bool:
    """Whether a block of the Chinese page does what the English one does."""
    return without_comments(block) == without_comments(twin)


def reader(code: str) -> dict[str, Any]:
    """Model, data and the like of a reader, who has them under the names that the pages use."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    x, y = torch.randn(6, 4, requires_grad=True), torch.randint(3, (6,))
    data = torch.utils.data.TensorDataset(x.detach(), y)
    have: dict[str, Any] = {
        "halfstep": halfstep, "torch": torch, "nn": torch.nn, "AdamW": halfstep.optim.AdamW,
        "model": model, "x": x, "y": y, "inputs": x.detach(), "targets": y,
        "batches": [(x.detach(), y)] * 3, "loader": torch.utils.data.DataLoader(data, 2),
        "criterion": functional.cross_entropy, "loss_fn": functional.cross_entropy,
        "train_data": data, "val_data": data,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    if re.search(r"\bprecision\b(?!=)", code) and not re.search(r"\bprecision =", code):
        precision = halfstep.Precision("bf16-mixed", model, have["optimizer"])
        have["precision"] = precision
        if "first" in code:
            with precision.autocast():
                loss = functional.cross_entropy(model(x), y)
            have |= {"first": loss, "second": loss * 2}
    return have
