"""Checkpoints: whole or absent, verified, never from non-finite numbers, never the last removed."""

import os
import shutil

import pytest
import torch

from halfstep.errors import CheckpointError
from halfstep.trainer.checkpoint import (
    Checkpoint,
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


def test_the_name_of_another_step_is_refused_when_read(tmp_path):
    path = save_checkpoint(tmp_path, 2, example(), keep=1)
    copy = shutil.copytree(path, tmp_path / "step-00000008")
    with pytest.raises(CheckpointError, match=r"step-00000008 holds step 2: it was renamed or cop"):
        load_checkpoint(copy)
    assert_equal(example(), load_checkpoint(path))
    assert_equal(example(), load_checkpoint(path.rename(tmp_path / "the-best")))


@pytest.mark.parametrize("there", ["empty", "file", "other", "copy"])
def test_something_else_under_the_name_is_refused_and_nothing_is_lost(tmp_path, there):
    good = save_checkpoint(tmp_path, 8, example(), keep=1)
    foreign = tmp_path / "step-00000009"
    if there == "copy":
        shutil.copytree(good, foreign)
    elif there == "other":
        save_checkpoint(tmp_path, 9, example(seed=1), keep=2)
    elif there == "file":
        foreign.write_text("a file")
    else:
        foreign.mkdir()
    before = sorted(foreign.rglob("*"))
    with pytest.raises(CheckpointError, match=r"something else is there under its name.*move it"):
        save_checkpoint(tmp_path, 9, example(), keep=1)
    assert sorted(foreign.rglob("*")) == before
    assert_equal(example(), load_checkpoint(good))
    assert {path.name for path in tmp_path.iterdir()} == {good.name, foreign.name}


def test_the_same_checkpoint_saved_again_stays_as_it_is(tmp_path):
    path = save_checkpoint(tmp_path, 3, example(), keep=1)
    inode = (path / "weights.safetensors").stat().st_ino
    assert save_checkpoint(tmp_path, 3, example(), keep=1) == path
    assert (path / "weights.safetensors").stat().st_ino == inode
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path, kind):
    path = save_checkpoint(tmp_path / "c", 3, example(), keep=1)
    for name in ("manifest.json", "state.json", "weights.safetensors"):
        (path / name).rename(tmp_path / "elsewhere")
        if kind == "pipe":
            os.mkfifo(path / name)
        else:  # to the right content
            (path / name).symlink_to(tmp_path / "elsewhere")
        why = "a symbolic link" if kind == "link" else "not a regular file"
        with pytest.raises(CheckpointError, match=f"{name}: is {why}"):
            load_checkpoint(path)
        (path / name).unlink()
        (tmp_path / "elsewhere").rename(path / name)
