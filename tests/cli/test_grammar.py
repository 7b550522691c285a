"""Options follow from dataclasses: their spellings, values, help, suggestions and completion."""

import dataclasses
import re

import pytest

from halfstep.cli.commands import ANSWERS, COMMANDS, OTHER_NAMES, Start
from halfstep.cli.completion import SCRIPTS, following
from halfstep.cli.grammar import leaves, option_name, read_words, short_options
from halfstep.cli.main import extra_with, main
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
        assert option.text, f"{option.key} has no docstring"
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
    assert given("train", "--compile", "--run.background_save", "false", "--optimizer.eps",
                 "-1e-8") == {"run.compile": "true", "run.background_save": "false",
                              "optimizer.eps": "-1e-8"}  # fmt: skip


def test_only_what_is_given_is_known():
    name, request = read_words(["train", "--quiet", "--seed", "1337"])  # 1337 is the default
    assert (name, request.given, request.start.quiet) == ("train", {"run.seed": "1337"}, True)
    assert request.start.nproc is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generat"], "unknown command 'generat', did you mean 'generate'?"),
        (["finetune", "classfy"], "did you mean 'classify'?; allowed: classify, lm"),
        (["generate", "--run", "r", "--promt", "x"], "unknown option --promt, did you mean"),
        (["generate", "--run", "r", "--top-k", "x"], "--top-k: 'x'; allowed: an integer"),
        (["generate", "--run", "r", "--model", "m"], "give one of --run and --model"),
        (["generate"], "give one of --run and --model"),
        (["export", "--run", "r", "--output", "o"], "--to is missing"),
        (["export", "--run", "r", "--output", "o", "--to", "gguf"], "--to: 'gguf'; allowed: hf"),
        (["train", "--seed"], "expected one argument; see halfstep train --help"),
        (["configs", "show"], "the following arguments are required: NAME: A shipped"),
        (["replay"], "the following arguments are required: CAPTURE: A folder in captures/"),
        (["train", "book.txt"], "files of text are given by --data book.txt"),
        (["train", "--lr", "1"], "unknown option --lr, did you mean '--learning-rate'?"),
        (["train", "--epochs", "1"], "unknown option --epochs, did you mean '--max-steps'?"),
        (["finetune", "lm", "--num_train_epochs", "1"], "did you mean '--epochs'?"),
        (["--verison"], "did you mean '--version'?"),
        (["-v"], "did you mean '--version'?"),
        (["--max-steps", "3"], "the COMMAND comes first, as in halfstep train --max-steps"),
    ],
)
def test_a_mistake_says_what_is_meant(words, message):
    with pytest.raises(ConfigError) as error:
        read_words(words)
    assert message in str(error.value)


# Each word that people try, and slips of it: a command, or named with what answers it.
WORDS = {
    "inspect": ("insepct", "halfstep trace RUN"),
    "trace": ("trcae", "did you mean 'trace'?"),
    "report": ("reprot", "did you mean 'report'?"),
    "estimate": ("estmate", "did you mean 'estimate'?"),
    "doctor": ("docter", "did you mean 'doctor'?"),
    "compare": ("comapre", "halfstep report A B"),
    "bench": ("benchmark", "did you mean 'bench'?"),
    "replay": ("repaly", "did you mean 'replay'?"),
    "diagnose": ("diagnoze", "halfstep report RUN"),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_people_try_is_a_command_or_leads_to_one(word):
    slip, said = WORDS[word]
    for tried in (slip, word.upper(), *([word] if word not in COMMANDS else [])):
        with pytest.raises(ConfigError) as error:
            read_words([tried])
        assert said in str(error.value), tried


def test_what_stands_for_another_name_exists():
    options = {name for kind in RUNS for name in short_options(COMMANDS[kind])}
    options |= {field.name for field in dataclasses.fields(Start)}
    for other, option in OTHER_NAMES.items():
        assert option[2:] in options, other
    for word, answer in ANSWERS.items():
        assert word not in COMMANDS
        for named in re.findall(r"(?:^|halfstep )([a-z]+)", answer):
            assert named in {name.split()[0] for name in COMMANDS}, answer


def test_help_shows_docstrings_and_both_spellings(capsys):
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-steps N, --run.max-steps N Optimizer steps, skipped ones included." in text
    assert "--report-to none|csv|mlflow|tensorboard|wandb" in text
    assert "exit codes: 0 done" in text


def test_every_command_is_a_dataclass_with_a_docstring():
    for name, kind in COMMANDS.items():
        assert dataclasses.is_dataclass(kind), name
        assert not (kind.__doc__ or "").startswith(f"{kind.__name__}("), f"{name} has no docstring"
        assert all(option.text for option in leaves(kind)), name


def test_completion_gives_what_may_follow(capsys):
    assert {"train", "finetune", "configs", "completion"} <= set(following([]))
    assert following(["configs"]) == ["ls", "show", "cp"]
    assert {"--max-steps", "--run.max-steps", "--nproc"} <= set(following(["train"]))
    assert following(["finetune", "lm", "--format"]) == [
        "auto", "alpaca", "chat", "text", "prompt-completion",
    ]  # fmt: skip
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == f"{script}\n"
    assert main(["completion", "words", "--", "train", "--report-to"]) == 0
    assert capsys.readouterr().out == "none\ncsv\nmlflow\ntensorboard\nwandb\n"


def test_a_missing_package_is_answered_with_the_line_that_installs_it(monkeypatch, capsys):
    assert extra_with("transformers") == "hf"
    assert extra_with("transformers.models") == "hf"
    assert extra_with("no_such_package") == ""

    def missing(arguments):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr("halfstep.cli.doctor.run", missing)
    assert main(["doctor"]) == 2
    assert "pip install 'halfstep[hf]'" in capsys.readouterr().err
