import json

import numpy as np
import pytest

from halfstep.errors import DataError
from halfstep.trainer.data.config import InstructionsConfig
from halfstep.trainer.data.instructions import lm_batch, prompt_ids, read_instructions
from halfstep.trainer.models import IGNORE_INDEX
from trainer.data.lm_tokenizers import BOS, EOS, ChatLetters, Letters, Merging, shown

SUMS = [{"instruction": f"{n}+{n}?", "output": str(2 * n)} for n in range(40)]
CHAT = [
    {"messages": [{"role": "user", "content": f"u{n}"}, {"role": "assistant", "content": f"a{n}"}]}
    for n in range(10)
]
ALPACA = {"instruction": "Add", "input": "1, 1", "output": "2"}


def read(train, dev=(), tokenizer=None, seed=0, packing=True, **changed):
    config = InstructionsConfig(
        train=(str(train),), dev=tuple(map(str, dev)), **({"max_length": 400} | changed)
    )
    return read_instructions(config, tokenizer or Letters(), seed, packing=packing)


def answers(rows):
    """What is learned of each row, as text."""
    found = []
    for number in range(len(rows)):
        targets = lm_batch(rows, [number], 0)[1][0]
        found.append(shown(targets[targets != IGNORE_INDEX].tolist()))
    return found


def documents(rows):
    begins = np.flatnonzero(rows.positions == 0)
    return [shown(ids.tolist()) for ids in np.split(rows.ids, begins[1:])]


def marked(write, record, tokenizer, **changed):
    """The text of a record as a document, learned tokens in brackets one by one."""
    path = write("one.jsonl", [record])
    rows = read(path, [path], tokenizer, **changed).train_rows
    learned = [False, *(rows.targets[:-1] != IGNORE_INDEX).tolist()]
    words = [shown([i]) for i in rows.ids.tolist()]
    return "".join(f"[{w}]" if x else w for w, x in zip(words, learned, strict=True))


def test_records_become_rows_and_notes(write):
    data = read(write("q.jsonl", SUMS), packing=False)
    assert data.template == "alpaca"
    assert (len(data.train_rows), len(data.dev_rows)) == (36, 4)
    learned = answers(data.train_rows) + answers(data.dev_rows)
    assert sorted(learned) == sorted(f"{2 * n}</s>" for n in range(40))
    packed = read(write("q.jsonl", SUMS)).train_rows
    assert sorted(documents(packed)) == sorted(documents(data.train_rows))
    assert len(packed) < len(data.train_rows)
    text = documents(data.train_rows)[0]
    assert text.startswith("Below is an instruction that describes a task. Write")
    assert text.endswith("</s>")
    assert "q.jsonl:1), template alpaca" in data.notes[0]
    assert "dev: 4 of 40 documents, drawn by the seed" in data.notes


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "P", "completion": " C"}, "<s>P[ ][C][</s>]"),
        ({"text": "ab", "url": "u"}, "<s>[a][b][</s>]"),
        (
            CHAT[0] | {"prompt": "u0"},
            "<|im_start|>user\nu0<|im_end|>\n<|im_start|>assistant\n[a][0][<|im_end|>]",
        ),
    ],
)
def test_the_fields_tell_the_format(write, record, text):
    assert marked(write, record, ChatLetters()) == text


def test_alpaca_writes_the_input_where_there_is_one(write):
    for changed in ({}, {"input": None}, {"input": ""}):
        text = marked(write, ALPACA | changed, Letters())
        assert text.endswith("### Response:[2][</s>]")
        assert ("### Input:\n1, 1\n" in text) == (not changed)


def test_the_hubs_alpaca_has_a_text_too_and_some_empty_answers(write):
    records = [{**row, "input": "", "text": "Below is an instruction"} for row in SUMS]
    whole = read(write("a.jsonl", records))
    assert whole.sha256 == read(write("b.jsonl", SUMS)).sha256
    path = write("c.jsonl", [*records, {**records[0], "output": ""}])
    with pytest.raises(DataError, match=r'c\.jsonl:41: "output" must be a text that is not empty'):
        read(path)


def test_every_answer_of_a_chat_is_learned_with_its_end(write):
    more = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    asked = {"role": "user", "content": "left out"}
    record = {"messages": [*CHAT[0]["messages"], *more, asked]}
    text = marked(write, record, ChatLetters())
    assert text.count("[") == len(["a", "0", "end", "y", "end"])
    assert text.endswith("<|im_start|>assistant\n[y][<|im_end|>]")  # no bos, no eos beside it


def test_no_token_lies_across_the_border(write):
    # Tokenised together, ":A" would be one token, which no prompt could end with.
    tokenizer, record = Merging(), {"prompt": "Q:", "completion": "A"}
    path = write("a.jsonl", [record])
    ids = read(path, [path], tokenizer).train_rows.ids.tolist()
    assert ids == [*tokenizer.encode("Q:"), *tokenizer.encode("A"), EOS]
    assert ids[:-1] != tokenizer.encode("Q:A")


