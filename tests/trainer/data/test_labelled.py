"""From files to LabelledData: columns, names, notes, the hash, and everything that can be wrong."""

import csv
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.labelled import (
    _read,
    _sorted,
    read_known,
    read_labelled,
    read_texts,
    stratified_split,
)

LOOSE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
PAIRS = [
    ("I am glad", "joy"),
    ('say "hi", now\nand then', "fear"),
    ("\u4f60\u597d\u3000\U0001f600", "joy"),
]


def pairs(*paths, **fields):
    inputs = tuple(map(str, paths))
    found = _read(inputs, LabelledConfig(train=inputs, **fields), "train", [])
    return [(text, label) for _, text, label in found]


def refusal(read, *given, **fields):
    with pytest.raises(DataError) as error:
        read(*given, **fields)
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
        ("A.TSV", table([("文本", "标签"), *PAIRS], "\t")),
        ("a.jsonl", "\n\n".join(json.dumps(o) for o in objects(PAIRS))),
        ("a.jsonl", "\r\n".join(json.dumps(o, ensure_ascii=False) for o in objects(PAIRS))),
        ("a.csv", table([("", "text", "label", ""), *((7, *p, "") for p in PAIRS), ["", ""]], "|")),
        ("a.tsv", table([("Review Text", "STAR_RATING"), *PAIRS])),
        ("a.csv", table([("title", "text", "label", "class"), *((7, *p, 8) for p in PAIRS)])),
        ("a.json", "\n".join(json.dumps(o) for o in objects(PAIRS))),
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
    labels = [99999999999999999999, "1", 1, True, False, -3]
    path = write("b.jsonl", [{"text": "x", "label": label} for label in labels])
    expected = ["99999999999999999999", "1", "1", "true", "false", "-3"]
    assert [label for _, label in pairs(path)] == expected


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
        content = json.dumps(objects(rows))
    assert pairs(write(f"a.{kind}", content)) == rows
    if kind == "jsonl":
        texts = [text for text, _ in rows]
        assert list(read_texts(io.BytesIO(content.encode()))) == texts


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "text,label,label\na,b,c\n", ":1: two columns are called 'label'"),
        ("a.csv", "text,label\na,b\n\nc\n", ":4: 1 fields where the first line has 2"),
        ("a.csv", 'text,label\na,b\n"open,c\nd,e\n', ":3: the fields of the row that begins here"),
        ("a.csv", b"text,label\nx,y\n\xe9t\xe9,y\n", ":3: not UTF-8: byte 0xe9 at byte offset 0"),
        ("a.csv", "x,y\nz,w\n", ":2: no column could hold the text (columns here: 'x', 'y')"),
        ("a.csv", "text,label\nx,a\n ,b\n\t,a\n,a\n", ":3: the text must be a string, got an emp"),
        ("a.csv", "text,label\nx,a\ny, \n", ":3: the label must be a string or an integer, got"),
        ("a.jsonl", '{"text": "x", "label": "a"}\n[1]\n', ":2: a JSON list, not an object"),
        ("a.jsonl", '{"text": "x", "label": "a"}\n{"text": "y"}\n', ":2: no field 'label', which"),
        ("a.jsonl", '\n{"text": "x", "label": 1.5}\n', ":2: the label must be a string or an int"),
        ("a.jsonl", '{"text": "x", "label": null}', ":1: the label must be a string or"),
        ("a.csv", "评论,评分\n好,1\n".encode("gbk"), "iconv -f GBK -t UTF-8 OLD > NEW"),
        ("a.csv", "Title,Body,Y\na,b,c\n", "'Body'); write --text-column Title or another"),
        ("a.csv", "text,stars,score\na,1,2\n", "label ('stars', 'score'); write --label"),
        ("a.json", '"x"', "must hold a JSON list"),
        ("a.json", '[{"text": "x", "label": "a"}, "y"]', ': item 2: write [{"text": ..., "label"'),
        ("a.json", '{"text":\n"x"}', "one object a line in a .jsonl file"),
        ("a.json", "[" * 100_000, "not usable JSON"),
        ("a.txt", "x", "read from .csv, .tsv, .jsonl, .json, .parquet files and datasets:NAME"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(write, name, content, says):
    path = write(name, content)
    message = refusal(pairs, path)
    assert message.startswith(str(path)) or "no texts in" in message
    assert says in message


def test_columns_can_be_named_and_each_input_has_its_own(write, tmp_path):
    path = write("a.csv", "text,content,label,class\na,b,c,d\n")
    assert pairs(path, text_column="content", label_column="class") == [("b", "d")]
    first = write("a.csv", "text,label\nx,1\n")
    second = write("b.jsonl", [{"review": "y", "target": 2}])
    assert pairs(first, second) == [("x", "1"), ("y", "2")]
    path = write("a.csv", "text,label\nx,a\n")
    assert "no column 'body' (columns here: 'text'" in refusal(pairs, path, text_column="body")
    assert "no such file" in refusal(pairs, tmp_path / "b.csv")


def test_one_and_one_point_nought_are_a_class_and_what_was_done_is_told(write):
    rows = "\n".join(f"w{i},s{i},{label}" for i, label in enumerate(("1", "1.0", "2.00", "2", "1")))
    data = load(str(write("a.csv", f"text,summary,label\n{rows}\n")))
    assert data.names == ("1", "2")
    assert data.notes[0].startswith("of 'text', 'summary' only 'text' is read; --text-column names")
    data = load(str(write("b.jsonl", objects([("x", 1), ("y", 1.0), ("z", 2.0), ("u", 2)]))))
    assert data.names == ("1", "2")
    # Names of an older run, or given, may be written so too.
    dev = read_known((str(write("d.csv", "text,label\nx,2\ny,1\n")),), LabelledConfig(),
                     ("1.0", "2.0"), "test", [])  # fmt: skip
    assert dev.labels == [1, 0]


def test_a_field_may_be_longer_than_pythons_limit(write):
    assert pairs(write("a.csv", table([("text", "label"), ("x" * 200_000, "a")])))


# Texts to predict.


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.jsonl", '\n{"text": "x y", "id": 3}\n\n{"text": "z"}\n', ""),
        ("a.csv", "body,text\nx y,q\nz,q\n", "body"),
        ("a.txt", "\ufeffx y\r\nz", ""),
    ],
)
def test_every_format_gives_the_same_texts_to_predict(write, name, content, column):
    assert list(read_texts(write(name, content), column)) == ["x y", "z"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x\n\ny\n", "standard input:2: the text must be a string, got an empty one"),
        ('{"text": "x"}\ny\n', "standard input:2: not JSON"),
        (("a.txt", "text\n\ny\n"), "a.txt:2: the text must be a string, got an empty one"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_its_line(write, source, says):
    source = io.BytesIO(source.encode()) if isinstance(source, str) else write(*source)
    assert says in refusal(lambda: list(read_texts(source)))


def test_texts_come_before_the_end_is_known():
    class Endless(io.BytesIO):
        def __next__(self):
            return b"more\n"

    found = read_texts(Endless())
    assert [next(found) for _ in range(3)] == ["more"] * 3


# Names of the classes, and the split.


def rows(write, name, *found):
    return str(write(name, [{"text": text, "label": label} for text, label in found]))


def twenty(write, name="t.jsonl", labels=("b", "a")):
    return rows(write, name, *((f"text {i}", labels[i % len(labels)]) for i in range(20)))


def load(train, seed=0, **fields):
    return read_labelled(LabelledConfig(train=(train,), **fields), seed)


def test_names_are_found_and_sorted(write):
    data = load(twenty(write, labels=("z", "\u00e4", "Z", "a")))
    assert data.names == ("Z", "a", "z", "\u00e4")
    assert load(twenty(write, labels=(10, 9, 2))).names == ("2", "9", "10")
    assert _sorted({"10", "9", "x"}) == ("10", "9", "x")
    assert _sorted({"01", "-2", "1", "+0"}) == ("-2", "+0", "01", "1")


def test_texts_keep_their_labels_through_the_split(write):
    train = twenty(write)
    data = load(train, dev_fraction=0.25)
    together = {}
    for part in (data.train, data.dev):
        for text, label in zip(part.texts, part.labels, strict=True):
            together[text] = data.names[label]
    assert together == {f"text {i}": "ba"[i % 2] for i in range(20)}
    assert len(data.dev) == 4
    assert data.notes == ()
    assert load(train, dev_fraction=0.25) == data
    assert load(train, seed=1, dev_fraction=0.25).dev != data.dev


def test_a_dev_file_is_taken_whole_and_texts_in_both_are_told(write):
    dev = rows(write, "d.jsonl", ("x", "a"), ("y", "b"), ("text 3", "a"))
    data = load(twenty(write), dev=(dev,))
    assert (data.dev.texts, data.dev.labels) == (["x", "y", "text 3"], [0, 1, 0])
    assert len(data.train) == 20
    assert data.notes == ("1 of 3 dev texts also stand in train, which inflates the scores",)
    assert read_known((dev,), LabelledConfig(), data.names, "test", []) == data.dev


def test_names_can_be_given_in_their_order_and_stand_for_ids(write):
    train = twenty(write)
    given = load(train, labels=("b", "a"))
    assert given.names == ("b", "a")
    assert [1 - label for label in load(train).train.labels] == given.train.labels
    ids = load(twenty(write, "ids.jsonl", labels=(0, 1)), labels=("b", "a"))
    assert (ids.train, ids.dev) == (given.train, given.dev)
    message = refusal(load, twenty(write, "u.jsonl", labels=(0, 2)), labels=("b", "a"))
    assert "u.jsonl:2: unknown label '2'" in message
    # Where names are numbers, a number is a name.
    named = load(twenty(write, "n.jsonl", labels=("1", "0")), labels=("1", "0"))
    assert named.train.labels == given.train.labels


def test_labels_that_do_not_fit_are_refused(write):
    assert "t.jsonl:1: unknown label 'b'" in refusal(load, twenty(write), labels=("a", "c"))
    dev = rows(write, "d.jsonl", ("x", "a"), ("y", "c"), ("z", "c"))
    message = refusal(load, twenty(write), dev=(dev,))
    assert message.startswith(f"{dev}:2: unknown label 'c' (allowed: 'a', 'b')")
    assert "every text has the label 'a'" in refusal(load, twenty(write, labels=("a",)))


def test_the_hash_is_over_names_texts_and_labels(write):
    data = load(twenty(write))
    # Pinned: every part with its length as 8 bytes before it, labels as int64.
    assert data.sha256.startswith("b9fe82275885db24")
    # The same content from another file and format has the same hash.
    other = write("other.json", json.dumps(objects((f"text {i}", "ba"[i % 2]) for i in range(20))))
    assert load(str(other)).sha256 == data.sha256
    others = [
        load(twenty(write), seed=1),
        load(twenty(write), labels=("b", "a")),
        load(twenty(write), dev_fraction=0.5),
        load(twenty(write, labels=("b", "c"))),
    ]
    assert len({data.sha256, *(other.sha256 for other in others)}) == 5


LABELS = st.lists(st.integers(0, 6), min_size=2, max_size=200).filter(
    lambda labels: any(labels.count(label) > 1 for label in labels)
)


@given(LABELS, st.floats(0.01, 0.99), st.integers(0, 2**64 - 1))
def test_every_example_is_in_one_part_and_every_class_in_both(labels, fraction, seed):
    train, dev = stratified_split(labels, fraction, seed)
    assert sorted([*train, *dev]) == list(range(len(labels)))
    assert train.tolist() == sorted(train)
    assert dev.tolist() == sorted(dev)
    for label in set(labels):
        held = sum(labels[i] == label for i in dev)
        assert held >= (labels.count(label) > 1)
        assert held < labels.count(label)


def test_every_class_gives_its_share_and_the_split_of_today_is_the_split_for_ever():
    labels = [0] * 555 + [1] * 303 + [2] * 142 + [3] * 2 + [4]
    _, dev = stratified_split(labels, 0.1, 0)
    assert [sum(labels[i] == label for i in dev) for label in range(5)] == [56, 30, 14, 1, 0]
    # Pinned: runs of other versions and platforms must hold the same examples out.
    _, dev = stratified_split([0, 1, 1, 0, 1, 0, 0, 1, 2, 1], 0.3, 7)
    assert dev.tolist() == [1, 4, 5]
    with pytest.raises(DataError, match=r"no class has two texts.*give data\.dev"):
        stratified_split([0, 1, 2], 0.1, 0)
