"""Formats, columns and everything that can be wrong with one input of labelled texts."""

import csv
import io
import json
import tracemalloc
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.labelled import _read, read_texts

LOOSE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
PAIRS = [
    ("I am glad", "joy"),
    ('say "hi", now\nand then', "fear"),
    ("\u4f60\u597d\u3000\U0001f600", "joy"),
]


def read(*paths, role="train", **fields):
    inputs = tuple(map(str, paths))
    texts, labels, first = _read(inputs, LabelledConfig(train=inputs, **fields), role)
    return SimpleNamespace(texts=texts, labels=labels, first=first)


def pairs(*paths, **fields):
    found = read(*paths, **fields)
    return list(zip(found.texts, found.labels, strict=True))


def refusal(*paths, **fields):
    with pytest.raises(DataError) as error:
        read(*paths, **fields)
    return str(error.value)


def table(rows, separator=",", end="\r\n"):
    out = io.StringIO()
    csv.writer(out, delimiter=separator, lineterminator=end).writerows(rows)
    return out.getvalue()


def objects(found, text="text", label="label"):
    return [{text: t, label: name, "more": 1} for t, name in found]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", table([("text", "label"), *PAIRS])),
        ("a.csv", table([("id", "Label ", " Text"), *((7, n, t) for t, n in PAIRS)], end="\n")),
        ("A.TSV", table([("tweet", "class"), *PAIRS], "\t")),
        ("a.jsonl", "\n\n".join(json.dumps(o) for o in objects(PAIRS))),
        ("a.jsonl", "\r\n".join(json.dumps(o, ensure_ascii=False) for o in objects(PAIRS))),
        ("a.json", json.dumps(PAIRS)),
        ("a.json", json.dumps(objects(PAIRS, "sentence", "emotion"), indent=1)),
    ],
)
def test_every_format_gives_the_same_texts_and_labels(write, name, content, mark):
    assert pairs(write(name, mark + content.encode())) == PAIRS


def test_nothing_is_guessed(write):
    # What pandas or Arrow would make of these: NaN, 7, a date, 1e+20, 1.
    kept = [("NA", "007"), ("2024-01-01", "null"), (" x ", "1e3"), ("3", "None")]
    assert pairs(write("a.csv", table([("text", "label"), *kept]))) == kept
    assert pairs(write("a.jsonl", objects(kept))) == kept
    labels = [99999999999999999999, "1", 1, "2024-01-01"]
    path = write("b.jsonl", [{"text": "x", "label": label} for label in labels])
    assert read(path).labels == list(map(str, labels))


def test_several_inputs_follow_each_other_each_with_its_own_columns(write):
    first = write("a.csv", "text,label\nx,1\n")
    second = write("b.jsonl", [{"review": "y", "target": 2}])
    assert pairs(first, second) == [("x", "1"), ("y", "2")]


SAFE = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


@LOOSE
@given(
    st.lists(st.tuples(SAFE, SAFE), min_size=1), st.sampled_from(["csv", "tsv", "jsonl", "json"])
)
def test_whatever_can_be_written_is_read_back(write, rows, kind):
    if kind in ("csv", "tsv"):
        out = io.StringIO()
        separator = "," if kind == "csv" else "\t"
        writer = csv.writer(out, delimiter=separator, quoting=csv.QUOTE_ALL)
        writer.writerows([("text", "label"), *rows])
        content = out.getvalue()
    elif kind == "jsonl":
        content = "".join(json.dumps(o) + "\n" for o in objects(rows))
    else:
        content = json.dumps(rows)
    assert pairs(write(f"a.{kind}", content)) == rows
    if kind == "jsonl":
        texts = [text for text, _ in rows]
        assert list(read_texts(io.StringIO(content))) == texts


def test_columns_can_be_named(write):
    path = write("a.csv", "text,content,label,class\na,b,c,d\n")
    assert pairs(path, text_column="content", label_column="class") == [("b", "d")]
    path = write("a.jsonl", [{"Text": "a", "text": "b", "x": "c"}])
    assert pairs(path, text_column="text", label_column="x") == [("b", "c")]


def test_labels_become_strings(write):
    path = write("a.jsonl", [{"text": "x", "label": v} for v in (1, True, 0, False, "1", -3, 1)])
    assert read(path).labels == ["1", "true", "0", "false", "1", "-3", "1"]


