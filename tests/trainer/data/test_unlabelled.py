import io
import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.labelled.unlabelled import read_texts

LOOSE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
EXPECTED = [(1, "x y"), (2, "z")]


def refusal(source, column=""):
    with pytest.raises(DataError) as error:
        list(read_texts(source, column))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.jsonl", '\n{"text": "x y", "id": 3}\n\n{"text": "z"}\n', ""),
        ("a.jsonl", '{"body": "x y", "text": "q"}\n{"body": "z"}\n', "body"),
        ("a.csv", "label,Sentence\na,x y\nb,z\n", ""),
        ("a.csv", "3,x y\n4,z\n", "2"),
        ("a.tsv", "text\tmore\r\nx y\t1\r\nz\t2\r\n", ""),
        ("a.txt", "\ufeffx y\r\nz", ""),
    ],
)
def test_every_format_gives_the_same_texts(write, name, content, column):
    assert list(read_texts(write(name, content), column)) == EXPECTED


@pytest.mark.parametrize(
    "content",
    [
        "x y\nz\n",
        "x y\nz",
        '\n \n{"text": "x y"}\n{"text": "z"}\n',
        '\ufeff{"text": "x y"}\n{"text":"z"}',
    ],
)
def test_a_stream_is_lines_or_objects(content):
    assert list(read_texts(io.StringIO(content))) == EXPECTED


def test_a_record_of_several_lines_counts_once(write):
    path = write("a.csv", 'text\n"a\nb"\nc\n')
    assert list(read_texts(path)) == [(1, "a\nb"), (2, "c")]


def test_a_first_line_that_is_a_usual_name_is_a_text_like_any_other(write):
    assert list(read_texts(write("a.txt", "text\nreview\n"))) == [(1, "text"), (2, "review")]


@LOOSE
@given(st.lists(st.text(st.characters(codec="utf-8")).filter(str.strip), min_size=1))
def test_whatever_can_be_written_is_read_back(write, texts):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    expected = list(enumerate(texts, 1))
    assert list(read_texts(io.StringIO(lines))) == expected
    assert list(read_texts(write("a.jsonl", lines))) == expected


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "x\n\ny\n", "a.txt:2: the text is empty"),
        ("a.txt", b"x\n\xff\n", "a.txt:2: not UTF-8"),
        ("a.txt", "", "the file is empty"),
        ("a.csv", "text,b\nx,1\n ,1\n", "a.csv:3: the text is empty"),
        ("a.csv", "a,b\nx,1\n", "no column that usually holds the text"),
        ("a.jsonl", '{"text": "x"}\n{"text": ""}\n', "a.jsonl:2: the text is empty"),
        (
            "a.jsonl",
            '{"text": "x"}\n{"text": null}\n',
            "a.jsonl:2: the text must be a string, got null",
        ),
        ("a.jsonl", '{"text": "x"}\n{"t": 1}\n', "a.jsonl:2: no field 'text'"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "a.jsonl:1: the text holds half a surrogate pair"),
        ("a.json", "[]", "read from .csv, .tsv, .jsonl, .txt files, not from .json"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_line(write, name, content, says):
    assert says in refusal(write(name, content))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("\nx\n", "standard input:1: the text is empty"),
        ('\n{"text": "x"}\ny\n', "standard input:3: not JSON"),
        (
            '{"x": 1}\n',
            "standard input:1: no column that usually holds the text (columns here: 'x')",
        ),
        ("{broken\n", "standard input:1: not JSON"),
        ("a\udcff\n", "standard input:1: the text holds half a surrogate pair, or bytes"),
    ],
)
def test_a_stream_is_refused_with_its_line(content, says):
    assert says in refusal(io.StringIO(content))


def test_a_stream_that_is_not_utf_8_is_refused():
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    assert "standard input: not UTF-8 after line 0" in refusal(stream)


def test_an_empty_stream_has_no_texts():
    assert list(read_texts(io.StringIO(""))) == []


def test_column_0_is_refused(write):
    with pytest.raises(ConfigError, match="counted from 1"):
        read_texts(write("a.csv", "x\n"), "0")


def test_texts_come_before_the_end_is_known():
    class Endless(io.StringIO):
        def readline(self):
            return "more\n"

    found = read_texts(Endless())
    assert [next(found) for _ in range(3)] == [(1, "more"), (2, "more"), (3, "more")]


def test_memory_does_not_grow_with_the_input(write):
    path = write("a.jsonl", [{"text": "x" * 1000}] * 20_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_texts(path)) == 20_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20  # the file has 20 MB; a read buffer and a few lines are some 100 kB
