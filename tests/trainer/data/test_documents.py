import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data.corpus import documents
from halfstep.trainer.data.corpus.documents import Span, read_pieces, whole
from halfstep.trainer.data.sources import find_sources, inspect_file


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(min_size=1), st.integers(4, 12))
def test_any_text_file_is_read_as_it_is(write, text, size):
    if not text.startswith("\ufeff"):
        assert read(write("a.txt", text), size=size) == [text]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(), min_size=1), st.integers(4, 12), st.booleans())
def test_any_record_is_read_as_it_is(write, texts, size, ascii_only):
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    path = write("a.jsonl", "\n".join(lines))
    assert read(path, size=size) == [text for text in texts if text]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(min_size=1), st.integers(4, 12))
def test_source_bytes_add_up_to_the_file(write, text, size):
    record = write("a.jsonl", [{"text": text}])
    for path in (write("a.txt", "\ufeffx" + text), record):
        spans = whole([inspect_file(path)])
        assert sum(p.source_bytes for p in read_pieces(spans, size)) == path.stat().st_size


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


def test_only_a_line_feed_ends_a_record(write):
    # U+2028 and U+0085 end a line for str.splitlines, not for JSON Lines.
    assert read(write("a.jsonl", '{"text": "a\u2028b\u0085c"}\n')) == ["a\u2028b\u0085c"]


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


def test_what_is_not_utf8_in_jsonl_is_named_with_its_offset(write):
    first = b'{"text": "a"}\n'
    with pytest.raises(DataError, match=rf"not UTF-8: byte 0xff at byte offset {len(first) + 10};"):
        read(write("a.jsonl", first + b'{"text": "\xff"}\n'))


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
        ("[" * 100_000, "not usable JSON|not JSON"),
        ('{"text": ' + "9" * 5000 + "}", "not usable JSON"),
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


def test_a_line_too_long_to_parse_is_refused(write, monkeypatch):
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 100)
    fits = '{"text": "' + "a" * 87 + '"}\n'
    assert len(fits) == 100
    assert read(write("a.jsonl", fits)) == ["a" * 87]
    with pytest.raises(DataError, match=r"a\.jsonl:2: longer than 100 bytes; split the record"):
        read(write("a.jsonl", fits + "a" + fits))


def test_a_record_file_that_shrinks_is_noticed(write):
    path = write("a.jsonl", [{"text": "a"}, {"text": "b"}])
    spans = whole([inspect_file(path)])
    path.write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: the file ended while it was read"):
        list(read_pieces(spans))


@pytest.mark.parametrize("unit", [b"words and\n", b"x"])
def test_memory_does_not_grow_with_the_file(write, unit):
    path = write("a.txt", unit * (24_000_000 // len(unit)))
    tracemalloc.start()
    try:
        for _ in read_pieces(whole([inspect_file(path)])):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000  # a few chunks of 1 MiB and pieces of 256 KiB, of a file of 24 MB
