import itertools
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data import corpus
from halfstep.trainer.data.corpus import (
    Span,
    TextPiece,
    character_start,
    encode_pieces,
    read_pieces,
    sample_pieces,
    split_pieces,
    whole,
)
from halfstep.trainer.data.records import find_sources, inspect_file
from halfstep.trainer.data.tokenizer import ByteTokenizer, train_bpe


def read(*paths, size=1 << 18):
    """Joins pieces to documents, by what a piece promises."""
    found = []
    for piece in read_pieces(whole(find_sources(tuple(map(str, paths)), "data.train")), size):
        assert piece.text
        assert piece.text_bytes == len(piece.text.encode())
        if piece.begins:
            found.append("")
        found[-1] += piece.text
    return found


def test_a_text_file_is_one_document_and_a_line_of_jsonl_is_one(write):
    found = read(
        write("a.txt", "one\ntwo"), write("b.jsonl", [{"text": "x\ny"}, {"text": "z", "k": 1}])
    )
    assert found == ["one\ntwo", "x\ny", "z"]


SMALL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def source_bytes(path, size):
    return sum(piece.source_bytes for piece in read_pieces(whole([inspect_file(path)]), size))


@SMALL
@given(st.text(min_size=1), st.integers(4, 12), st.sampled_from(["", "\ufeff"]))
def test_any_text_file_is_read_as_it_is(write, text, size, mark):
    text = "x" + text if mark else text.lstrip("\ufeff") or "x"
    path = write("a.txt", mark + text)
    assert read(path, size=size) == [text]
    assert source_bytes(path, size) == path.stat().st_size


@SMALL
@given(st.lists(st.text(), min_size=1), st.integers(4, 12), st.booleans())
def test_any_record_is_read_as_it_is(write, texts, size, ascii_only):
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in [*texts, "x"]]
    path = write("a.jsonl", "\n".join(lines))
    assert read(path, size=size) == [text for text in [*texts, "x"] if text]
    if all(texts):  # what an empty record uses up is not told
        assert source_bytes(path, size) == path.stat().st_size


def test_line_ends_and_nul_are_kept(write):
    assert read(write("a.txt", b"a\r\nb\rc\n\0d")) == ["a\r\nb\rc\n\0d"]


def test_a_byte_order_mark_is_dropped_only_at_the_start(write):
    mark = b"\xef\xbb\xbf"
    assert read(write("a.txt", mark + b"a" + mark)) == ["a\ufeff"]
    assert read(write("a.jsonl", mark + b'{"text": "a"}\n')) == ["a"]
    assert read(write("b.txt", mark)) == []
    assert read(write("c.txt", "abcd\n\ufeffe"), size=5) == ["abcd\n\ufeffe"]


def test_blank_lines_and_empty_texts_of_jsonl_are_no_documents(write):
    assert read(write("a.jsonl", b'\n{"text": ""}\r\n  \n{"text": "a"}\n\n')) == ["a"]


@pytest.mark.parametrize("size", [4, 7, 1000])
@pytest.mark.parametrize(
    ("data", "byte", "offset"),
    [
        (b"ab\xffcd", "ff", 2),
        (b"\xef\xbb\xbfab\xff", "ff", 5),
        (b"some words and a lot more \xc3", "c3", 26),
        ("é".encode() * 10 + b"\x80\x80\x80\x80\x80\x80\x80", "80", 20),
        (b"\xed\xa0\x80", "ed", 0),  # half a surrogate pair
    ],
)
def test_what_is_not_utf8_is_named_with_its_offset(write, data, byte, offset, size):
    with pytest.raises(
        DataError, match=rf"a\.txt: not UTF-8: byte 0x{byte} at byte offset {offset};"
    ):
        read(write("a.txt", data), size=size)