def test_the_first_place_of_each_label_is_kept(write):
    path = write("a.csv", 'text,label\n"two\nlines",a\nx,b\ny,a\n')
    assert read(path).first == {"a": f"{path}:2", "b": f"{path}:4"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "", ": the file is empty"),
        ("a.csv", "\n\n", "only blank lines"),
        ("a.csv", "text,label\n", "no texts in"),
        ("a.csv", "text,label\na,b,c\n", ":2: 3 fields where the first line has 2"),
        ("a.csv", "text,label\na,b\n\nc\n", ":4: 1 fields where the first line has 2"),
        ("a.csv", 'text,label\na,b\n"open,c\nd,e\n', ":3: the fields of the row that begins here"),
        ("a.tsv", 'text\tlabel\n"Hi," he said.\tb\n', ":2: the fields of the row"),
        ("a.csv", "text,label\rx,y\r", ":1: the fields of the row that begins here cannot"),
        ("a.csv", b"text,label\nx,y\n\xe9t\xe9,y\n", ":3: not UTF-8: byte 0xe9 at byte 1"),
        (
            "a.csv",
            "x,y\nz,w\n",
            ":2: no column that usually holds the text (columns here: 'x', 'y')",
        ),
        ("a.csv", "x,y\nz,w\n", "give its name by --text-column"),
        ("a.csv", "text,y\nz,w\n", "no column that usually holds the label"),
        ("a.csv", "text,y\nz,w\n", "give its name by --label-column"),
        (
            "a.csv",
            "text,Tweet,label\nx,y,z\n",
            "could hold the text (columns here: 'text', ",
        ),
        ("a.csv", "text,label,class\nx,y,z\n", "several columns could hold the label"),
        ("a.csv", "text,label\nx,a\n ,b\n\t,a\n,a\n", ":3: the text is empty; remove it"),
        ("a.csv", "text,label\nx,a\ny, \n", ":3: the label is empty"),
        ("a.jsonl", '{"text": "x", "label": "a"}\n[1]\n', ":2: a JSON list, not an object"),
        ("a.jsonl", '{"text": "x", "label": "a"}\n{"text"\n', ":2: not JSON"),
        ("a.jsonl", '{"text": "x", "label": ' + "9" * 5000 + "}\n", ":1: not usable JSON"),
        ("a.jsonl", '{"text": "x", "label": "a"}\n{"text": "y"}\n', ":2: no field 'label', which"),
        ("a.jsonl", '{"body": "x", "label": "a"}\n', ":1: no column that usually holds the text"),
        ("a.jsonl", '{"text": 3, "label": "a"}\n', ":1: the text must be a string, got int"),
        ("a.jsonl", '{"text": null, "label": "a"}\n', ":1: the text must be a string, got null"),
        ("a.jsonl", '\n{"text": "x", "label": 1.0}\n', ":2: the label must be a string, an int"),
        ("a.jsonl", '{"text": "x", "label": NaN}\n', "got float"),
        ("a.jsonl", '{"text": "x", "label": null}\n', "got null"),
        ("a.jsonl", '{"text": "x", "label": ["a"]}\n', "got list"),
        ("a.jsonl", '{"text": "x\\ud83d", "label": "a"}\n', ":1: the text holds half a surrogate"),
        ("a.jsonl", '{"text": "x", "label": "\\udc00"}\n', ":1: the label is empty or no text"),
        ("a.json", '{"text": []}', "no column that usually holds the label (columns here: 'text')"),
        ("a.json", '{"data": {}}', "no column that usually holds the text (columns here: 'data')"),
        ("a.json", '"x"', "must hold a JSON list"),
        ("a.json", "[]", "no texts in"),
        ("a.json", '[["x", "a"], "y"]', ': item 2: write [["text", "label"], ...] or'),
        ("a.json", '[["x", "a"], ["y"]]', ": item 2: no field 'label', which the first"),
        ("a.json", '[["x", "a", 1]]', ': item 1: write [["text", "label"]'),
        ("a.json", "[3]", ': item 1: write [["text", "label"]'),
        ("a.json", '[["x", "a"],\n["y", ]]', ":2: not JSON"),
        ("a.json", "[" * 100_000, "not usable JSON"),
        (
            "a.txt",
            "x",
            "read from .csv, .tsv, .jsonl, .json, .parquet files and datasets:NAME",
        ),
        ("a", "x", "not from names without suffix"),
        ("a.parquet", "x", "cannot be loaded"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(write, name, content, says):
    path = write(name, content)
    message = refusal(path)
    assert message.startswith(str(path)) or "no texts in" in message
    assert says in message


@pytest.mark.parametrize(
    ("name", "content", "fields", "says"),
    [
        ("a.csv", "text,label\nx,a\n", {"text_column": "body"}, "no column 'body' (columns here"),
        ("a.csv", "text,x\nx,a\n", {"label_column": "text"}, "the column 'text' cannot hold both"),
        ("a.json", '[["x", "a"]]', {"text_column": "body"}, "no column 'body'"),
        ("a.jsonl", '{"1": "x", "label": "a"}', {"text_column": "2"}, "no column '2'"),
    ],
)
def test_options_that_do_not_fit_the_file_are_refused(write, name, content, fields, says):
    assert says in refusal(write(name, content), **fields)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for name in ("a.csv", "a.jsonl", "a.json", "a.parquet"):
        assert "no such file" in refusal(tmp_path / name)
    (tmp_path / "b.csv").mkdir()
    assert "not a regular file" in refusal(tmp_path / "b.csv")
    (tmp_path / "c").mkdir()
    assert "a folder is datasets:FOLDER" in refusal(tmp_path / "c")


def test_a_field_beyond_the_limit_of_csv_is_refused_not_cut(write):
    limit = csv.field_size_limit()
    fits = write("a.csv", f'text,label\n"{"x" * limit}",a\n')
    assert len(read(fits).texts[0]) == limit
    assert "field larger than field limit" in refusal(
        write("b.csv", f'text,label\n"{"x" * (limit + 1)}",a\n')
    )


def test_only_a_line_feed_ends_a_line(write):
    text = "a\u2028b\u0085c\x0bd\x1ce"
    assert pairs(write("a.csv", f"text,label\n{text},x\n")) == [(text, "x")]
    line = json.dumps({"text": text, "label": "x"}, ensure_ascii=False)
    assert pairs(write("a.jsonl", line + "\n")) == [(text, "x")]


EXPECTED = ["x y", "z"]


def text_refusal(source, column=""):
    with pytest.raises(DataError) as error:
        list(read_texts(source, column))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.jsonl", '\n{"text": "x y", "id": 3}\n\n{"text": "z"}\n', ""),
        ("a.jsonl", '{"body": "x y", "text": "q"}\n{"body": "z"}\n', "body"),
        ("a.txt", "\ufeffx y\r\nz", ""),
        ("a.json", '[["x y"], ["z"]]', ""),
    ],
)
def test_every_format_gives_the_same_texts_to_predict(write, name, content, column):
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


