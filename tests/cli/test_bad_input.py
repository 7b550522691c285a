"""What makes no sense or cannot fit is refused in one line, with code 2, before anything is made.

In one process: each case would take seconds as a program of its own.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from safetensors.torch import save_file
from tests.trainer.classifiers import checkpoint_of, metrics

from halfstep.cli.main import main
from halfstep.trainer import memory
from halfstep.trainer.memory import memory_bytes, require_host_room, require_rows
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.models.shapes import GPTConfig

TINY = [
    "--config", "gpt-tiny", "--tokenizer", "bytes", "--device", "cpu", "--precision", "fp32",
    "--model.n_layer", "1", "--model.n_embd=32", "--model.n_head", "2", "--model.block_size=32",
    "--batch-size", "4", "--run.eval_batches", "2", "--quiet",
]  # fmt: skip
LONG = "x" * 300


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command that must be refused; returns its one line."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))

    def run(*arguments, words=""):
        code = main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        lines = [line for line in found.err.splitlines() if "error:" in line]
        assert code == 2, found.err
        assert len(lines) == 1, found.err
        assert "unexpected" not in lines[0]
        assert len(lines[0]) < 2100
        for word in words.split("|"):
            assert word in lines[0], lines[0]
        assert {
            path for path in set(tmp_path.rglob("*")) - before if path.name not in ("r", "run.lock")
        } == set()
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND"),
        (["train", "--max-steps", "soon"], "gpt-small-cpu: key run.max_steps: 'soon'|an integer"),
        (["train", "--precision", "bf61"], "did you mean 'bf16'"),
        (["train", "--precision", "tf32", "--device", "cpu"], "nearest"),
        (["train", "--device", "tpu"], "auto, cpu, mps, cuda"),
        (["train", "--config", "gpt-tinny"], "did you mean 'gpt-tiny'"),
        (["train", "--block-size", "5000"], "model.block_size"),
        (["train", "--max-steps", "3", "--warmup-steps", "4"], "warmup_steps=4 is longer"),
        (["train", "--data", "/no/such/file.txt"], "/no/such/file.txt"),
        (["train", "--resume"], "--output-dir"),
        (["train", "--parallel", "pipe=2"], "'pipe=2'; allowed axes: data, shard, tensor"),
        (["train", "--on-nonfinite", "skip"], "allowed: stop, skip:K"),
        (["generate", "--run", "/tmp"], "holds no run"),
        (["doctor", "--run.seed", "3"], "unknown option --run.seed; see halfstep doctor --help"),
        (["evaluate", "--model", "HF"], "HF"),
    ],
)
def test_a_mistake_is_one_line(refused, words, message):
    refused(*words, words=message)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-size", "99999999999"], "needs at least|one micro-batch|--batch-size"),
        (["--batch-size", "9" * 40], "needs at least"),
        (["--model.n_layer", "1000000000"], "needs at least|the model is made in fp32 on the host"),
        (["--model.n_embd", "1000000000"], "needs at least"),
        (["--model.block_size", "1000000000000"], "needs at least"),
        (["--max-steps", "9" * 5000], "run.max_steps|allowed: an integer"),
        (["--learning-rate", "9" * 5000], "optimizer.learning_rate"),
        (["--output-dir", LONG], "has 300 characters; allowed: names of at most 255 bytes"),
        (["--output-dir", "a/" + LONG + "/b"], "has 300 characters"),
        (["--output-dir", "a\0b"], "NUL"),
        (["--config", LONG], "unknown configuration"),
        (["--config", LONG + ".toml"], "cannot be read"),
        (["--precision", LONG + ".toml"], "policy file"),
        (["--precision", "bf16" * 1000], "unknown precision policy"),
        (["--data", LONG], LONG[:100]),
        (["--tokenizer", LONG], "tokenizer"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be(refused, corpus, options, words):
    data = [] if "--data" in options else ["--data", corpus]
    folder = [] if "--output-dir" in options else ["--output-dir", "r"]
    refused("train", *TINY, *data, *folder, *options, words=words)
    assert not os.path.exists("r")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_steps = " + "9" * 5000, "not valid TOML"),
        ("x = " + "[" * 20000 + "]" * 20000, "not valid TOML"),
        ("x" + ".x" * 3000 + " = 1", "unknown key x"),
        ('task = ["pretrain"]', "key task"),
        ('task = "pretrain"\n[model]\nn_layer = "\\u0000"', "n_layer"),
        ('[run]\noutput_dir = "a\\u0000b"\n[model]\nn_layer=1\nn_head=1\nn_embd=8\nblock_size=8',
         "run.output_dir|NUL"),
        ("model = 3", "a section is expected"),
    ],
    ids=["digits", "brackets", "dots", "task", "nul in a number", "nul in a name", "no section"],
)  # fmt: skip
def test_a_configuration_that_is_none(refused, tmp_path, text, words):
    path = tmp_path.parent / "bad.toml"
    path.write_text(text)
    refused("train", "--config", path, words=words)


@pytest.mark.parametrize("text", ["x = " + "[" * 20000, "scale = " + "9" * 5000, "a = \x00"])
def test_a_policy_file_that_is_none(refused, tmp_path, text):
    path = tmp_path.parent / "policy.toml"
    path.write_text(text)
    refused("explain", path, words="cannot be read")


def test_a_lock_that_is_a_folder(refused, corpus, tmp_path):
    (tmp_path / "r" / "run.lock").mkdir(parents=True)
    line = refused("train", *TINY, "--data", corpus, "--output-dir", "r", words="run.lock")
    assert "must be a plain file" in line


def test_a_classifier_of_more_positions_than_fit(refused, tmp_path):
    data = tmp_path.parent / "labelled.csv"
    data.write_text("text,label\n" + "good day,a\nbad night,b\n" * 20)
    refused("finetune", "classify", "--train", data, "--model", "scratch:tiny", "--max-length",
            10**12, "--output-dir", "r", "--device", "cpu", "--precision", "fp32", "--quiet",
            "--batch-size", 4, words="needs at least|--max-length")  # fmt: skip
    assert not os.path.exists("r")


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_more_texts_at_once_than_fit(refused, verb):
    extra = ["--input", "-"] if verb == "predict" else ["--data", "x.csv"]
    refused(verb, "--model", ".", *extra, "--batch-size", "9" * 20, words="--batch-size|texts")


def test_a_column_for_a_model_that_reads_text(refused, tmp_path):
    folder = tmp_path.parent / "gpt-folder"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    refused(
        "evaluate", "--model", folder, "--data", "x.txt", "--text-column", "t", words="--text-c"
    )


def test_an_error_line_does_not_steer_the_terminal(refused):
    line = refused("export", "--run", "\x1b[31mred\x07", "--to", "hf", "--output", "o")
    assert "\x1b" not in line
    assert "\x07" not in line
    assert r"\x1b[31mred\x07" in line


def test_a_run_shorter_than_the_warm_up_has_a_shorter_one_and_says_so(corpus, tmp_path, capfd):
    words = [word for word in TINY if word != "--quiet"]
    assert main(["train", *words, "--data", str(corpus), "--max-steps", "3", "--output-dir",
                 str(tmp_path / "r")]) == 0  # fmt: skip
    err = " ".join(capfd.readouterr().err.split())
    assert "note: the warm-up is 3 steps instead of 20: as long as the run" in err
    assert "warmup_steps = 3" in (tmp_path / "r" / "config.toml").read_text()


def test_a_table_that_is_trained_on_as_text_is_noted(corpus, tmp_path, capfd):
    table = tmp_path / "posts.csv"
    table.write_text("text,label\n" + corpus.read_text("utf-8"), "utf-8")
    words = [word for word in TINY if word != "--quiet"]
    assert main(["train", *words, "--data", str(table), "--max-steps", "3", "--output-dir",
                 str(tmp_path / "r")]) == 0  # fmt: skip
    err = "".join(capfd.readouterr().err.split())
    remedy = f"to learn its labels: halfstep finetune classify --train {table}"
    assert "".join(remedy.split()) in err


def test_a_shortened_warm_up_resumes_bit_for_bit_by_the_same_words(corpus, tmp_path):
    words = ["train", *TINY, "--data", str(corpus), "--max-steps", "3", "--save-every", "1",
             "--lost-update-every", "0", "--output-dir"]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*words, str(whole)]) == 0
    assert main([*words, str(cut), "--max-seconds", "1e-9"]) == 0
    assert 0 < len(metrics(cut)) < 3
    assert main([*words, str(cut), "--resume", "--max-seconds", "0"]) == 0
    assert metrics(cut)[-1] == metrics(whole)[-1]
    for name, tensor in checkpoint_of(whole).weights.items():
        assert torch.equal(tensor, checkpoint_of(cut).weights[name])


@pytest.mark.parametrize(("more", "steps"), [([], 4), (["--max-steps", "2"], 2)])
def test_the_default_warm_up_is_no_longer_than_a_files_run(more, steps, corpus, tmp_path, capfd):
    file = tmp_path / "short.toml"
    file.write_text("[model]\nn_layer = 1\n[run]\nmax_steps = 4\n")
    words = [word for word in TINY[2:] if word != "--quiet"]
    assert main(["train", "--config", str(file), *words, "--data", str(corpus), *more,
                 "--output-dir", str(tmp_path / "r")]) == 0  # fmt: skip
    err = " ".join(capfd.readouterr().err.split())
    assert f"note: the warm-up is {steps} steps instead of 50: as long as the run" in err
    assert f"warmup_steps = {steps}" in (tmp_path / "r" / "config.toml").read_text()
    file.write_text(file.read_text() + "[schedule]\nwarmup_steps = 5\n")  # which contradicts it
    assert main(["train", "--config", str(file), *words, "--data", str(corpus)]) == 2
    assert "schedule.warmup_steps=5 is longer than the run" in capfd.readouterr().err


def test_a_warm_up_that_is_given_is_not_shortened(refused, corpus):
    refused("train", *TINY, "--data", corpus, "--max-steps", 3, "--schedule.warmup_steps", 4,
            "--output-dir", "r", words="schedule.warmup_steps=4 is longer")  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 2, 8, 16, 11), (3, 4, 32, 7, 256), (2, 1, 4, 1, 0)])
def test_parameters_are_counted_as_they_are_built(shape):
    config = GPTConfig(**dict(zip(
        ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"), shape, strict=True
    )))  # fmt: skip
    if config.vocab_size == 0:
        assert (
            config.parameters
            == GPTConfig(n_layer=2, n_head=1, n_embd=4, block_size=1, vocab_size=5).parameters
            - 5 * 4
        )
        return
    with torch.device("meta"):
        model = GPT(config)
    assert config.parameters == sum(p.numel() for p in model.parameters())


def test_the_host_s_bound_is_exact_at_its_border(monkeypatch):
    """4 bytes a parameter, in which every rank makes the model, and 16 for a token with target."""
    for have, fits in ((4000 + 40 * 16, True), (4000 + 40 * 16 - 1, False)):
        monkeypatch.setattr(memory, "memory_bytes", lambda device, have=have: have)
        if fits:
            require_host_room(1000, 40, "--x")
        else:
            with pytest.raises(ValueError, match=r"needs at least .* Lower --x"):
                require_host_room(1000, 40, "--x")
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 160)
    require_rows(10, "--batch-size")
    with pytest.raises(ValueError, match="--batch-size 11 texts"):
        require_rows(11, "--batch-size")


def test_the_memory_is_that_of_this_machine():
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_bytes(torch.device("cpu")) <= pages
    assert sys.maxsize > pages