def test_what_is_not_utf8_in_jsonl_is_named_with_its_line(write):
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8: byte 0xff at byte 11 of the line"):
        read(write("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": "a"', r"not JSON: .* at column \d+"),
        ("[1]", "a JSON list, not an object"),
        ('"a"', "a JSON str, not an object"),
        ("{}", r'no field "text" \(fields here: none\)'),
        ('{"content": "a", "id": 1}', r'no field "text" \(fields here: content, id\)'),
        ('{"text": 5}', '"text" must be a string, got int'),
        ('{"text": null}', '"text" must be a string, got NoneType'),
        ('{"text": "\\ud800"}', '"text" holds half a surrogate pair'),
    ],
)
def test_a_bad_line_is_named_with_its_number(write, line, why):
    path = write("a.jsonl", '{"text": "a"}\n\n' + line + '\n{"text": "b"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {why}"):
        read(path)


def test_line_numbers_count_from_the_start_of_the_file_not_of_the_span(write):
    first = '{"text": "a"}\n'
    source = inspect_file(write("a.jsonl", first * 3 + "{}\n"))
    with pytest.raises(DataError, match=r"a\.jsonl:4: "):
        list(read_pieces([Span(source, len(first) * 2, source.size)]))


def test_a_record_file_that_shrinks_is_noticed(write):
    path = write("a.jsonl", [{"text": "a"}, {"text": "b"}])
    spans = whole([inspect_file(path)])
    path.write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: the file ended while it was read"):
        list(read_pieces(spans))


@pytest.mark.parametrize("unit", [b"words and\n", b"x"])
def test_memory_does_not_grow_with_the_file(write, unit):
    path = write("a.txt", unit * (12_000_000 // len(unit)))
    tracemalloc.start()
    try:
        for _ in read_pieces(whole([inspect_file(path)])):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000  # a few chunks of 1 MiB and pieces of 256 KiB, of a file of 12 MB


TEXT = st.text(
    alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\r\t"))
)


def chunked(data, cuts):
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(TEXT, st.integers(4, 40), st.lists(st.integers(0, 60)))
def test_pieces_are_whole_and_small_and_join_to_the_text_however_it_arrived(text, size, cuts):
    data = text.encode()
    pieces = list(split_pieces(chunked(data, cuts), size))
    assert pieces == list(split_pieces([data], size))
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= size for piece in pieces)
    for piece in pieces:
        piece.decode("utf-8")  # raises when a character is cut


@given(st.binary(max_size=100), st.integers(4, 20))
def test_bytes_that_are_no_text_come_through_unharmed(data, size):
    pieces = list(split_pieces([data], size))
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= size for piece in pieces)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("one\ntwo three\nfour", ["one\n", "two three\n", "four"]),  # after a newline
        ("one two three four", ["one two", " three", " four"]),  # before a blank
        ("one\ttwo three", ["one\ttwo", " three"]),
        ("abcdefghijklmnop", ["abcdefghij", "klmnop"]),  # anywhere
        ("ééééééé", ["ééééé", "éé"]),
        ("aéééééé", ["aéééé", "éé"]),  # not within a character
        ("line\r\nline\r\n", ["line\r\n", "line\r\n"]),
    ],
)
def test_cuts_prefer_newlines_then_blanks_then_characters(text, pieces):
    found = [piece.decode() for piece in split_pieces([text.encode()], 10)]
    assert found == pieces


@given(st.characters(exclude_categories=["Cs"]), st.text(max_size=3))
def test_character_start_finds_the_first_byte(character, before):
    start = len(before.encode())
    data = (before + character).encode()
    assert {character_start(data, i) for i in range(start, len(data))} == {start}


@pytest.mark.parametrize("limit", [50, 100, 333, 999, 5000])
def test_a_sample_is_even_and_within_its_limit(monkeypatch, limit):
    monkeypatch.setattr(corpus, "SAMPLE_BYTES", limit)
    texts = [TextPiece(f"{number:09d}\n", 10, 10, True) for number in range(100)]
    calls = []
    taken = list(sample_pieces(texts, 1000, lambda *call: calls.append(call)))
    assert calls == [("train tokenizer", done, 1000) for done in range(10, 1001, 10)]
    assert sum(map(len, taken)) == min(1000, limit // 10 * 10)
    numbers = [int(text) for text in taken]
    assert numbers == sorted(numbers)
    gaps = [b - a for a, b in itertools.pairwise(numbers)]
    # Evenly spread: no gap is more than one piece longer than another.
    assert max(gaps) - min(gaps) <= 1
    assert numbers[0] <= max(gaps)
    assert 100 - numbers[-1] <= max(gaps)


def test_a_sample_of_uneven_pieces_stays_within_its_limit(monkeypatch):
    monkeypatch.setattr(corpus, "SAMPLE_BYTES", 300)
    sizes = [1 + number * 7 % 90 for number in range(60)]
    texts = [TextPiece("x" * size, size, size, True) for size in sizes]
    assert 200 <= sum(map(len, sample_pieces(texts, sum(sizes)))) <= 300


BPE = train_bpe(["the cat sat on the mat " * 9], 265)

DOCUMENTS = st.lists(st.lists(st.text(min_size=1), min_size=1, max_size=3), max_size=6)


def pieces_of(found):
    return [
        TextPiece(text, len(text.encode()), 10, i == 0)
        for document in found
        for i, text in enumerate(document)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DOCUMENTS, st.sampled_from([1, 8, 1000]))
def test_documents_are_separated_by_a_newline_or_by_end_of_text(monkeypatch, texts, batch):
    monkeypatch.setattr(corpus, "BATCH_BYTES", batch)
    found = list(encode_pieces(pieces_of(texts), ByteTokenizer(), 99))
    text = "\n".join("".join(document) for document in texts).encode()
    assert np.concatenate([[], *(part.ids for part in found)]).tolist() == list(text)
    assert sum(part.text_bytes for part in found) == len(text)

    found = list(encode_pieces(pieces_of(texts), BPE, 99))
    ids = np.concatenate([[], *(part.ids for part in found)]).astype(int).tolist()
    assert ids.count(BPE.end_of_text) == max(len(texts) - 1, 0)
    assert BPE.decode(ids) == "<|endoftext|>".join("".join(d) for d in texts)
    assert sum(part.text_bytes for part in found) == sum(len("".join(d).encode()) for d in texts)


@pytest.mark.parametrize("batch", [1, 25, 1000])
def test_source_bytes_and_progress_count_up_to_the_total(monkeypatch, batch):
    monkeypatch.setattr(corpus, "BATCH_BYTES", batch)
    calls = []
    given_pieces = pieces_of([["aaaaaaaaaa"] * 4, ["bbbbbbbbbb"] * 2])
    list(encode_pieces(given_pieces, ByteTokenizer(), 60, lambda *call: calls.append(call)))
    assert calls[-1] == ("encode", 60, 60)
    assert [call[1] for call in calls] == sorted({call[1] for call in calls})
    assert len(calls) == {1: 6, 25: 2, 1000: 1}[batch]
