import builtins
import errno
import hashlib
import os
from pathlib import Path

import pytest

from halfstep.errors import DataError
from halfstep.trainer.data import records
from halfstep.trainer.data.records import (
    check_unchanged,
    content_sha256,
    find_sources,
    inspect_file,
    read_chunks,
)

FIELD = "data.train"


def find(*paths):
    return find_sources(tuple(str(path) for path in paths), FIELD)


def names(found):
    return [source.path.name for source in found]


def test_a_named_file_is_text_whatever_its_suffix(write):
    found = find(write("a.md", "a"), write("b", "bb"), write("c.jsonl", "{}"))
    assert [(s.path.name, s.kind, s.size) for s in found] == [
        ("a.md", "text", 1),
        ("b", "text", 2),
        ("c.jsonl", "jsonl", 2),
    ]


def test_a_folder_is_searched_in_the_order_of_relative_paths(write, tmp_path):
    for name in ("f/z.txt", "f/a/y.md", "f/a.py", "f/b/c/x.JSONL", "f/picture.png", "f/notes"):
        write(name, "text")
    assert names(find(tmp_path / "f")) == ["a.py", "y.md", "x.JSONL", "z.txt"]


def test_hidden_names_in_a_folder_are_skipped_but_can_be_named(write, tmp_path):
    write("f/.git/x.txt", "text")
    hidden = write("f/.x.txt", "text")
    write("f/y.txt", "text")
    assert names(find(tmp_path / "f")) == ["y.txt"]
    assert names(find(hidden)) == [".x.txt"]
    assert names(find(tmp_path / "f" / ".git")) == ["x.txt"]


def test_the_home_folder_is_expanded(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("a.txt", "text")
    assert find("~/a.txt")[0].path == tmp_path / "a.txt"


@pytest.mark.parametrize(
    ("make", "given", "why"),
    [
        (lambda at: None, "nowhere.txt", r"nowhere\.txt: no such file or folder"),
        (
            lambda at: (at / "picture.png").write_text("text"),
            ".",
            r": this folder .* no \.txt, \.md, \.jsonl, \.py",
        ),
        (
            lambda at: (at / "e.txt").touch(),
            "e.txt",
            r"e\.txt: the file is empty; remove it from data\.train",
        ),
        (lambda at: os.mkfifo(at / "pipe"), "pipe", "pipe: not a regular file"),
    ],
)
def test_what_is_no_text_file_is_refused_by_name(tmp_path, make, given, why):
    make(tmp_path)
    with pytest.raises(DataError, match=why):
        find(tmp_path / given)


def test_empty_files_in_folders_are_left_out_unless_all_are_empty(write, tmp_path):
    write("f/__init__.py", "")
    with pytest.raises(DataError, match=r"f: this folder of data\.train holds no .* with text"):
        find(tmp_path / "f")
    write("f/a.py", "a")
    assert names(find(tmp_path / "f")) == ["a.py"]


def test_an_unreadable_file_names_the_reason(write, monkeypatch):
    path = write("a.txt", "text")
    source = inspect_file(path)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Root may read everything, so the refusal of the system is played.
    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: Permission denied"):
        content_sha256([source])
    monkeypatch.undo()
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: Permission denied"):
        inspect_file(path)


def test_an_unreadable_folder_is_not_skipped_in_silence(write, tmp_path, monkeypatch):
    write("f/a.txt", "text")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    (tmp_path / "f" / "locked").mkdir()
    monkeypatch.setattr(records.os, "scandir", scandir)
    with pytest.raises(DataError, match="locked: cannot be read: Permission denied"):
        find(tmp_path / "f")


def test_the_content_hash_follows_from_kind_size_and_bytes_in_order(write):
    a, b = write("a.txt", "alpha"), write("b.jsonl", "{}")
    expected = hashlib.sha256(b"text:5:alpha" + b"jsonl:2:{}").hexdigest()
    assert content_sha256(find(a, b)) == expected
    assert content_sha256(find(b, a)) != expected
    a.rename(a.with_name("renamed.txt"))
    assert content_sha256(find(a.with_name("renamed.txt"), b)) == expected


def test_the_content_hash_reports_every_byte(write):
    calls = []
    found = find(write("a.txt", "alpha"), write("b.txt", "be"))
    content_sha256(found, lambda *call: calls.append(call))
    assert calls == [("hash", 5, 7), ("hash", 7, 7)]


def test_a_file_that_shrinks_or_grows_or_vanishes_is_noticed(write):
    path = write("a.txt", "alpha")
    source = inspect_file(path)
    check_unchanged([source])
    os.utime(path, ns=(source.mtime_ns + 1, source.mtime_ns + 1))
    with pytest.raises(DataError, match="changed while it was read"):
        check_unchanged([source])
    path.write_bytes(b"alp")
    os.utime(path, ns=(source.mtime_ns, source.mtime_ns))
    with pytest.raises(DataError, match=r"a\.txt: changed while it was read \(was 5 bytes\)"):
        list(read_chunks(source, 0, source.size))
    with pytest.raises(DataError, match="changed while it was read"):
        check_unchanged([source])
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        check_unchanged([source])


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_chunks_join_to_the_bytes_asked_for(write, monkeypatch, chunk):
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk)
    source = inspect_file(write("a.txt", "0123456789"))
    parts = list(read_chunks(source, 2, 9))
    assert b"".join(parts) == b"2345678"
    assert max(map(len, parts)) <= chunk
