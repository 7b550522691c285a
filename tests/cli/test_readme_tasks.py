"""A newcomer's thirteen tasks, done with the commands of the README and nothing else.

They stand in one block below ``<!-- tasks -->``: each begins with a comment of its name, which may
also say ``after TASK`` and the ``exit code`` of the first command. A task with a block of its own
has ``<!-- task: NAME -->`` above it. Commands are taken from the page.
"""

from __future__ import annotations

import csv
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.trainer.lm_folders import alpaca, save_base, write

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"<!-- task: ([^>]*?) -->\n```sh\n(.*?)```", re.DOTALL)
MANY = re.compile(r"<!-- tasks -->\n```sh\n(.*?)```", re.DOTALL)

# Products of what ``auto`` takes, by README's table of devices: 16 bits on a GPU, which has fp16 at
# least, and on a CPU with bf16 instructions; fp32 on another CPU.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
CPU = Path("/proc/cpuinfo")
if torch.accelerator.is_available():
    AUTO, PRODUCTS = "(bf16|fp16)-mixed", "(bf16|fp16)"
elif CPU.exists() and BF16_FLAGS & set(CPU.read_text(encoding="utf-8").split()):
    AUTO, PRODUCTS = "bf16-mixed", "bf16"
else:
    AUTO, PRODUCTS = "fp32", "fp32"

# What a newcomer must then have read or got: patterns in the output, and files.
OUTCOMES = {
    "install": ([rf"take {AUTO}: "], [".venv/bin/halfstep"]),
    "own loop": ([r"step  80  loss 0\.\d+ .* applied"], []),
    "train": ([r"step 20; validation loss", r"numerics: ok: 0 of 20 steps skipped"], ["runs/book"]),
    "generate": ([r"\w+ \w+"], []),
    "classify": (
        ["accuracy", r"best at"],
        ["labels.jsonl", "runs/reviews/report.txt"],
    ),
    "lora": ([r"lm-lora .*: [\d,]+ of [\d,]+", "perplexity"], ["runs/lora/model"]),
    "nan": (
        [r"first cause: .* of layers\.", "to do: ", r"try: .* --learning-rate 0\.\d\n"],
        ["runs/nan/report.html"],
    ),
    "policy": ([rf"take {AUTO}: ", "source: ", "remainder"], []),
    "memory": ([r"policy .* activations"], []),
    "trace": ([rf"layers\.0\.attn\.qkv +Linear +forward +addmm +3 {PRODUCTS}"], []),
    "xray": (["nothing found"], []),
    "compare": ([r"step 20; .*", "Written: compared.html"], ["compared.html"]),
    "curves": (["Written: runs/book/report.html"], ["runs/book/report.html"]),
    "mac": (["20 steps applied"], ["runs/mac"]),
}  # fmt: skip


class Task(NamedTuple):
    lines: list[str]
    after: str
    exit: int


def tasks_of(page: str) -> dict[str, Task]:
    found = {name: Task(lines_of(block), "", 0) for name, block in MARKED.findall(page)}
    (many,) = MANY.findall(page)
    for title, block in re.findall(r"^# (.*)\n((?:[^#\n].*\n)+)", many, re.MULTILINE):
        name = re.split(r"[:,\uff1a]", title)[0]
        assert name not in found, f"{name} is there twice"
        (after,) = re.findall(r"after (\w+)", title) or [""]
        (code,) = re.findall(r"exit code (\d)", title) or ["0"]
        found[name] = Task(lines_of(block), after, int(code))
    return found


def lines_of(block: str) -> list[str]:
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


TASKS = tasks_of((ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_task_is_on_the_page():
    assert set(TASKS) == set(OUTCOMES)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The user's own files, under the names that the page gives them."""
    folder = tmp_path_factory.mktemp("newcomer")
    pages = sorted((ROOT / "docs").glob("*.md"))
    book = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    (folder / "book.txt").write_text(book, encoding="utf-8")
    with (folder / "reviews.csv").open("w", encoding="utf-8", newline="") as file:
        rows = [(f"{word} 第 {i} 次", label) for i in range(20) for word, label in
                (("good film", "joy"), ("bad film", "anger"), ("a film", "none"))]  # fmt: skip
        csv.writer(file).writerows([("文本", "标签"), *rows])
    write(folder / "notes.jsonl", alpaca(40))
    save_base(folder / "gpt2", "GPT2")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def check(name: str, task: Task, codes: list[int], output: str, room: Path) -> None:
    assert codes == [task.exit, *[0] * (len(task.lines) - 1)], output[-3000:]
    patterns, made = OUTCOMES[name]
    for pattern in patterns:
        assert re.search(pattern, output), f"{name}: no {pattern!r} in\n{output[-5000:]}"
    for path in made:
        assert (room / path).exists(), f"{name}: {path} was not made"


class Newcomer:
    """Does tasks in this process, each once, whatever comes before it first."""

    def __init__(self, room: Path) -> None:
        self.room, self.done = room, set()

    def do(self, name, halfstep, capsys):
        task = TASKS[name]
        if task.after and task.after not in self.done:
            self.do(task.after, halfstep, capsys)
        if name in self.done:
            return
        check(name, task, *self.commands(task.lines, halfstep, capsys), self.room)
        self.done.add(name)

    def commands(self, lines, halfstep, capsys):
        codes, output = [], ""
        for line in lines:
            program, *words = shlex.split(line, comments=True)
            if program == "python":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sys, "argv", words)
                    capsys.readouterr()
                    runpy.run_path(words[0], run_name="__main__")
                codes.append(0)
                output += capsys.readouterr().out
            else:
                assert program == "halfstep", line
                code, out, err = halfstep(*words)
                codes.append(code)
                output += out + err
        return codes, output


@pytest.fixture(scope="module")
def newcomer(files):
    return Newcomer(files)


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("install", "compare")])
def test_the_commands_of_the_page_do_the_task(name, newcomer, halfstep, capsys, monkeypatch):
    monkeypatch.chdir(newcomer.room)
    newcomer.do(name, halfstep, capsys)
