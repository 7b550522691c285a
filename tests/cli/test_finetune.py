"""Fine-tuning a classifier through the command line: refusals, notes, resume, signals."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.cli.ranks import assert_refused
from tests.trainer.classifiers import (
    checkpoint_of,
    metrics,
    write_files,
)

from halfstep.cli import train
from halfstep.cli.main import main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("data"))


def words_of(files, path, *more, steps=6):
    """The words of a run that takes a second; later ones win."""
    given = ["--train", files[0], "--dev", files[1], "--model", "scratch:tiny", "--device", "cpu",
             "--precision", "fp32", "--batch-size", 24, "--learning-rate", 0.03,
             "--output-dir", path]  # fmt: skip
    return [*given, *(["--max-steps", steps] if steps else []), *more]


def classify(halfstep, *words):
    return halfstep("finetune", "classify", *words)


# --- resume ---


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    """A finished run of 8 steps with an evaluation every 2; tests copy it."""
    path = tmp_path_factory.mktemp("finished") / "r"
    words = words_of(files, path, "--quiet", "--eval-every", 2, "--keep", 9, "--save-every", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "keep_freed_memory", lambda **_: None)
        assert main(["finetune", "classify", *map(str, [*words, "--max-steps", 8])]) == 0
    return path


def copy_of(finished, target):
    shutil.copytree(finished, target)
    config = target / "config.toml"
    config.write_text(config.read_text().replace(str(finished), str(target)))
    return target


def content(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_finished_run_has_nothing_to_do(finished, tmp_path, halfstep):
    path = copy_of(finished, tmp_path / "r")
    before = content(path)
    code, out, err = classify(halfstep, "--resume", "--output-dir", path)
    assert code == 0, err
    assert out.splitlines()[0] == f"{path}: step 8 of 8: nothing to do"
    after = content(path)
    before.pop("run.lock"), after.pop("run.lock")
    assert after == before
    shutil.rmtree(path / "model")  # and it gets its model back
    assert classify(halfstep, "--resume", "--output-dir", path, "--quiet")[0] == 0
    assert content(path / "model") == content(finished / "model")


def test_the_same_command_line_with_resume(files, finished, tmp_path, halfstep):
    path = copy_of(finished, tmp_path / "r")
    for step in (7, 8):
        shutil.rmtree(path / "checkpoints" / f"step-{step:08d}")
    words = words_of(files, path, "--eval-every", 2, "--keep", 9, "--save-every", 1, "--quiet")
    assert classify(halfstep, *words, "--max-steps", 8, "--resume")[0] == 0
    assert metrics(path) == metrics(finished)
    best = checkpoint_of(finished).state["best"]
    assert checkpoint_of(path).state["best"] == best
    assert best["step"] < 6  # is in the checkpoint that it goes on from
    for name, tensor in checkpoint_of(finished).weights.items():
        assert torch.equal(tensor, checkpoint_of(path).weights[name])
    # with a configuration by name: what the first start resolved is filled in
    shutil.rmtree(path / "checkpoints" / "step-00000008")
    words = ["--config", "classify-scratch", *words, "--max-steps", 8, "--resume"]
    code, _, err = classify(halfstep, *words)
    assert code == 0, err
    assert metrics(path) == metrics(finished)


def test_tasks_do_not_mix(finished, tmp_path, halfstep):
    other = tmp_path / "p"
    other.mkdir()
    (other / "config.toml").write_text(
        "[model]\nn_layer = 1\nn_head = 2\nn_embd = 32\nblock_size = 32\n"
    )
    resume, config = ("--resume", "--output-dir"), ("--output-dir", tmp_path / "r", "--config")
    for words, *expected in (
        (("train", *resume, finished), "task classify", "halfstep finetune classify --resume"),
        (("finetune lm", *resume, finished), "task classify", "finetune classify --resume"),
        (("finetune classify", *resume, other), "task pretrain", "halfstep train --resume"),
        (("generate", "--run", finished, "--prompt", "x"),
         "a run of finetune classify, for which there is no generate"),
        (("export", "--run", finished, "--to", "hf", "--output", "o"),
         "a run of finetune classify, for which there is no export (halfstep export --help)"),
        (("finetune classify", *config, "gpt-tiny"),
         "configuration gpt-tiny is of the task pretrain: use halfstep train"),
        (("finetune classify", *config, "lm-lora"),
         "configuration lm-lora is of the task lm: use halfstep finetune lm"),
        (("train", *config, "classify-scratch"), "task classify: use halfstep finetune classify"),
        (("finetune lm", *config, "classify-scratch"), "classify: use halfstep finetune classify"),
    ):  # fmt: skip
        assert_refused(halfstep(*words[0].split(), *words[1:]), *expected)
    assert not (tmp_path / "r").exists()
