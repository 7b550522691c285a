"""Options follow from dataclasses: their spellings, values, help and suggestions."""

import pytest

from halfstep.cli.commands import COMMANDS, leaves, option_name, read_words, short_options
from halfstep.cli.main import main
from halfstep.errors import ConfigError
from halfstep.trainer.config.tasks import TASKS

RUNS = [kind.COMMAND for kind in TASKS.values() if kind.COMMAND]


def given(*words):
    return read_words(words)[1].given


@pytest.mark.parametrize("command", RUNS)
def test_every_key_is_an_option_by_all_its_names(command):
    kind = COMMANDS[command]
    shorts = short_options(kind)
    for option in leaves(kind):
        assert option.field.metadata["help"], option.key
        name = option_name(option.key)
        for spelled in (name, name.replace("-", "_").replace("__", "--", 1)):
            value = given(*command.split(), f"{spelled}=3")[option.key]
            assert value in ("3", ["3"])
    for short, key in shorts.items():
        assert given(*command.split(), f"--{short}", "3")[key] in ("3", ["3"])
    assert shorts["max-steps"] == "run.max_steps"
    assert shorts["learning-rate"] == "optimizer.learning_rate"
    assert shorts["train"] == "data.train"


def test_a_short_spelling_means_the_first_section_that_has_it():
    assert given("train", "--block-size", "8", "--data", "a", "b", "--val-data", "c") == {
        "run.block_size": "8", "data.train": ["a", "b"], "data.validation": ["c"],
    }  # fmt: skip
    assert given("finetune", "lm", "--model", "gpt2")["model.source"] == "gpt2"


def test_a_flag_stands_alone_or_has_a_word():
    assert given("train", "--compile", "--model.activation_checkpointing", "false",
                 "--optimizer", "sgd") == {"run.compile": "yes", "optimizer.name": "sgd",
                                           "model.activation_checkpointing": "false"}  # fmt: skip


def test_only_what_is_given_is_known():
    name, request = read_words(["train", "--quiet", "--seed", "1337"])  # 1337 is the default
    assert (name, request.given, request.start.quiet) == ("train", {"run.seed": "1337"}, True)
    assert request.start.nproc == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generat"], "unknown COMMAND 'generat', did you mean 'generate'?"),
        (["finetune", "classfy"], "did you mean 'finetune classify'?; allowed: "),
        (["generate", "--run", "r", "--promt", "x"], "unknown option --promt, did you mean"),
        (["generate", "--run", "r", "--seed", "x"], "--seed: 'x'; allowed: an integer"),
        (["generate"], "--run is missing"),
        (["export", "--run", "r", "--output", "o"], "--to is missing"),
        (["export", "--run", "r", "--output", "o", "--to", "gguf"], "--to: 'gguf'; allowed: hf"),
        (["train", "--seed"], "expected one argument; see halfstep train --help"),
        (["train", "book.txt"], "unrecognized arguments: book.txt; see halfstep train --help"),
        (["train", "--leraning-rate", "1"], "did you mean '--learning-rate'?"),
        (["finetune", "lm", "--epoch", "1"], "did you mean '--epochs'?"),
        (["--verison"], "did you mean '--version'?"),
        (["--max-steps", "3"], "unknown COMMAND '--max-steps 3'"),
    ],
)
def test_a_mistake_says_what_is_meant(words, message):
    with pytest.raises(ConfigError) as error:
        read_words(words)
    assert message in str(error.value)


def test_help_shows_defaults_and_both_spellings(capsys):
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "--max-steps N, --run.max-steps N Optimizer steps, skipped ones included. Default: 1500."
        in text
    )
    assert "exit codes: 0 done" in text


def test_a_missing_package_is_answered_with_the_line_that_installs_it(monkeypatch, capsys):
    def missing(arguments):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr("halfstep.cli.small.run", missing)
    assert main(["doctor"]) == 2
    assert "pip install 'halfstep[train,hf]'" in capsys.readouterr().err
