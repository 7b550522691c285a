"""The command: what its words mean, what it prints and writes; measurements are made up."""

import json
import sys

import pytest
import torch
from halfstep.cli.completion import following

from halfstep.cli import bench as command
from halfstep.cli.bench import split_policies
from halfstep.cli.grammar import read_words
from halfstep.errors import ConfigError
from trainer.bench.test_report import report, row


@pytest.fixture
def asked(monkeypatch):
    """Replaces the measurement; holds what it was asked for."""
    seen = {}

    def made_up(config, policies, **options):
        seen.update(options, config=config, policies=[str(policy) for policy in policies])
        options["say"]("a line of progress")
        refused = row("tf32", why_not="a CPU has no tf32")
        return report(row("fp32", 2.0), row("bf16-mixed", 1.0, peak=5e8), refused)

    monkeypatch.setattr(command, "bench", made_up)
    return seen


def test_a_table_a_recommendation_and_files(halfstep, asked, tmp_path):
    done = halfstep("bench", "--out", tmp_path, "--steps", 3, "--seconds", 7, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "bf16-mixed            100" not in done.stdout
    lines = done.stdout.splitlines()
    line = next(line for line in lines if line.startswith("bf16-mixed"))
    assert line.split()[:6] == ["bf16-mixed", "99", "98", "-", "100", "2.00"]
    assert "tf32: a CPU has no tf32" in lines
    assert any(line.startswith("Take bf16-mixed: 2.00 times") for line in lines)
    assert "a line of progress" in done.stderr
    assert json.loads((tmp_path / "bench.json").read_text())["recommended"] == "bf16-mixed"
    assert (tmp_path / "bench.png").exists()
    assert (asked["steps"], asked["seconds"], asked["config"].run.threads) == (3, 7.0, 1)
    assert asked["policies"] == [
        "fp32", "bf16-mixed", "fp16-mixed", "bf16-split", "bf16-split,moments=8bit",
    ]  # fmt: skip


def test_json_alone_on_stdout(halfstep, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = halfstep("bench", "--json", "--quiet", "--precision", "fp32")
    assert json.loads(done.stdout)["recommended"] == "bf16-mixed"
    assert done.stderr == ""
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("bench-")


def test_without_matplotlib_a_note_says_what_to_install(halfstep, asked, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = halfstep("bench", "--out", tmp_path)
    assert done.returncode == 0
    assert "pip install 'halfstep[plot]'" in done.stderr
    assert "bench.png" not in done.stdout


def test_nothing_that_could_be_measured_is_an_error_with_the_reasons(halfstep, monkeypatch):
    refused = report(row("tf32", why_not="a CPU has no tf32"))
    monkeypatch.setattr(command, "bench", lambda *_, **__: refused)
    done = halfstep("bench", "--precision", "tf32")
    assert done.returncode == 2
    assert "no policy could be measured: a CPU has no tf32" in done.stderr


@pytest.mark.parametrize(
    ("words", "policies"),
    [
        (["fp32,bf16-mixed"], ["fp32", "bf16-mixed"]),
        (["fp32", "bf16-mixed"], ["fp32", "bf16-mixed"]),
        (["bf16-split,moments=8bit,fp32"], ["bf16-split,moments=8bit", "fp32"]),
        (["params=fp16,master=fp32", "fp32,"], ["params=fp16,master=fp32", "fp32"]),
        (["fp32", "params=fp16"], ["fp32", "params=fp16"]),
    ],
)
def test_policies_are_separated_by_commas_and_spaces(words, policies):
    assert split_policies(words) == policies


def test_no_policy_is_refused():
    with pytest.raises(ConfigError, match="--precision names no policy"):
        split_policies([","])


@pytest.mark.parametrize(
    ("words", "task", "key", "value"),
    [
        ([], "pretrain", "model.n_embd", 384),
        (["--config", "gpt-tiny", "--batch-size", "3"], "pretrain", "run.batch_size", 3),
        (["--data", "a.txt", "--block-size", "64"], "pretrain", "run.block_size", 64),
        (["--model", "./folder", "--max-length", "99"], "lm", "data.max_length", 99),
        (["--model", "./folder", "--lora-r", "0"], "lm", "optimizer.learning_rate", 2e-5),
        (["--model", "scratch:tiny", "--max-length", "99"], "classify", "model.max_length", 99),
        (["--config", "classify-scratch", "--train", "a.csv"], "classify", "data.train",
         ("a.csv",)),
        (["--config", "lm-lora", "--model", "m"], "lm", "model.source", "m"),
    ],
)  # fmt: skip
def test_the_words_name_the_task(halfstep, asked, tmp_path, words, task, key, value):
    done = halfstep("bench", "--out", tmp_path, *words)
    assert done.returncode == 0, done.stderr
    config = asked["config"]
    assert task == config.TASK
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save-every", "3"], "unknown option --save-every"),
        (["--steps", "-1"], "--steps -1; allowed: integers >= 0"),
        (["--seconds", "0"], "--seconds 0; allowed: > 0"),
        (["--precision", "bf61"], "unknown precision policy 'bf61'"),
        (["--model", "m", "--n-layer", "3"], "unknown key model.n_layer"),
        (["--config", "nothing"], "unknown configuration 'nothing'"),
    ],
)
def test_a_mistake_says_what_is_meant(halfstep, asked, words, message):
    done = halfstep("bench", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_file_may_not_ask_for_code_of_the_model(halfstep, asked, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('task = "lm"\n[model]\nsource = "m"\ntrust_remote_code = true\n')
    assert "only --trust-remote-code on the command line" in halfstep(
        "bench", "--config", file).stderr  # fmt: skip
    assert halfstep("bench", "--config", file, "--trust-remote-code", "--out", tmp_path)[0] == 0


def test_completion_knows_its_options_and_values():
    assert "bench" in following([])
    options = set(following(["bench"]))
    assert {"--precision", "--seconds", "--threads", "--model", "--data", "--n-layer"} <= options
    assert not {"--output-dir", "--max-steps", "--report-to"} & options
    assert following(["bench", "--format"])[0] == "auto"


def test_only_what_is_given_is_known():
    name, request = read_words(["bench", "--json", "--seed", "3"])
    assert (name, request.given, request.bench.json) == ("bench", {"run.seed": "3"}, True)


def test_a_real_measurement(halfstep, tmp_path):
    """As a user starts it, with a process of its own."""
    words = ["--config", "gpt-tiny", "--n-layer", 1, "--n-embd", 32, "--n-head", 2, "--block-size",
             32, "--tokenizer", "bytes", "--batch-size", 4, "--precision", "bf16-split",
             "--steps", 3, "--seconds", 250, "--device", "cpu", "--threads", 1]  # fmt: skip
    done = halfstep("bench", *words, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "bench.json").read_text())
    assert [(r["policy"], r["measured"]) for r in table["rows"]] == [("bf16-split", True)]
    assert table["steps_timed"] == 3
    assert "Take " in done.stdout
    assert torch.get_num_threads() == 1


def test_a_folder_that_cannot_be_written_is_refused_before_the_measurement(
    halfstep, asked, tmp_path
):
    (tmp_path / "file").write_text("")
    done = halfstep("bench", "--out", tmp_path / "file" / "folder")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert asked == {}


def test_a_measurement_that_fails_leaves_no_folder(halfstep, tmp_path, monkeypatch):
    def fails(*args, **options):
        raise ConfigError("no data")

    monkeypatch.setattr(command, "bench", fails)
    done = halfstep("bench", "--out", tmp_path / "folder")
    assert done.returncode == 2
    assert not (tmp_path / "folder").exists()
