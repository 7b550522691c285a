import json

import pytest

from halfstep.errors import DataError
from halfstep.trainer.data.chat import Message, Pair, Text
from halfstep.trainer.data.instructions import InstructionFiles, find_inputs

ALPACA = {"instruction": "Add", "input": "1, 1", "output": "2"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
HI_HO = (Message("user", "Hi"), Message("assistant", "Ho"))


def open_(*paths, format="auto"):
    return InstructionFiles(find_inputs(tuple(map(str, paths)), "data.train", format), format)


def examples(*paths, format="auto"):
    return [record.example for record in open_(*paths, format=format)]


@pytest.mark.parametrize(
    ("record", "format", "example"),
    [
        (ALPACA, "alpaca", Pair("Add", "1, 1", "2")),
        ({"instruction": "Add", "output": "2"}, "alpaca", Pair("Add", "", "2")),
        ({"instruction": "Add", "input": None, "output": "2"}, "alpaca", Pair("Add", "", "2")),
        ({"instruction": "Add", "input": "", "output": "2"}, "alpaca", Pair("Add", "", "2")),
        (
            {"instruction": "Q", "context": "C", "response": "A", "category": "qa"},
            "alpaca",
            Pair("Q", "C", "A"),
        ),
        ({"question": "Q", "answer": "A"}, "alpaca", Pair("Q", "", "A")),
        ({"prompt": "P", "completion": " C"}, "prompt-completion", Pair("P", "", " C")),
        (CHAT, "chat", HI_HO),
        (
            {
                "id": "x_0",
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Ho"},
                ],
            },
            "chat",
            HI_HO,
        ),
        ({"text": " a\n"}, "text", Text((" a\n",))),
    ],
)
def test_the_fields_tell_the_format(write, record, format, example):
    files = open_(write("a.jsonl", [record, record]))
    assert [found.example for found in files] == [example, example]
    assert files.format == format
    assert files.origin.endswith("a.jsonl:1")
    assert examples(write("b.jsonl", [record]), format=format) == [example]


@pytest.mark.parametrize("format", ["alpaca", "prompt-completion"])
@pytest.mark.parametrize("fields", [("prompt", "completion"), ("question", "answer")])
def test_pairs_are_taken_for_either_format_when_asked(write, format, fields):
    path = write("a.jsonl", [dict(zip(fields, "PC", strict=True))])
    assert examples(path, format=format) == [Pair("P", "", "C")]


def test_lists_lines_and_blank_lines_give_the_same(write):
    records = [ALPACA, {"instruction": "é\u2028", "output": "2"}]
    expected = [Pair("Add", "1, 1", "2"), Pair("é\u2028", "", "2")]
    lines = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    assert examples(write("b.jsonl", "\ufeff" + lines + "\n \n")) == expected
    assert examples(write("lines.json", lines)) == expected
    text = "\ufeff [\n" + lines.replace("\n\n", " ,\r\n") + "]\n"
    assert examples(write("mark.json", text)) == expected


def test_places_are_lines_or_items(write):
    path = write("a.json", json.dumps([ALPACA] * 3, indent=1))
    assert [record.place for record in open_(path)] == [f"{path}: item {n}" for n in (1, 2, 3)]
    path = write("a.jsonl", f"\n{json.dumps(ALPACA)}\n\n{json.dumps(ALPACA)}")
    assert [record.place for record in open_(path)] == [f"{path}:2", f"{path}:4"]


def test_a_text_file_is_one_document(write):
    paths = write("a.txt", "one\n\ntwo"), write("b.md", "three")
    assert examples(*paths) == [Text(("one\n\ntwo",)), Text(("three",))]
    assert examples(*paths, write("c.jsonl", [{"text": "four"}]))[2] == Text(("four",))
    assert examples(write("notes", "x"), format="text") == [Text(("x",))]


def test_a_long_text_comes_in_pieces_that_join_to_it(write):
    text = "words and\n" * 60_000
    ((pieces,),) = examples(write("a.txt", text))
    assert len(pieces) > 1
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({}, "unknown fields: found none; allowed: instruction, output"),
        (
            {"input": "a", "target": "b"},
            "unknown fields: found 'input', 'target'; allowed: instruction, output "
            r"\(and input\); or .*; or messages; or conversations; or text; rename or remove",
        ),
        (ALPACA | CHAT, "unknown fields: found 'input', 'instruction', 'mess"),
        (ALPACA | {"text": "x"}, "unknown fields"),
        (ALPACA | {"context": "x"}, "unknown fields"),
        (ALPACA | {"history": []}, "unknown fields: found 'history', .*; allowed: instruction,"),
        (ALPACA | {"output": ""}, '"output" is empty; fill it or leave the record out'),
        (ALPACA | {"output": " \n"}, '"output" is empty'),
        (ALPACA | {"output": None}, "unknown fields"),
        (ALPACA | {"instruction": ""}, '"instruction" is empty'),
        (ALPACA | {"input": 3}, '"input" must be a string, got int'),
        (ALPACA | {"output": ["2"]}, '"output" must be a string, got list'),
        (
            {"prompt": [{"role": "user", "content": "x"}], "completion": "y"},
            '"prompt" must be a string, got list; conversations go into messages',
        ),
        ({"text": "  "}, '"text" is empty'),
        ({"messages": []}, "the conversation must be a list of messages"),
        ({"messages": CHAT["messages"][::-1]}, "turn 1 is by the assistant"),
        ([1], "a JSON list, not an object"),
        ("x", "a JSON str, not an object"),
    ],
)
def test_a_bad_record_names_file_and_line(write, record, why):
    with pytest.raises(DataError, match=rf"a\.jsonl:1: {why}"):
        examples(write("a.jsonl", [record]))
    with pytest.raises(DataError, match=rf"a\.json: item 1: {why}"):
        examples(write("a.json", "[\n\n" + json.dumps(record) + "]"))


