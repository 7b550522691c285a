"""Checkpoints that N ranks save and M ranks of any layout resume: bits, damage, kills.

They are whole or absent, verified, never from non-finite numbers, never the last removed.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
import tracemalloc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem

from halfstep import files
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, NonFiniteError, StorageError
from halfstep.trainer import checkpoint, shards
from halfstep.trainer.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from halfstep.trainer.shards import LocalShard, Shard, write_shards
from trainer.checkpoint.sharded import (
    LAYOUTS,
    assert_same,
    cut,
    cut_state,
    save_all,
    save_side_by_side,
    whole_state,
)

FIRST, SHARD = "index-00001.json", "shard-00001-model-00001.safetensors"


def states_of(whole, layout, size):
    return [cut_state(whole, LAYOUTS[layout], rank, size) for rank in range(size)]


@pytest.mark.parametrize("layouts", [("rows",) * 4, ("columns",) * 4, ("replicated",) * 4,
                                     ("rows", "columns", "mixed", "rows"),
                                     ("mixed", "rows", "columns", "mixed")], ids=str)  # fmt: skip
def test_from_1_to_2_to_4_to_1_ranks_and_3_every_bit_comes_along(tmp_path, layouts):
    whole = whole_state()
    path = save_all(tmp_path, 1, states_of(whole, "rows", 1))
    for step, (size, layout) in enumerate(zip((2, 4, 3, 1), layouts, strict=True), start=2):
        wanted = states_of(whole, layout, size)
        loaded = [load_checkpoint(path, state.shards) for state in wanted]
        for got, state in zip(loaded, wanted, strict=True):
            assert_same(got.weights, state.weights)
            assert_same(got.optimizer, state.optimizer)
            assert got.state == {"step": step - 1, **whole.state}
            assert got.shards == state.shards
        for got in loaded:
            del got.state["step"]  # another step is saved
        path = save_all(tmp_path, step, loaded)
        everything = load_checkpoint(path)
        assert_same(everything.weights, whole.weights)
        assert_same(everything.optimizer, whole.optimizer)
        assert everything.shards == {}


def test_at_1024_ranks_one_reads_the_manifest_two_indexes_and_its_own_rows(tmp_path, monkeypatch):
    size, names = 1024, [f"layers.{n}" for n in range(20)]
    path = tmp_path / "step-00000001"
    path.mkdir()
    state, hashes = files.write_hashed(path / "state.json", b"{}"), ["0" * 64] * size
    for rank in (0, 512):
        held = {name: torch.full((4, 2), float(rank)) for name in names}
        own = [LocalShard("weights", name, t, rows(rank, size)) for name, t in held.items()]
        index = write_shards(own, path, rank)
        text = json.dumps(index).encode()
        hashes[rank] = files.write_hashed(path / f"index-{rank + 1:05d}.json", text)
    manifest = {"format": 3, "state": state, "indexes": hashes}
    (path / "manifest.json").write_text(json.dumps(manifest))
    read, real = [], files.read_whole
    monkeypatch.setattr(
        checkpoint, "read_whole", lambda where: read.append(where.name) or real(where)
    )
    wanted = {name: rows(512, size) for name in names}
    tracemalloc.start()
    got = load_checkpoint(path, wanted, world=World(512, size))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(bool((weight == 512).all()) for weight in got.weights.values())
    assert read == ["state.json", "index-00001.json", "index-00513.json",
                    "shard-00513-model-00001.safetensors"]  # fmt: skip
    assert peak < 2e6  # bytes; 1,024 hashes, and 20 tensors twice


def rows(rank, size):
    return Shard((4 * size, 2), (4 * rank, 0), (4, 2))


@pytest.mark.parametrize("bucket", [1 << 24, 64])
def test_torchs_reader_reads_the_folder_in_any_layout(tmp_path, monkeypatch, bucket):
    """Tensors larger than a bucket are in several files, for ours and for torch's."""
    monkeypatch.setattr(shards, "BUCKET", bucket)
    whole = whole_state()
    path = save_all(tmp_path, 1, states_of(whole, "mixed", 3))
    assert_same(load_checkpoint(path).weights, whole.weights)
    every = whole.weights | whole.optimizer
    found = {name: torch.zeros_like(tensor) for name, tensor in every.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    assert_same(found, every)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_object_stores_keep_whole_checkpoints_and_the_manifest_comes_last(tmp_path, kind):
    folder = f"memory://{tmp_path.name}/c" if kind == "memory" else f"file://{tmp_path}/c"
    whole = whole_state()
    assert list_checkpoints(folder) == []
    for step in (1, 2, 3):
        path = save_all(folder, step, states_of(whole, "rows", 3), keep=2)
    assert path == f"{folder}/step-00000003"
    assert list_checkpoints(folder) == [f"{folder}/step-0000000{n}" for n in (2, 3)]
    for state in states_of(whole, "columns", 2):
        got = load_checkpoint(path, state.shards)
        assert_same(got.weights, state.weights)
        assert_same(got.optimizer, state.optimizer)
    files.remove(f"{path}/manifest.json")  # a save that was killed before its last object
    assert list_checkpoints(folder) == [f"{folder}/step-00000002"]
    if kind == "memory":
        save_all(folder, 3, states_of(whole, "rows", 2), keep=2)
        assert_same(load_checkpoint(path).optimizer, whole.optimizer)
        assert "index-00003.json" not in files.names_in(path)


def test_another_model_is_refused_by_name(tmp_path):
    state = states_of(whole_state(), "rows", 1)[0]
    path = save_all(tmp_path, 1, [state])
    fewer = {n: p for n, p in state.shards.items() if n != "cube"}
    with pytest.raises(CheckpointError, match="made by another model: cube"):
        load_checkpoint(path, fewer)
    with pytest.raises(CheckpointError, match=r"made by another model: w is \(8, 6\).*\(8, 7\)"):
        load_checkpoint(path, {**state.shards, "w": Shard.whole((8, 7))})


def test_state_that_no_shard_describes_is_refused_when_saved(tmp_path):
    part, shard = cut(torch.randn(4, 3), 0, 0, 2)
    odd = Checkpoint({"a": part}, {"a/row_sums": torch.zeros(2)}, {}, {"a": shard})
    with pytest.raises(CheckpointError, match="a/row_sums has shape"):
        save_checkpoint(tmp_path, 1, odd, 1)
    with pytest.raises(CheckpointError, match="a has shape"):
        save_checkpoint(tmp_path, 1, Checkpoint({"a": torch.zeros(3)}, {}, {}, {"a": shard}), 1)
    held = {"a": Shard.whole((4, 3))}
    whole = Checkpoint({"a": torch.zeros(4, 3)}, {"a/row_sums": torch.zeros(4)}, {}, held)
    path = save_checkpoint(tmp_path, 1, whole, 1)
    assert_same(load_checkpoint(path, held).optimizer, whole.optimizer)


# --- damage ---------------------------------------------------------------------------------------


def test_each_file_flipped_cut_or_deleted_is_noticed(tmp_path):
    states = states_of(whole_state(), "rows", 3)
    path = save_all(tmp_path, 1, states)
    rng = random.Random(0)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for _ in range(200 if file.name == "manifest.json" else 10):
            position = rng.randrange(len(data))
            flipped = bytearray(data)
            flipped[position] ^= 1 << rng.randrange(8)
            for bad in (flipped, data[:position]):
                file.write_bytes(bad)
                with pytest.raises(CheckpointError, match=r"\.(json|safetensors)"):
                    load_checkpoint(path)
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
            load_checkpoint(path)
        file.write_bytes(data)
    load_checkpoint(path)


HOSTILE = {
    "up": (lambda f, w: f.update({"../w": f.pop(SHARD)}), "damaged"),
    "hole": (lambda f, w: w.update(size=[3, 6]), "hold 42 of 48"),
    "outside": (lambda f, w: w.update(saved_offsets=[6, 0]), "damaged"),
    "huge": (lambda f, w: w.update(shape=[2**40, 6], size=[2**40, 6]), "elements"),
    "huge alone": (
        lambda f, w: f[SHARD]["tensors"]["one"].update(shape=[2**40], size=[2**40]), "one has shape"
    ),
    "name": (lambda f, w: f[SHARD]["tensors"].update(v=w), "v"),
    "no offset": (lambda f, w: w.pop("saved_offsets"), "saved_offsets"),
    "sha": (lambda f, w: f[SHARD].update(sha256="0" * 64), "SHA-256"),
}  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_index_is_refused_before_memory_is_taken(tmp_path, change):
    path = save_all(tmp_path, 1, states_of(whole_state(), "rows", 2))
    manifest, index = (json.loads((path / n).read_text()) for n in ("manifest.json", FIRST))
    function, message = HOSTILE[change]
    function(index, index[SHARD]["tensors"]["w"])
    manifest["indexes"][0] = files.write_hashed(path / FIRST, json.dumps(index).encode())
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"\xff", b"[" * 100_000, b'{"format": 3, "format": 3}', b'{"format": 2}',
     b'{"format": 3}', b'{"format": 3, "indexes": []}', b'{"format": 4}'],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_checkpoint(tmp_path)


