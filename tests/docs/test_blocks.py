"""Every block of code on the pages is tried; blocks.py says how a page asks for what it needs."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from tests.docs.blocks import (
    DOCS,
    FILES,
    LANGUAGES,
    REASONS,
    ROOT,
    SHELLS,
    Block,
    blocks_of,
    is_the_same,
    pages,
    reader,
    unread_comments,
)
from tests.trainer.classifiers import write_bert
from tests.trainer.lm_folders import alpaca, save_base, write

from every import every
from halfstep.cli.commands import command_of, read_words
from halfstep.cli.main import main

PAGES = pages()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
ENGLISH = [path for path in PAGES if not path.name.endswith(".zh.md")]
BLOCKS = [block for path in ENGLISH for block in blocks_of(path)]


def named(blocks):
    return [pytest.param(block, id=block.name) for block in blocks]


def test_there_are_blocks_to_try():
    languages = [block.language for block in BLOCKS]
    assert languages.count("python") > 25
    assert sum(len(block.commands) for block in BLOCKS if block.language in SHELLS) > 20


def test_pages_say_what_their_blocks_are():
    every(PAGES, says_what_its_blocks_are)


def says_what_its_blocks_are(path):
    """A fence without a language would not be tried, nor a comment at the wrong place be read."""
    text = path.read_text(encoding="utf-8")
    assert not unread_comments(text)
    blocks = blocks_of(path)
    assert len(re.findall(r"^ *`{3}", text, re.M)) == 2 * len(blocks), "a fence is not closed"
    for block in blocks:
        assert block.language in LANGUAGES, f"{block.name}: {block.language}"
        assert not block.not_run or block.not_run in REASONS, f"{block.name}: {block.not_run}"
        if block.language == "":
            first = block.code.split()[:1]
            assert first not in (["halfstep"], ["$"], ["import"], ["torchrun"], ["pip"]), (
                f"{block.name}: label this fence sh, console, python, or text for output and forms"
            )


def test_chinese_pages_have_the_same_blocks():
    chinese = [path for path in PAGES if path.name.endswith(".zh.md")]
    every([ROOT / "README.zh.md", *chinese], has_the_same_blocks)


def has_the_same_blocks(path):
    twins = blocks_of(path.with_name(path.name.replace(".zh.md", ".md")))
    blocks = blocks_of(path)
    assert [b.language for b in blocks] == [b.language for b in twins]
    for block, twin in zip(blocks, twins, strict=True):
        if block.language in (*SHELLS, "python"):
            assert is_the_same(block, twin), block.name


PYTHON = [block for block in BLOCKS if block.language == "python"]
QUICK = ("index.md", "own-loop.md", "loss-scaling.md", "grad-scaler.md")
"""Pages whose blocks run in `make test`; those of the others run nightly."""


@pytest.fixture(autouse=True)
def nothing_left_of_accelerate():
    """An Accelerator leaves its choice of precision to the whole process."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in QUICK else pytest.mark.slow)
        for page in dict.fromkeys(block.page for block in PYTHON)
    ],
)
def test_blocks_of_python_run(page, tmp_path, monkeypatch):
    every(
        (block for block in PYTHON if block.page == page), lambda b: run(b, tmp_path, monkeypatch)
    )


def run(block: Block, tmp_path, monkeypatch):
    compile(block.code, block.name, "exec")
    if block.not_run:
        return
    folder = tmp_path / str(block.line)
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = [other for other in blocks_of(DOCS / block.page) if other.line < block.line]
    chain = [block]
    while chain[0].continues:
        chain.insert(0, [other for other in before if other.language == "python"].pop())
        before = [other for other in before if other.line < chain[0].line]
    have = reader("".join(one.setup + one.code for one in chain))
    model = have["model"]
    weights = [p.detach().clone() for p in model.parameters()]
    for one in chain:
        for code, what in ((one.setup, "its setup"), (one.code, "the block")):
            exec(compile(code, f"{one.name}, {what}", "exec"), have)
    if "precision.step(" in block.code and have["model"] is model:
        assert any(
            not torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True)
        ), "the loop has trained nothing"


def test_files_of_toml_can_be_read():
    every((b.code for b in BLOCKS if b.language == "toml"), tomllib.loads)


COMMANDS = [
    pytest.param(block, words, id=f"{block.name}-{number}")
    for block in BLOCKS
    if block.language in SHELLS
    for number, words in enumerate(block.commands)
]


def bare(words):
    """The words that the grammar reads; ... stands for what the page leaves out."""
    return [word for word in words[1:] if word != "..."]


def pip(words):
    for name in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(name.split(",")) <= set(EXTRAS), f"no such extra: {name}"