def test_a_record_may_hold_line_ends_and_a_line_of_text_is_never_a_header(write):
    path = write("a.csv", 'text\n"a\nb"\nc\n')
    assert list(read_texts(path)) == ["a\nb", "c"]
    assert list(read_texts(write("a.txt", "text\nreview\n"))) == ["text", "review"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "x\n\ny\n", "a.txt:2: the text is empty"),
        ("a.txt", b"x\n\xff\n", "a.txt:2: not UTF-8"),
        ("a.txt", "", "the file is empty"),
        ("a.csv", "text,b\nx,1\n ,1\n", "a.csv:3: the text is empty"),
        ("a.jsonl", '{"text": "x"}\n{"text": null}\n', "a.jsonl:2: the text must be a string, got"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "a.jsonl:1: the text holds half a surrogate pair"),
        ("a.png", "x", "not from .png"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_its_line(write, name, content, says):
    assert says in text_refusal(write(name, content))


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
        ("a\udcff\n", "standard input:1: the text holds half a surrogate pair"),
    ],
)
def test_a_stream_is_refused_with_its_line(content, says):
    assert says in text_refusal(io.StringIO(content))


def test_a_stream_may_be_empty_but_must_be_utf_8():
    assert list(read_texts(io.StringIO(""))) == []
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    assert "standard input: not UTF-8" in text_refusal(stream)


def test_texts_come_before_the_end_is_known():
    class Endless(io.StringIO):
        def __next__(self):
            return "more\n"

    found = read_texts(Endless())
    assert [next(found) for _ in range(3)] == ["more"] * 3


def test_memory_does_not_grow_with_the_input(write):
    path = write("a.jsonl", [{"text": "x" * 10_000}] * 800)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_texts(path)) == 800
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20  # the file has 8 MB; a read buffer and a few lines are some 100 kB