# --- faults of ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize("broken_ranks", [(0,), (1,), (1, 3)])
def test_a_nan_on_any_rank_is_raised_by_its_name_on_all(tmp_path, broken_ranks):
    good = save_all(tmp_path, 1, states_of(whole_state(), "rows", 4), keep=1)
    states = states_of(whole_state(), "rows", 4)
    for rank in broken_ranks:
        name = "t/exp_avg_sq" if rank == 3 else "w/exp_avg"
        states[rank].optimizer[name][0, 0] = float("nan")
    results = save_side_by_side(tmp_path, 2, states, keep=1)
    assert all(isinstance(result, NonFiniteError) for result in results)
    names = ("w/exp_avg", "t/exp_avg_sq")[: len(broken_ranks)]
    assert results[0].parameters == names
    assert results[0].cause == "weights"
    assert "w/exp_avg is not finite: no checkpoint is written" in str(results[0])
    assert list(tmp_path.iterdir()) == [good]


@pytest.fixture
def failing(monkeypatch):
    """Make the disk fail: ``failing(kind, name, times)``; returns the waits between tries."""
    waits, left = [], {}
    monkeypatch.setattr(time, "sleep", waits.append)
    real = LocalFileSystem.open

    def opened(self, path, *args, **kwargs):
        for (code, name), _ in [item for item in left.items() if item[1]]:
            if name in path:
                left[code, name] -= 1
                raise OSError(code, os.strerror(code))
        return real(self, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "open", opened)
    return lambda code, name, times: (left.update({(code, name): times}), waits)[1]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_on_any_rank_is_tried_again_and_then_ends_the_run_with_75(
    tmp_path, failing, rank, code
):
    good = save_all(tmp_path, 1, states_of(whole_state(), "rows", 3), keep=1)
    states = states_of(whole_state(), "rows", 3)
    waits = failing(code, f"shard-{rank + 1:05d}", 4)
    for result in save_side_by_side(tmp_path, 2, states, keep=1):
        assert isinstance(result, StorageError)
        assert result.exit_code == 75
        assert f"rank {rank}: " in str(result)
        assert os.strerror(code) in str(result)
        assert "step-00000001, is intact" in str(result)
    assert waits == sorted(waits)
    assert len(waits) == 3
    assert list(tmp_path.iterdir()) == [good]
    failing(code, f"shard-{rank + 1:05d}", 3)
    path = save_all(tmp_path, 2, states, keep=1)
    failing(code, "index", 3)
    assert_same(load_checkpoint(path).weights, whole_state().weights)
    failing(code, "manifest", 4)
    with pytest.raises(StorageError):
        load_checkpoint(path)


