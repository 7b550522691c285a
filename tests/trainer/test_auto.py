"""Runs whose precision is ``auto``: what they write down, and how they are resumed."""

import json
import re
from dataclasses import replace

import pytest
import torch

from halfstep.cli.main import main
from halfstep.precision.policy import devices
from halfstep.trainer.checkpoint import list_checkpoints, load_checkpoint
from halfstep.trainer.config.config import load_config
from halfstep.trainer.run import default_run_folder, run_config

CPU = torch.device("cpu")
SIZES = ["--data.tokenizer", "bytes", "--n-layer", "1", "--n-head", "2", "--n-embd", "32",
         "--model.block-size", "32", "--batch-size", "4", "--eval-batches", "2",
         "--schedule.warmup-steps", "1", "--device", "cpu"]  # fmt: skip


@pytest.fixture
def cpu(monkeypatch):
    """A function that pretends to be on a CPU with these instructions, under this name."""

    def pretend(flags, name="Some CPU"):
        monkeypatch.setattr(devices, "cpu_instructions", lambda: frozenset(flags))
        monkeypatch.setattr(devices, "cpu_name", lambda: name)

    return pretend


def train(corpus, path, *words):
    return main(["train", "--config", "gpt-tiny", "--data", str(corpus), "--output-dir", str(path),
                 *SIZES, *words])  # fmt: skip


@pytest.mark.parametrize(("flags", "policy"), [({"avx2"}, "fp32"), ({"bf16"}, "bf16-mixed")])
def test_a_run_writes_down_what_auto_took_and_says_why_once(
    corpus, tmp_path, capsys, cpu, flags, policy
):
    cpu(flags)
    assert train(corpus, tmp_path / "r", "--max-steps", "2") == 0
    said = capsys.readouterr().err
    assert said.count(f"precision auto took {policy}: Some CPU") == 1
    assert f"gpt-tiny {policy}:" in said
    assert str(run_config(tmp_path / "r").precision) == policy
    found = json.loads((tmp_path / "r" / "env.json").read_text())
    assert (found["auto"][:8], found["device_name"]) == ("Some CPU", "Some CPU")
    (checkpoint,) = list_checkpoints(tmp_path / "r" / "checkpoints")
    state = load_checkpoint(checkpoint).state
    assert state["config"]["precision"] == state["precision"]["policy"] == policy


@pytest.mark.parametrize("words", [["--config", "gpt-tiny"], ["--precision", "auto"], []])
def test_a_resumed_run_keeps_its_policy_on_another_device(corpus, tmp_path, cpu, words):
    cpu({"bf16"}, "Old CPU")
    assert train(corpus, tmp_path / "r", "--max-steps", "2") == 0
    cpu({"avx2"}, "New CPU")
    again = ["train", "--resume", "--output-dir", str(tmp_path / "r"), "--max-steps", "3", *words]
    if "gpt-tiny" in words:
        again += ["--data", str(corpus), *SIZES]
    assert main(again) == 0
    assert str(run_config(tmp_path / "r").precision) == "bf16-mixed"


def test_a_folder_of_many_rules_has_a_name_that_a_file_system_takes():
    rules = "|".join(f"layers.{i}.attn.qkv:bf16/nvfp4/mxfp8" for i in range(12))
    config = replace(load_config("gpt-tiny"), precision=f"bf16-mixed,simulate=yes,rules={rules}")
    for name in ("gpt", "中文" * 40):
        folder = default_run_folder(replace(config, name=name), CPU)
        assert len(folder.name.encode()) <= 255
        assert re.search(r"-\d{8}-\d{6}$", folder.name)
