"""Token files, and the cache in which they are built whole or not at all."""

import hashlib
import os

import numpy as np
import pytest

from halfstep.errors import DataError
from halfstep.trainer.data import token_file
from halfstep.trainer.data.token_file import (
    TokenFile,
    cache_root,
    fetch,
    load_tokens,
    write_tokens,
)

IDS = np.array([0, 1, 255, 256, 65_535, 7, 7], dtype=np.uint32)


def make(folder, *parts, vocab_size=65_536):
    folder.mkdir(exist_ok=True)
    count = write_tokens(folder, [(p, 2 * len(p)) for p in parts], vocab_size=vocab_size)
    assert count == sum(map(len, parts))
    return load_tokens(folder)


@pytest.mark.parametrize(("vocab_size", "kind"), [(65_536, "<u2"), (65_537, "<u4")])
def test_tokens_come_back_as_written_little_endian(tmp_path, vocab_size, kind):
    found = make(tmp_path / "t", IDS[:3], IDS[3:], vocab_size=vocab_size)
    raw = IDS.astype(kind).tobytes()
    assert found.path.read_bytes() == raw
    assert found.sha256 == hashlib.sha256(raw).hexdigest()
    assert found.windows([0], found.count)[0].tolist() == IDS.tolist()
    assert (found.count, found.text_bytes) == (7, 14)
    assert found.dtype == {"<u2": "uint16", "<u4": "uint32"}[kind]


def test_a_window_past_the_end_is_filled_with_zeros(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(4, 7, dtype="<u2").tobytes())
    view = TokenFile(path=tmp_path / "a.bin", dtype="uint16", count=3, text_bytes=6, sha256="")
    assert view.windows([0, 1], 4).tolist() == [[4, 5, 6, 0], [5, 6, 0, 0]]


@pytest.mark.parametrize("content", [b"\0" * 8, b"\0" * 16, b""])
def test_a_file_of_another_length_is_not_loaded(tmp_path, content):
    found = make(tmp_path / "t", IDS)
    found.path.write_bytes(content)
    assert load_tokens(tmp_path / "t") is None


def test_a_file_that_was_cut_while_it_is_in_use_gives_no_zeros(tmp_path):
    found = make(tmp_path / "t", IDS)
    os.truncate(found.path, 8)
    assert found.windows([0], 4).tolist() == [IDS[:4].tolist()]
    for start in (0, 3, 4):
        with pytest.raises(DataError, match=r"tokens\.bin: was cut"):
            found.windows([start], 5)


def load(folder):
    """A result is good when its two files agree."""
    try:
        first, second = (folder / "a").read_text(), (folder / "b").read_text()
    except OSError:
        return None
    return first if first == second else None


def builder(value):
    def build(folder):
        (folder / "a").write_text(value)
        (folder / "b").write_text(value)

    return build


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HALFSTEP_CACHE": "~/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/me"}, "/me/own"),
        ({"HALFSTEP_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/halfstep"),
        ({"HALFSTEP_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/halfstep"),
    ],
)
def test_the_folder_is_found_in_the_documented_order(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_root()) == expected


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_a_damaged_result_is_replaced(tmp_path, damage):
    fetch(tmp_path, "name", load=load, build=builder("x"))
    file = tmp_path / "name" / "b"
    file.unlink() if damage == "missing" else file.write_text("other")
    assert fetch(tmp_path, "name", load=load, build=builder("y")) == "y"
    assert os.listdir(tmp_path) == ["name"]


def test_of_two_that_finish_at_once_the_first_stays(tmp_path):
    def slow(folder):
        builder("mine")(folder)
        assert fetch(tmp_path, "name", load=load, build=builder("theirs")) == "theirs"

    assert fetch(tmp_path, "name", load=load, build=slow) == "theirs"
    assert os.listdir(tmp_path) == ["name"]


def test_files_are_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))[:5])
        real_fsync(descriptor)

    def rename(old, new):
        real_rename(old, new)
        events.append("rename")

    monkeypatch.setattr(token_file.os, "fsync", fsync)
    monkeypatch.setattr(token_file.os, "rename", rename)
    fetch(tmp_path, "name", load=load, build=builder("x"))
    assert sorted(events[:2]) == ["a", "b"]
    assert events[2:] == ["new", "rename", tmp_path.name[:5]]