def test_shards_that_do_not_make_up_a_tensor_are_no_checkpoint(tmp_path):
    states = states_of(whole_state(), "rows", 2)
    shard = states[1].shards["w"]
    states[1].shards["w"] = Shard(shard.shape, (0, 0), shard.local)
    with pytest.raises(CheckpointError, match="do not make up the tensors"):
        save_all(tmp_path, 1, states)
    states[1].shards["w"] = Shard(shard.shape, shard.offset, shard.local, written=False)
    with pytest.raises(CheckpointError, match="do not make up the tensors"):
        save_all(tmp_path, 1, states)
    assert list(tmp_path.iterdir()) == []


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
    save_all(tmp_path / "c", 3, states_of(whole_state(), "rows", 2))
    files = [f"{kind.format(n)}" for n in (1, 2) for kind in
             ("shard-0000{}-model-00001.safetensors", "index-0000{}.json")]  # fmt: skip
    renamed = events.index(("rename", "step-00000003"))
    before = {name for kind, name in events[:renamed] if kind == "sync"}
    assert {*files, "state.json", "manifest.json", ".unfinished-step-00000003"} <= before
    assert ("sync", "c") in events[renamed:]


def test_something_else_under_the_name_is_left_and_nothing_is_lost(tmp_path):
    good = save_checkpoint(tmp_path, 8, whole_state(), keep=1)
    foreign = tmp_path / "step-00000009"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"step-00000009 cannot be written: .*not empty"):
        save_checkpoint(tmp_path, 9, whole_state(), keep=1)
    assert (foreign / "notes.txt").read_text() == "mine"
    assert list_checkpoints(tmp_path) == [good]
    assert_same(load_checkpoint(good).weights, whole_state().weights)
    assert {path.name for path in tmp_path.iterdir()} == {good.name, foreign.name}


class Killed(BaseException):
    """Stands for a SIGKILL: no handler of errors runs for it."""


def test_a_kill_before_any_call_that_touches_the_disk_leaves_the_earlier_checkpoint(
    tmp_path, monkeypatch
):
    """Of rank 0 or 1, before the n-th call, for every n until none is left to kill."""
    whole = whole_state()
    old, new = states_of(whole, "rows", 2), states_of(whole, "columns", 2)
    targets = [(os, "rename"), (os, "fsync"), (LocalFileSystem, "open"), (shutil, "rmtree"),
               (os, "unlink"), (os, "mkdir")]  # fmt: skip
    n, done, visible = 0, False, 0
    while not done:
        n += 1
        folder = tmp_path / str(n)
        good = save_all(folder, 1, old, keep=1)
        left = n

        def counted(real):
            def call(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for module, name in targets:
                patch.setattr(module, name, counted(getattr(module, name)))
            try:
                save_all(folder, 2, new, keep=1)
                done = True
            except Killed:
                pass
        found = list_checkpoints(folder)
        assert found  # never none
        visible += found[-1] != good
        for path in found:
            assert_same(load_checkpoint(path).weights, whole.weights)
        if good in found:
            assert_same(load_checkpoint(good, old[1].shards).optimizer, old[1].optimizer)
        last = save_all(folder, 3, new, keep=1)
        assert list(folder.iterdir()) == [last]
        assert_same(load_checkpoint(last, new[1].shards).optimizer, new[1].optimizer)
    assert n > 25  # calls, of both ranks
    assert 2 <= visible < 14  # the last ones come after the rename
