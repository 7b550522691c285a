import json

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data.corpus import read_pieces, split_corpus
from halfstep.trainer.data.records import find_sources

LOOSE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def parts(paths, fraction):
    found = find_sources(tuple(map(str, paths)), "data.train")
    return split_corpus(found, fraction)


def texts(paths, fraction):
    return tuple("".join(p.text for p in read_pieces(part)) for part in parts(paths, fraction))


def raw(part):
    return b"".join(s.source.path.read_bytes()[s.start : s.stop] for s in part)


@LOOSE
@given(
    st.lists(st.text(min_size=1, alphabet="ab é\n"), min_size=1, max_size=5),
    st.floats(0.01, 0.99),
)
def test_every_byte_is_in_one_part_once_and_in_order(write, contents, fraction):
    paths = [write(f"{i}.txt", text) for i, text in enumerate(contents)]
    total = b"".join(path.read_bytes() for path in paths)
    if len("".join(contents)) == 1:
        return  # one character cannot be two parts; see the last test
    train, validation = parts(paths, fraction)
    assert raw(train) + raw(validation) == total
    assert raw(train)
    assert raw(validation)
    raw(train).decode()
    raw(validation).decode()


@pytest.mark.parametrize("ending", ["\n", ""])
def test_the_share_is_about_right_when_lines_are_short(write, ending):
    content = ("x" * 9 + (ending or "x")) * 10_000
    _train, validation = parts([write("a.txt", content)], 0.25)
    assert abs(len(raw(validation)) - 25_000) <= 10


LINES = [f"line {number:03d}\n" for number in range(100)]
X, Y = {"text": "x" * 50}, {"text": "y" * 50}


@pytest.mark.parametrize(
    ("contents", "fraction", "train", "validation"),
    [
        # a single file after a newline near the place, or the one before where none follows
        ({"a.txt": "".join(LINES)}, 0.1, "".join(LINES[:90]), "".join(LINES[90:])),
        ({"a.txt": "a" * 50 + "\n" + "b" * 49}, 0.1, "a" * 50 + "\n", "b" * 49),
        # at the border of two files that lies at the place; by bytes, not by the number of files
        ({"a.txt": "a" * 90, "b.txt": "b\n" * 5}, 0.1, "a" * 90, "b\n" * 5),
        ({"a.txt": "a\n" * 450, "b": "b", "c": "c\n" * 50}, 0.1, "a\n" * 450 + "b", "c\n" * 50),
        # a first record that holds nearly everything stays in train, that of a later file does not
        ({"a.jsonl": [{"text": "x" * 5000}, {"text": "y"}]}, 0.1, "x" * 5000, "y"),
        ({"a.jsonl": [X], "b.jsonl": [Y] * 2}, 0.5, "x" * 50, "y" * 100),
    ],
)
def test_where_the_cut_falls(write, contents, fraction, train, validation):
    paths = [write(name, content) for name, content in contents.items()]
    assert texts(paths, fraction) == (train, validation)


@LOOSE
@given(st.lists(st.text(max_size=20), min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_records_stay_whole(write, records, fraction):
    lines = [json.dumps({"text": text}) + "\n" for text in records]
    train, validation = parts([write("a.jsonl", "".join(lines))], fraction)
    first, second = raw(train).decode(), raw(validation).decode()
    assert first + second == "".join(lines)
    assert first.endswith("\n")
    assert second.startswith("{")
    # The record that holds the place is the first of validation, or the only one of train.
    place = len("".join(lines)) - max(1, round(len("".join(lines)) * fraction))
    assert len(first) <= place or first == lines[0]
    assert len(first) + len(second.splitlines(keepends=True)[0]) > place or first == lines[0]


def test_a_record_border_is_found_across_read_blocks(write, monkeypatch):
    monkeypatch.setattr("halfstep.trainer.data.records.CHUNK_BYTES", 7)
    records = [{"text": "x" * 50}, {"text": "y" * 50}, {"text": "z"}]
    assert texts([write("a.jsonl", records)], 0.4) == ("x" * 50, "y" * 50 + "z")


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", "a"), ("b.txt", "猫"), ("c.jsonl", '{"text": "c"}\n')]
)
def test_a_corpus_that_has_no_two_parts_is_refused(write, name, content):
    with pytest.raises(DataError, match=rf"{name}: \d+ bytes in too few .* data\.validation"):
        parts([write(name, content)], 0.5)