def test_all_records_have_one_format(write):
    alpaca, chat = write("a.jsonl", [ALPACA]), write("c.jsonl", [CHAT])
    why = r"c\.jsonl:1: unknown fields: found 'messages'; allowed: .* \(the format is alpaca, from "
    with pytest.raises(DataError, match=why + r".*a\.jsonl:1\)"):
        examples(alpaca, chat)
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*the format is chat, from data\.format"):
        examples(alpaca, format="chat")
    with pytest.raises(DataError, match=r"t\.txt: a text file, but .*a\.jsonl:1 says alpaca"):
        examples(alpaca, write("t.txt", "x"))
    with pytest.raises(DataError, match=r"t\.txt: a text file, but data\.format says chat"):
        examples(write("t.txt", "x"), format="chat")
    files = open_(alpaca)
    assert list(files)
    others = files.of_same_format([str(chat)])
    with pytest.raises(DataError, match=r"the format is alpaca, from .*a\.jsonl:1"):
        list(others)


def test_fields_that_are_left_out_are_told(write):
    files = open_(write("a.jsonl", [ALPACA | {"id": 1}, ALPACA | {"source": "x"}]))
    assert len(list(files)) == 2
    assert files.unused == {"id", "source"}
    # Asked for by name, a format leaves the fields of others out too (alpaca's published "text").
    path = write("b.jsonl", [ALPACA | {"text": "all of it"}])
    files = open_(path, format="alpaca")
    assert [record.example for record in files] == [Pair("Add", "1, 1", "2")]
    assert files.unused == {"text"}
    with pytest.raises(DataError, match="unknown fields"):
        examples(write("c.jsonl", [ALPACA | {"history": []}]), format="alpaca")
    with pytest.raises(DataError, match="unknown fields"):
        examples(write("d.jsonl", [ALPACA | {"question": "a", "answer": "b"}]), format="alpaca")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": "x"\n', r"a\.jsonl:2: not JSON: .* at column 13"),
        ("a.json", '[\n{"text": "x"},\n{"text": "x"\n', r"a\.json:4: not JSON"),
        ("a.json", '[{"text": "x"},]', r"a\.json:1: not JSON"),
        ("a.json", '[{"text": "x"}] 5', r"a\.json:1: not JSON: Extra data"),
        ("a.json", b'[{"text": "\xff"}]', r"a\.json:1: not UTF-8: byte 0xff"),
        ("a.csv", "question,answer\nx\n", r"a\.csv:2: 1 fields where the first line has 2"),
        ("a.png", "x", r"a\.png: instructions are read from \.csv, .* and \.txt files; convert it"),
        ("a.bin", b"\0\0", r"a\.bin: instructions are read from"),
        ("a.txt", b"ab\xff", r"a\.txt: not UTF-8: byte 0xff at byte offset 2"),
    ],
)
def test_a_bad_file_is_named(write, name, content, why):
    with pytest.raises(DataError, match=why):
        examples(write(name, content))


def test_a_list_too_long_to_parse_is_refused(write, monkeypatch):
    monkeypatch.setattr("halfstep.trainer.data.records.MAX_LIST_BYTES", 10)
    with pytest.raises(DataError, match=r"too many for one JSON value; write one object a line"):
        examples(write("a.json", '[{"text": "x"}]'))


def test_an_empty_list_holds_no_records(write):
    assert examples(write("a.json", " [ ] ")) == []
    assert examples(write("a.jsonl", "\n\n")) == []


def test_tables_and_parquet_hold_instructions_too(write, tmp_path):
    datasets = pytest.importorskip("datasets")
    expected = [Pair("Add", "1, 1", "2"), Pair("Add", "", "3")]
    table = 'instruction,input,output\nAdd,"1, 1",2\nAdd,,3\n'
    assert examples(write("a.csv", table)) == expected
    assert examples(write("a.csv", table), format="text") == [Text((table,))]
    rows = [ALPACA, {"instruction": "Add", "input": None, "output": "3"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    files = open_(tmp_path / "a.parquet")
    assert [found.example for found in files] == expected
    assert files.origin.endswith("a.parquet: row 1")
    datasets.Dataset.from_list([CHAT]).save_to_disk(tmp_path / "d")
    assert examples(f"datasets:{tmp_path}/d") == [HI_HO]
