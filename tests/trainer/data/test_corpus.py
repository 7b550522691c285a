"""From files to pieces of documents: what is read, where it is cut, what is refused."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data import corpus
from halfstep.trainer.data.corpus import (
    ByteTokenizer,
    TextPiece,
    encode_pieces,
    read_pieces,
    split_corpus,
    train_bpe,
)
from halfstep.trainer.data.records import find_sources

LOOSE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def find(*paths):
    return find_sources(tuple(map(str, paths)))


def names(found):
    return [source.path.name for source in found]


def read(*paths, size=1 << 18):
    """Joins pieces to documents, by what a piece promises."""
    found = []
    for piece in read_pieces(find(*paths), size):
        assert 0 < len(piece.text.encode()) <= size
        if piece.begins:
            found.append("")
        found[-1] += piece.text
    return found


def test_a_folder_is_searched_in_the_order_of_relative_paths(write, tmp_path):
    for name in ("f/z.txt", "f/a/y.md", "f/a.py", "f/b/c/x.JSONL", "f/picture.png", "f/notes"):
        write(name, "text")
    write("f/__init__.py", "")
    write("f/.git/x.txt", "text")
    hidden = write("f/.x.txt", "text")
    assert names(find(tmp_path / "f")) == ["a.py", "y.md", "x.JSONL", "z.txt"]
    assert names(find(hidden)) == [".x.txt"]
    for empty in (write("g/e.txt", ""), write("g/picture.png", "text").parent):
        with pytest.raises(DataError, match=r"(e\.txt|g): there is no text in it"):
            find(empty)
    for path, name in (("nowhere.txt", "nowhere.txt"), (" ", "an empty path")):
        with pytest.raises(DataError, match=f"{name}: no such file or folder"):
            find(path)


@LOOSE
@given(st.text(min_size=1), st.integers(4, 12), st.sampled_from(["", "\ufeff"]))
def test_any_text_file_is_read_as_it_is(write, text, size, mark):
    text = "x" + text if mark else text.lstrip("\ufeff") or "x"
    assert read(write("a.txt", mark + text), size=size) == [text]


def test_line_ends_marks_and_blank_lines(write):
    assert read(write("a.txt", b"a\r\nb\rc\n\0d")) == ["a\r\nb\rc\n\0d"]
    mark = b"\xef\xbb\xbf"
    assert read(write("a.txt", mark + b"a" + mark), write("b.txt", mark)) == ["a\ufeff"]
    assert read(write("c.txt", "abcd\n\ufeffe"), size=5) == ["abcd\n\ufeffe"]


@pytest.mark.parametrize("size", [4, 1000])
@pytest.mark.parametrize(
    ("data", "byte", "offset"),
    [
        (b"ab\xffcd", "ff", 2),
        (b"\xef\xbb\xbfab\xff", "ff", 5),
        (b"some words and a lot more \xc3", "c3", 26),
        ("é".encode() * 10 + b"\x80\x80\x80\x80\x80\x80\x80", "80", 20),
    ],
)
def test_what_is_not_utf8_is_named_with_its_offset(write, data, byte, offset, size):
    why = rf"a\.txt: not UTF-8: byte 0x{byte} at byte offset {offset};"
    with pytest.raises(DataError, match=why):
        read(write("a.txt", data), size=size)


@pytest.mark.parametrize("unit", [b"words and\n", b"x"])
def test_memory_does_not_grow_with_the_file(write, unit):
    sources = find(write("a.txt", unit * (12_000_000 // len(unit))))
    tracemalloc.start()
    try:
        for _ in read_pieces(sources):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000  # a few pieces of 256 KiB, of a file of 12 MB


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("one\ntwo three\nfour", ["one\n", "two three\n", "four"]),  # after a newline
        ("one two three four", ["one two", " three", " four"]),  # before a blank
        ("one\ttwo three", ["one\ttwo", " three"]),
        ("abcdefghijklmnop", ["abcdefghij", "klmnop"]),  # anywhere
        ("aéééééé", ["aéééé", "éé"]),  # not within a character
        ("line\r\nline\r\n", ["line\r\n", "line\r\n"]),
    ],
)
def test_cuts_prefer_newlines_then_blanks_then_characters(write, text, pieces):
    assert [piece.text for piece in read_pieces(find(write("a.txt", text)), 10)] == pieces


BPE = train_bpe(["the cat sat on the mat " * 9], 265)
DOCUMENTS = st.lists(st.lists(st.text(min_size=1), min_size=1, max_size=3), max_size=6)


@LOOSE
@given(DOCUMENTS, st.sampled_from([1, 8, 1000]))
def test_documents_are_separated_by_a_newline_or_by_end_of_text(monkeypatch, texts, batch):
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", batch)
    pieces = [TextPiece(text, i == 0) for document in texts for i, text in enumerate(document)]
    found = list(encode_pieces(pieces, ByteTokenizer()))
    text = "\n".join("".join(document) for document in texts).encode()
    assert np.concatenate([[], *(ids for ids, _ in found)]).tolist() == list(text)
    assert sum(count for _, count in found) == len(text)

    found = list(encode_pieces(pieces, BPE))
    ids = np.concatenate([[], *(ids for ids, _ in found)]).astype(int).tolist()
    assert ids.count(BPE.end_of_text) == max(len(texts) - 1, 0)
    assert BPE.decode(ids) == "<|endoftext|>".join("".join(d) for d in texts)
    assert sum(count for _, count in found) == sum(len("".join(d).encode()) for d in texts)


# The tail of a corpus becomes validation.


def raw(part):
    return b"".join(s.path.read_bytes()[s.start : s.stop] for s in part)


@LOOSE
@given(
    st.lists(st.text(min_size=1, alphabet="ab é\n"), min_size=1, max_size=5),
    st.floats(0.01, 0.5),
)
def test_every_byte_is_in_one_part_once_and_in_order(write, contents, fraction):
    paths = [write(f"{i}.txt", text) for i, text in enumerate(contents)]
    if len("".join(contents)) < 4:
        return  # one character cannot be two parts; see the last test
    train, validation = map(raw, split_corpus(find(*paths), fraction))
    assert train + validation == b"".join(path.read_bytes() for path in paths)
    assert train
    assert validation
    assert train.decode() + validation.decode()


LINES = [f"line {number:03d}\n" for number in range(100)]


@pytest.mark.parametrize(
    ("contents", "fraction", "train", "validation"),
    [
        # a single file after a newline that follows the place, or there
        ({"a.txt": "".join(LINES)}, 0.1, "".join(LINES[:90]), "".join(LINES[90:])),
        ({"a.txt": "a" * 85 + "\n" * 9 + "b" * 6}, 0.1, "a" * 85 + "\n" * 5, "\n" * 4 + "b" * 6),
        ({"a.txt": "a" * 50 + "\n" + "b" * 49}, 0.1, "a" * 50 + "\n" + "b" * 39, "b" * 10),
        ({"a.txt": "é" * 50 + "\n"}, 0.1, "é" * 45, "é" * 5 + "\n"),
        # at the border of two files that lies at the place; by bytes, not by the number of files
        ({"a.txt": "a" * 90, "b.txt": "b\n" * 5}, 0.1, "a" * 90, "b\n" * 5),
        ({"a.txt": "a\n" * 450, "b": "b", "c": "c\n" * 50}, 0.1, "a\n" * 450 + "b", "c\n" * 50),
    ],
)
def test_where_the_cut_falls(write, contents, fraction, train, validation):
    paths = [write(name, content) for name, content in contents.items()]
    parts = split_corpus(find(*paths), fraction)
    found = ["".join(piece.text for piece in read_pieces(part)) for part in parts]
    assert found == [train, validation]


def test_a_corpus_that_has_no_two_parts_is_refused(write):
    with pytest.raises(DataError, match=r"b\.txt: 3 bytes in too few .* data\.validation"):
        split_corpus(find(write("b.txt", "猫")), 0.5)
