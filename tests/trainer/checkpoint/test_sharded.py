"""Checkpoints that N ranks save and M ranks of any layout resume: bits, damage, kills.

They are whole or absent, verified, never from non-finite numbers, never the last removed.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil

import pytest
import safetensors.torch
import torch

from halfstep.errors import CheckpointError, NonFiniteError
from halfstep.trainer.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from halfstep.trainer.shards import Shard
from trainer.checkpoint.sharded import (
    LAYOUTS,
    SIGNED,
    after_eight_bits,
    assert_same,
    cut,
    cut_state,
    save_all,
    save_side_by_side,
    whole_state,
)

EIGHT = ("e", "t")


def states_of(whole, layout, size, eight=()):
    return [cut_state(whole, LAYOUTS[layout], rank, size, eight) for rank in range(size)]


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


@pytest.mark.covering
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_8_bit_moments_come_back_to_the_same_layout_as_codes_bit_for_bit(tmp_path, layout, size):
    states = states_of(whole_state(), layout, size, EIGHT)
    path = save_all(tmp_path, 1, states)
    for state in states:
        got = load_checkpoint(path, state.shards)
        for key in ("t/exp_avg", "t/exp_avg_sq"):
            if state.shards["t"].numel == 0:  # columns over four ranks: 3, 3, 3, 0
                assert (layout, size) == ("columns", 4)
                assert got.optimizer[key].dtype == torch.float32
                for found in (got, state):
                    found.optimizer.pop(key)
                    found.optimizer.pop(key + "_tops", None)
            else:  # in memory as the optimizer had them
                assert got.optimizer[key].stride() == state.optimizer[key].stride()
        assert_same(got.optimizer, state.optimizer)


@pytest.mark.covering
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("layout", ["rows", "columns", "mixed"])
def test_8_bit_moments_come_to_another_layout_as_their_exact_fp32_values(
    tmp_path, saved, layout, size
):
    path = save_all(tmp_path, 1, states_of(whole_state(), saved, 4, EIGHT))
    decoded = after_eight_bits(whole_state(), LAYOUTS[saved], 4, EIGHT)
    states = states_of(whole_state(), saved, 4, EIGHT)
    for rank in range(size):
        state = cut_state(decoded, LAYOUTS[layout], rank, size)
        got = load_checkpoint(path, state.shards)
        assert_same(got.weights, state.weights)
        for key, tensor in state.optimizer.items():
            name, _, kind = key.rpartition("/")
            same = [s for s in states if name in EIGHT and tensor.numel() and
                    s.shards[name] == state.shards[name]]  # fmt: skip
            if same and kind in SIGNED:
                assert_same({key: got.optimizer[key]}, {key: same[0].optimizer[key]})
            else:
                assert_same({key: got.optimizer[key]}, {key: tensor})
                assert key + "_tops" not in got.optimizer


def test_ranks_with_no_element_of_an_8_bit_moment(tmp_path):
    """Six elements over four ranks of two: the last has none, and no tops."""
    g = torch.Generator().manual_seed(0)
    whole = Checkpoint({"e": torch.randn(6, generator=g)}, {}, {})
    whole.optimizer.update({"e/exp_avg": torch.randn(6, generator=g)})
    states = [cut_state(whole, {"e": 0}, rank, 4, ("e",)) for rank in range(4)]
    assert states[3].optimizer["e/exp_avg_tops"].shape == (0,)
    path = save_all(tmp_path, 1, states)
    got = load_checkpoint(path, states[3].shards).optimizer
    assert got["e/exp_avg"].shape == (0,)
    assert got["e/exp_avg"].dtype == torch.float32
    assert "e/exp_avg_tops" not in got
    # And a parameter without any element.
    whole = Checkpoint({"e": torch.randn(0, 3)}, {"e/exp_avg": torch.randn(0, 3)}, {})
    path = save_all(tmp_path, 2, [cut_state(whole, {"e": 0}, 0, 1, ("e",))])
    assert_same(load_checkpoint(path).optimizer, whole.optimizer)


def test_a_rank_reads_only_files_that_it_needs(tmp_path):
    states = states_of(whole_state(), "rows", 4)
    path = save_all(tmp_path, 1, states)
    for name in ("weights-00004-of-00004.safetensors", "optimizer-00004-of-00004.safetensors"):
        (path / name).write_bytes(b"damaged")
    # Rank 0's rows are in the first files.
    assert_same(load_checkpoint(path, states[0].shards).weights, states[0].weights)
    with pytest.raises(CheckpointError, match="weights-00004-of-00004"):
        load_checkpoint(path, states[3].shards)
    with pytest.raises(CheckpointError, match="00004-of-00004"):
        load_checkpoint(path)


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
    states = states_of(whole_state(), "rows", 3, EIGHT)
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
    "up": (
        lambda m, p: (p.update(file="../w"), m["files"].update({"../w": {"sha256": "0" * 64}})),
        "its files are",
    ),
    "section": (lambda m, p: p.update(file="optimizer-00001-of-00002.safetensors"), "tensor w"),
    "overlap": (lambda m, p: p.update(shape=[5, 6]), "hold 54 of the 48"),
    "hole": (lambda m, p: p.update(shape=[3, 6]), "hold 42 of the 48"),
    "outside": (lambda m, p: p.update(offset=[6, 0]), "is not in"),
    "negative": (lambda m, p: p.update(offset=[-1, 0]), "is not in"),
    "huge": (
        lambda m, p: (m["weights"]["w"].update(shape=[2**62, 6], pieces=[p]),
                      p.update(shape=[2**62, 6])), "in the file"),
    "dtype": (lambda m, p: m["weights"]["w"].update(dtype="F16"), "w is .*F32.*F16"),
    "some tops": (lambda m, p: m["optimizer"]["e/exp_avg"]["pieces"][0].pop("order"), "e/exp_avg"),
    "order turned": (
        lambda m, p: m["optimizer"]["e/exp_avg"]["pieces"][0].update(order=[1, 0]), "e/exp_avg"),
    "name": (lambda m, p: m["weights"].update(v=m["weights"].pop("w")), "v"),
    "no offset": (lambda m, p: p.pop("offset"), "offset"),
    "sha": (lambda m, p: m["files"]["state.json"].update(sha256="0" * 64), "do not match"),
    "format": (lambda m, p: m.update(format=3), "format '3', this halfstep reads 2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks, and its manifest, which a test may write anew."""
    states = states_of(whole_state(), "rows", 2, EIGHT)
    path = save_all(tmp_path_factory.mktemp("saved"), 1, states)
    load_checkpoint(path)
    return path, json.loads((path / "manifest.json").read_text())


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_manifest_is_refused_before_memory_is_taken(saved, change):
    path, manifest = saved[0], copy.deepcopy(saved[1])
    function, message = HOSTILE[change]
    function(manifest, manifest["weights"]["w"]["pieces"][0])
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"\xff", b"[" * 100_000, b'{"format": 2, "format": 2}', b'{"format": 2}'],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_checkpoint(tmp_path)