def test_the_hash_is_of_the_rows(write):
    path = write("q.jsonl", SUMS)
    first = read(path).sha256
    assert read(write("other/name.jsonl", SUMS)).sha256 == first
    assert read(write("list.json", json.dumps(SUMS))).sha256 == first
    table = "instruction,output\n" + "".join(f"{n}+{n}?,{2 * n}\n" for n in range(40))
    assert read(write("t.csv", table)).sha256 == first
    changes = [
        {"seed": 1},
        {"packing": False},
        {"max_length": 500},
        {"tokenizer": ChatLetters()},
    ]
    found = {read(path, **change).sha256 for change in changes}
    assert len(found | {first}) == len(changes) + 1
    assert len(first) == 64


def test_a_dev_file_is_taken_whole_and_has_the_same_format(write):
    path, dev = write("q.jsonl", SUMS), write("d.jsonl", SUMS[:3])
    data = read(path, [dev], packing=False)
    assert (len(data.train_rows), len(data.dev_rows)) == (40, 3)
    assert answers(data.dev_rows) == ["0</s>", "2</s>", "4</s>"]
    with pytest.raises(DataError, match=r"c\.jsonl:1: records of two formats: chat here, and alp"):
        read(path, [write("c.jsonl", CHAT)])


class Rewriting(ChatLetters):
    """Numbers the turns by how many follow."""

    def chat(self, messages, add_generation_prompt):
        return f"{len(messages)}" + super().chat(messages, add_generation_prompt)


class Endless(ChatLetters):
    def chat(self, messages, add_generation_prompt):
        return "".join(m["content"] for m in messages)


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (Rewriting(), "writes earlier turns in another way"),
        (Endless(), "writes no end-of-turn token"),
    ],
)
def test_a_chat_template_that_cannot_be_learned_from_is_refused(write, tokenizer, why):
    with pytest.raises(DataError, match=rf"c\.jsonl:1: the tokenizer's chat template {why}"):
        read(write("c.jsonl", CHAT), tokenizer=tokenizer)


def test_one_text_is_cut_at_its_end_for_dev(write):
    lines = [f"line {n}\n" for n in range(100)]
    data = read(write("t.txt", "".join(lines)), max_length=64)
    assert data.template == "plain"
    train, dev = documents(data.train_rows), documents(data.dev_rows)
    # Every character but the first of each part is learned once, and the end twice.
    total = data.train_rows.learned_tokens + data.dev_rows.learned_tokens
    assert total == len("".join(lines)) - 2 + 2
    assert any(text.startswith("line 0\n") for text in train)
    assert any(text.endswith("line 99\n</s>") for text in dev)
    assert any(note.endswith("more than 64 tokens were cut into several") for note in data.notes)


def test_what_is_cut_or_left_out_is_told(write):
    records = [*SUMS, {"instruction": "?" * 500, "output": "no"}]
    records += [{"instruction": "why", "output": "because " * 100}]
    path, dev = write("q.jsonl", records), write("d.jsonl", SUMS[:2])
    notes = read(path, [dev]).notes
    assert "train: 2 documents of more than 400 tokens were cut at the right" in notes
    assert "train: 1 documents left out: no token to learn within max_length" in notes
    with pytest.raises(DataError, match=r"data\.train: no document of 42 has .* 20 tokens; raise"):
        read(path, [dev], max_length=20)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({}, "unknown fields: found none; allowed: messages; or instruction, output; or prompt, c"),
        (ALPACA | {"output": " \n"}, '"output" must be a text that is not empty'),
        (ALPACA | {"input": 3}, '"input" must be a text that is not empty, got 3'),
        ({"text": "a</s>"}, "a text holds '</s>', which the tokenizer would turn into a control"),
        ({"messages": []}, "the conversation has no turn of the assistant to learn from"),
        ({"messages": [{"role": "user"}]}, '"messages" must be a list of .* both strings'),
        ([1], "a JSON list, not an object"),
    ],
)
def test_a_bad_record_names_file_and_line(write, record, why):
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {why}"):
        read(write("a.jsonl", f"\n{json.dumps(record)}\n"), tokenizer=ChatLetters())


@pytest.mark.parametrize("template", ["plain", "alpaca", "tokenizer"])
def test_a_prompt_for_generation_has_the_ids_of_training(write, template):
    tokenizer = ChatLetters()
    record = {
        "plain": {"prompt": "q?", "completion": "x"},
        "alpaca": {"instruction": "q?", "output": "x"},
        "tokenizer": {"messages": [{"role": r, "content": c} for r, c in
                                   (("user", "q?"), ("assistant", "x"))]},
    }[template]  # fmt: skip
    path = write("c.jsonl", [record])
    data = read(path, [path], tokenizer)
    assert data.template == template
    end = [EOS] if template != "tokenizer" else tokenizer.encode("<|im_end|>")
    answer = tokenizer.encode("x") + end
    assert data.train_rows.ids.tolist() == prompt_ids("q?", tokenizer, template) + answer
    assert prompt_ids("", tokenizer, "plain") == [BOS]
    with pytest.raises(DataError, match=r"a text holds '</s>'.* control token"):
        prompt_ids("a</s>", tokenizer, template)