def make(words):
    targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    assert set(targets) <= TARGETS, f"no such target: {targets}"


def python(words):
    if words[1] == "-m" and words[2] in ("pip", "venv"):
        return pip(words)
    if words[1] == "-m" and words[2] == "halfstep":
        read_words(bare(words[2:]))
    elif words[1] not in ("-c", "-m"):
        assert (ROOT / words[1]).exists() or words[1] in FILES, f"no such file: {words[1]}"
    return None


def torchrun(words):
    if "-m" in words and words[words.index("-m") + 1] == "halfstep":
        read_words(bare(words[words.index("-m") + 1 :]))
    else:
        assert any((ROOT / word).exists() or word in FILES for word in words[1:]), words


def anything(_):
    """A program of others, whose words only it can read."""


OTHERS = {
    "pip": pip, "make": make, "python": python, "python3": python, "torchrun": torchrun,
    "accelerate": anything, "deepspeed": anything, "git": anything, "cd": anything,
    "source": anything, ".": anything, "export": anything, "srun": anything, "cat": anything,
    "head": anything, "tensorboard": anything, "jupytext": anything, "iconv": anything,
}  # fmt: skip


def test_commands_are_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    every((case.values for case in COMMANDS), lambda *case: is_a_command(*case, capsys))


def is_a_command(block, words, capsys):
    if words[0] != "halfstep":
        assert words[0] in OTHERS, f"{block.name}: say in OTHERS how {words[0]} is checked"
        OTHERS[words[0]](words)
        return
    plain = bare(words)
    if "--help" in plain or plain == ["--version"]:
        assert main(plain) == 0
        return
    name, _ = read_words(plain)
    if name == "explain" and "..." not in words and not block.not_run:
        assert main(plain) == 0, capsys.readouterr().err


# ---- the slow tier: commands that train, made short -----------------------------------------

SHORT = {
    "train": ["--max-steps", "2", "--warmup-steps", "0", "--eval-every", "2"],
    "finetune classify": ["--max-steps", "2"],
    "finetune lm": ["--max-steps", "2"],
}
"""What makes a command short: the last of an option that is given twice counts."""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A folder with the reader's files."""
    folder = tmp_path_factory.mktemp("reader")
    # all pages: enough text for the vocabulary of the largest configuration, bpe:8192
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    for name in ("book.txt", "train.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    rows = [(f"a {word} film, number {i}", word) for i in range(30) for word in ("good", "bad")]
    table = "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows)
    for name in ("reviews.csv", "posts.csv", "train.csv", "dev.csv"):
        (folder / name).write_text(table, encoding="utf-8")
    for name in ("train.jsonl", "dev.jsonl"):
        write(folder / name, [{"text": text, "label": label} for text, label in rows])
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text, _ in rows), encoding="utf-8")
    for name in ("notes.jsonl", "instructions.jsonl", "alpaca.jsonl"):
        write(folder / name, alpaca(40))
    for name in ("gpt2", "llama-1b", "gpt2-fp16"):
        save_base(folder / name, "GPT2")
    write_bert(folder / "bert-base-chinese")
    for name in ("trainer.py", "train.py"):
        (folder / name).write_text((ROOT / "examples" / "minimal_loop.py").read_text())
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def make_runs(words, folder: Path) -> None:
    """A short run under every runs/NAME that a command names and does not make itself."""
    for before, word in zip(["", *words], words, strict=False):
        name = re.match(r"(?:/\w+/)?runs/[\w-]+", word)
        if name and before not in ("--output-dir", "--out") and not (folder / name[0]).exists():
            kind = "finetune classify --train reviews.csv --max-steps 2"
            if words[0] != "predict":
                kind = "train --config gpt-tiny --data book.txt " + " ".join(SHORT["train"])
            assert main([*kind.split(), "--output-dir", name[0], "--quiet"]) == 0


LONG = [
    case for case in COMMANDS
    if case.values[1][0] == "halfstep" and not case.values[0].not_run
    and not {"...", "--help", "--version"} & set(case.values[1])
    and command_of(bare(case.values[1])) != "explain"
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("block", "words"), LONG)
def test_a_command_runs_when_made_short(block, words, room, monkeypatch, capsys):
    monkeypatch.chdir(room)
    plain = bare(words)
    make_runs(plain, room)
    short = SHORT.get(command_of(plain), [])
    if "gpt-small-cpu" in plain:
        plain[plain.index("gpt-small-cpu")] = "gpt-tiny"
    capsys.readouterr()
    assert main([*plain, *short]) == 0, capsys.readouterr().err