# --- faults of ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize("broken_ranks", [(0,), (1,), (1, 3)])
def test_a_nan_on_any_rank_is_raised_by_its_name_on_all(tmp_path, broken_ranks):
    good = save_all(tmp_path, 1, states_of(whole_state(), "rows", 4), keep=1)
    states = states_of(whole_state(), "rows", 4, EIGHT)
    for rank in broken_ranks:
        if rank == 3:
            states[rank].optimizer["e/exp_avg_sq_tops"][-1] = 255
        else:
            states[rank].optimizer["w/exp_avg"][0, 0] = float("nan")
    results = save_side_by_side(tmp_path, 2, states, keep=1)
    assert all(isinstance(result, NonFiniteError) for result in results)
    names = ("w/exp_avg", "e/exp_avg_sq_tops")[: len(broken_ranks)]
    assert results[0].parameters == names
    assert results[0].cause == "weights"
    assert "w/exp_avg is not finite: no checkpoint is written" in str(results[0])
    assert list(tmp_path.iterdir()) == [good]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_full_disk_on_any_rank(tmp_path, monkeypatch, rank):
    good = save_all(tmp_path, 1, states_of(whole_state(), "rows", 3), keep=1)
    real = safetensors.torch.save_file

    def save_file(tensors, path):
        if f"weights-{rank + 1:05d}" in path.name:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    states = states_of(whole_state(), "rows", 3)
    for result in save_side_by_side(tmp_path, 2, states, keep=1):
        assert isinstance(result, CheckpointError)
        assert f"rank {rank}: [Errno 28] No space left on device" in str(result)
        assert "step-00000001, is intact" in str(result)
    assert list(tmp_path.iterdir()) == [good]
    monkeypatch.undo()
    assert save_all(tmp_path, 2, states, keep=1) == tmp_path / "step-00000002"


def test_shards_that_do_not_make_up_a_tensor_are_no_checkpoint(tmp_path):
    states = states_of(whole_state(), "rows", 2)
    shard = states[1].shards["w"]
    states[1].shards["w"] = Shard(shard.shape, (0, 0), shard.local)
    with pytest.raises(CheckpointError, match="w: two shards overlap"):
        save_all(tmp_path, 1, states)
    states[1].shards["w"] = Shard(shard.shape, shard.offset, shard.local, written=False)
    with pytest.raises(CheckpointError, match="w: its shards hold 24 of the 48"):
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
    files = [f"{section}-0000{n}-of-00002.safetensors" for n in (2, 1) for section in
             ("weights", "optimizer")]  # fmt: skip
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
    targets = [(os, "rename"), (os, "fsync"), (safetensors.torch, "save_file"), (shutil, "rmtree"),
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
    assert 2 <= visible < 12  # the last ones come after the rename
