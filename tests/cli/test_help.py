"""Help in English and in Chinese: nothing lacks, nothing is left over, and lines break well."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest

from halfstep.cli.commands import COMMANDS, Start
from halfstep.cli.grammar import choices_of, leaves, option_name, parser_of, split_language
from halfstep.cli.help import DOC, chinese, docstrings, english, wrapped
from halfstep.cli.main import main
from halfstep.errors import ConfigError
from halfstep.shown import columns
from halfstep.trainer.config.read import sections
from halfstep.trainer.config.run import BaseConfig
from halfstep.words import speaking

CJK = re.compile(r"[\u4e00-\u9fff]")


def described(cls, found=None):
    """Every dataclass whose fields are options, with those that it inherits and its sections."""
    found = {} if found is None else found
    for base in [base for base in cls.__mro__ if is_dataclass(base)]:
        found.setdefault(base.__name__, base)
    hints = get_type_hints(cls)
    for field in fields(cls):
        for kind in sections(hints[field.name]):
            described(kind, found)
    return found


CLASSES = {
    name: cls
    for kind in (Start, *COMMANDS.values())
    for name, cls in described(kind).items()
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_has_its_chinese(name):
    cls = CLASSES[name]
    hints = get_type_hints(cls)
    own = {
        f.name for f in fields(cls)
        if f.name in cls.__annotations__ and not sections(hints[f.name])
    }  # fmt: skip
    wanted = own | ({DOC} if cls in COMMANDS.values() else set())
    table = chinese().get(name, {})
    assert set(table) == wanted
    for key, text in table.items():
        assert CJK.search(text), f"{name}.{key}: {text}"
        named = re.findall(r"--[a-z-]+", english(cls)[key])
        assert set(named) <= set(re.findall(r"--[a-z-]+", text)), f"{name}.{key} lacks an option"


def test_no_chinese_is_left_of_what_is_gone():
    assert set(chinese()) <= set(CLASSES)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_in_chinese_has_no_english_sentence(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help", "--lang", "zh"]) == 0
    text = capsys.readouterr().out
    # A sentence of English: five words in a row, without a comma, as no list of names has.
    assert not re.findall(r"(?:[a-z]+ ){4,}[a-z]+", text, re.IGNORECASE)
    with speaking("zh"):
        kind = COMMANDS[name]
        first = Start if issubclass(kind, BaseConfig) else kind
        options = [*leaves(first), *(leaves(kind) if first is Start else ())]
        assert CJK.search(docstrings(kind)[DOC])
        for option in options:
            assert CJK.search(option.text)
            spelled = (option_name(option.key), option.key.upper(), *choices_of(option.hint))
            assert any(word in text for word in spelled)
    for action in parser_of(name, "zh")._actions:
        assert CJK.search(action.help)


def test_every_command_is_listed_in_either_language(capsys):
    for language, said in (("en", "usage: halfstep"), ("zh", "用法")):
        assert main(["--lang", language, "--help"]) == 0
        text = capsys.readouterr().out
        assert said in text
        rows = [line for line in text.splitlines() if re.match(r"  [a-z]", line)]
        assert len(rows) == len(COMMANDS)
        assert all(bool(CJK.search(row)) == (language == "zh") for row in rows)


@pytest.mark.parametrize("locale", ["zh_CN.UTF-8", "C", "C.UTF-8", "de_DE.UTF-8"])
def test_the_locale_chooses_and_lang_goes_before_it(locale, capsys, monkeypatch):
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.delenv("LANGUAGE", raising=False)
    for words, chinese_said in (
        (["export", "--help"], locale.startswith("zh")),
        (["--lang", "zh", "export", "--help"], True),
        (["export", "--lang=en", "--help"], False),
        (["export", "--help", "--lang", "en"], False),
    ):
        assert main(words) == 0
        assert bool(CJK.search(capsys.readouterr().out)) == chinese_said, words


def test_errors_are_framed_in_the_language(capsys):
    for words, said in (
        (
            ["generat", "--lang", "zh"],
            "halfstep：错误：没有命令 'generat'，是不是要写 'generate'？",
        ),
        (["--lang", "zh", "train", "--max-step", "1"], "没有选项 --max-step，是不是要写"),
        (["--lang", "zh", "train", "--seed"], "需要一个参数；见 halfstep train --help"),
        (["--lang", "zh", "replay"], "缺少必需的参数：CAPTURE: 带 run.capture"),
        (["--lang", "zh"], "缺少命令"),
        (["generat"], "halfstep: error: unknown command 'generat', did you mean 'generate'?"),
        (["generat", "--lang", "fr"], "--lang fr; allowed: en, zh"),
        (["train", "--lang"], "--lang: expected one argument; allowed: en, zh"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err, words


def test_the_language_is_taken_out_of_a_command_line_and_not_of_another_programs():
    assert split_language(["train", "--lang", "zh", "--seed", "1"]) == (
        ["train", "--seed", "1"], "zh",
    )  # fmt: skip
    words = ["train", "--", "--lang"]
    assert split_language(words) == (words, "")
    with pytest.raises(ConfigError, match="--lang"):
        split_language(["--lang="])


def test_chinese_help_does_not_import_torch_either():
    program = (
        "import sys; from halfstep.cli.main import main\n"
        "assert main(['train', '--help', '--lang', 'zh']) == 0\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_of_help_keep_to_the_terminal(language, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for name in COMMANDS:
        assert main([*name.split(), "--help", "--lang", language]) == 0
        for line in capsys.readouterr().out.splitlines():
            # The spellings of one option stand on one line, and the usage of argparse is its own.
            if not line.lstrip().startswith(("-", "[", "用法", "usage")):
                assert columns(line) <= width, line


def test_text_is_broken_between_words_and_wide_characters():
    assert wrapped("a bb ccc dddd", 6) == ["a bb", "ccc", "dddd"]
    assert wrapped("混合精度训练", 8) == ["混合精度", "训练"]
    assert wrapped("混合精度，训练", 8) == ["混合精", "度，训练"]  # no line begins with a comma
    assert wrapped("看（训练）", 4) == ["看", "（训", "练）"]  # and none ends with a bracket
    assert wrapped("用 bf16-mixed 训练", 12) == ["用", "bf16-mixed", "训练"]  # no word is broken
    assert wrapped("用bf16训练", 6) == ["用bf16", "训练"]
    assert (columns("fp16"), columns("精度"), columns("fp16 精度")) == (4, 4, 9)


@pytest.mark.parametrize("width", range(10, 60, 7))
def test_breaking_loses_nothing(width):
    for table in chinese().values():
        for text in table.values():
            words = text.split()
            lines = wrapped(text, width)
            assert "".join("".join(lines).split()) == "".join(words)
            for line in lines:
                assert columns(line) <= max(width, max(map(columns, line.split())))
