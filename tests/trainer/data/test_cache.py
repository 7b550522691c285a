import errno
import os

import pytest

from halfstep.errors import DataError
from halfstep.trainer.data import token_file
from halfstep.trainer.data.token_file import cache_root, fetch


def load(folder):
    """A result is good when its two files agree."""
    try:
        first, second = (folder / "a").read_text(), (folder / "b").read_text()
    except OSError:
        return None
    return first if first == second else None


def builder(value, log=None):
    def build(folder):
        if log is not None:
            log.append(value)
        (folder / "a").write_text(value)
        (folder / "b").write_text(value)

    return build


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [
        ("/given", {"HALFSTEP_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/given"),
        ("", {"HALFSTEP_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ("", {"HALFSTEP_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/halfstep"),
        ("", {"HALFSTEP_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/halfstep"),
        ("~/c", {"HOME": "/me"}, "/me/c"),
    ],
)
def test_the_folder_is_found_in_the_documented_order(
    monkeypatch, configured, environment, expected
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_root(configured)) == expected


def test_a_result_is_built_once(tmp_path):
    root = tmp_path / "new" / "root"
    for value in "xy":
        assert fetch(root, "name", load=load, build=builder(value)) == "x"
    assert os.listdir(root) == ["name"]


@pytest.mark.parametrize("damage", ["missing file", "altered file", "empty folder", "stray file"])
def test_a_damaged_result_is_replaced(tmp_path, damage):
    fetch(tmp_path, "name", load=load, build=builder("x"))
    folder = tmp_path / "name"
    if damage == "altered file":
        (folder / "b").write_text("other")
    else:
        (folder / "b").unlink()
    if damage in ("empty folder", "stray file"):
        (folder / "a").unlink()
    if damage == "stray file":
        folder.rmdir()
        folder.write_text("stray")
    assert fetch(tmp_path, "name", load=load, build=builder("y")) == "y"
    assert os.listdir(tmp_path) == ["name"]


def test_of_two_that_finish_at_once_the_first_stays(tmp_path):
    def slow(folder):
        builder("mine")(folder)
        assert fetch(tmp_path, "name", load=load, build=builder("theirs")) == "theirs"

    assert fetch(tmp_path, "name", load=load, build=slow) == "theirs"
    assert os.listdir(tmp_path) == ["name"]


def test_a_disk_that_damages_everything_is_reported(tmp_path):
    log = []
    with pytest.raises(DataError, match=r"name: damaged as soon as .* check the disk"):
        fetch(tmp_path, "name", load=lambda folder: None, build=builder("x", log))
    assert log == ["x"]
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bad"), DataError("bad")])
def test_a_failed_build_leaves_nothing(tmp_path, error):
    def build(folder):
        (folder / "a").write_text("half")
        raise error

    with pytest.raises(type(error)):
        fetch(tmp_path, "name", load=load, build=build)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left; free some"),
        (errno.EDQUOT, "no space left"),
        (errno.EFBIG, "no space left"),
        (errno.EROFS, "cannot be written: Read-only file system; check the rights"),
    ],
)
def test_a_refusal_to_write_names_path_reason_and_way_out(tmp_path, number, words):
    def build(folder):
        raise OSError(number, os.strerror(number), str(folder / "tokens.bin"))

    with pytest.raises(DataError, match=rf"tokens\.bin: {words}.* data\.cache_dir") as caught:
        fetch(tmp_path, "name", load=load, build=build)
    assert "HALFSTEP_CACHE" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_cache_folder_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match=r"cache.* cannot be written"):
        fetch(tmp_path / "cache" / "tokens", "name", load=load, build=builder("x"))


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
