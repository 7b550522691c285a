"""Checkpoints: whole or absent, verified, never from non-finite numbers, never the last removed."""

import os

import pytest
import torch

from halfstep.errors import CheckpointError
from halfstep.trainer.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from trainer.checkpoint.sharded import LAYOUTS, assert_same, cut_state, save_all, whole_state


def example(seed: int = 0, **state) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "a": torch.randn(7, 5, generator=generator),
        "b": torch.randn(3, generator=generator).bfloat16(),
    }
    optimizer = {"a/exp_avg": torch.randn(7, 5, generator=generator), "a/step": torch.tensor(3.0)}
    return Checkpoint(weights, optimizer, {"note": "Zürich 字", **state})


def assert_equal(a: Checkpoint, b: Checkpoint) -> None:
    assert_same(a.weights, b.weights)
    assert_same(a.optimizer, b.optimizer)
    assert a.state.items() <= b.state.items()


def test_files_are_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real_fsync(descriptor)

    def rename(source, target):
        events.append(("rename", os.path.basename(target)))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save_all(tmp_path / "c", 3, [cut_state(whole_state(), LAYOUTS["rows"], r, 2) for r in (0, 1)])
    files = [f"{section}-0000{n}-of-00002.safetensors" for n in (2, 1) for section in
             ("weights", "optimizer")]  # fmt: skip
    renamed = events.index(("rename", "step-00000003"))
    before = {name for kind, name in events[:renamed] if kind == "sync"}
    assert {*files, "state.json", "manifest.json", ".unfinished-step-00000003"} <= before
    assert ("sync", "c") in events[renamed:]


def test_something_else_under_the_name_is_left_and_nothing_is_lost(tmp_path):
    good = save_checkpoint(tmp_path, 8, example(), keep=1)
    foreign = tmp_path / "step-00000009"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"step-00000009 cannot be written: .*not empty"):
        save_checkpoint(tmp_path, 9, example(), keep=1)
    assert (foreign / "notes.txt").read_text() == "mine"
    assert list_checkpoints(tmp_path) == [good]
    assert_equal(example(), load_checkpoint(good))
    assert {path.name for path in tmp_path.iterdir()} == {good.name, foreign.name}
