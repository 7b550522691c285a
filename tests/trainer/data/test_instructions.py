import json

import numpy as np
import pytest

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.batches import IGNORED
from halfstep.trainer.data.config import InstructionsConfig
from halfstep.trainer.data.instructions import prompt_ids, read_instructions
from halfstep.trainer.data.packing import lm_batch
from trainer.data.lm_tokenizers import BOS, EOS, ChatLetters, Letters, shown

QUESTIONS = [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(40)]
CHAT = [
    {"messages": [{"role": "user", "content": f"u{n}"}, {"role": "assistant", "content": f"a{n}"}]}
    for n in range(10)
]


def read(train, dev=(), tokenizer=None, seed=0, **changed):
    config = InstructionsConfig(
        train=(str(train),), dev=tuple(map(str, dev)), **({"max_length": 400} | changed)
    )
    return read_instructions(config, tokenizer or Letters(), seed)


def answers(rows):
    """What is learned of each row, as text."""
    found = []
    for number in range(len(rows)):
        targets = lm_batch(rows, [number], 0)[1][0]
        found.append(shown(targets[targets != IGNORED].tolist()))
    return found


def documents(rows):
    return [shown(ids.tolist()) for ids in np.split(rows.ids, rows.documents[1:-1])]


def test_records_become_rows_and_notes(write):
    data = read(write("q.jsonl", QUESTIONS), packing=False)
    assert (data.format, data.template) == ("alpaca", "alpaca")
    assert (len(data.train_rows), len(data.dev_rows)) == (36, 4)
    learned = answers(data.train_rows) + answers(data.dev_rows)
    assert sorted(learned) == sorted(f"{2 * n}</s>" for n in range(40))
    assert data.train_rows.learned_tokens == sum(len(a) - 3 for a in answers(data.train_rows))
    text = documents(data.train_rows)[0]
    assert text.startswith("Below is an instruction that describes a task. Write")
    assert text.endswith("</s>")
    assert "q.jsonl:1), template alpaca" in data.notes[0]
    assert "dev: 4 of 40 documents, drawn by the seed" in data.notes
    assert any(
        note.startswith("train: 36 documents in 36 rows of at most") and "% full" in note
        for note in data.notes
    )


def test_packing_learns_the_same_in_fewer_rows(write):
    path = write("q.jsonl", QUESTIONS)
    alone, packed = read(path, packing=False), read(path)
    assert len(packed.train_rows) < len(alone.train_rows)
    assert packed.train_rows.learned_tokens == alone.train_rows.learned_tokens
    assert sorted(documents(packed.train_rows)) == sorted(documents(alone.train_rows))
    assert packed.train_rows.lengths.max() <= 400


def test_the_seed_draws_what_is_held_out(write):
    path = write("q.jsonl", QUESTIONS)
    held = [sorted(documents(read(path, seed=seed).dev_rows)) for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]
    for seed in range(3):
        data = read(path, seed=seed)
        both = documents(data.train_rows) + documents(data.dev_rows)
        assert len(both) == len(set(both)) == 40
    # Whether a document is held out does not depend on what becomes of long ones.
    cut = read(path, max_length=190, drop_long="truncate")
    whole = read(path)
    names = [{text[:180] for text in documents(d.dev_rows)} for d in (cut, whole)]
    assert names[0] == names[1]


def test_the_hash_is_of_the_rows(write):
    path = write("q.jsonl", QUESTIONS)
    first = read(path).sha256
    assert read(write("other/name.jsonl", QUESTIONS)).sha256 == first
    assert read(write("list.json", json.dumps(QUESTIONS))).sha256 == first
    changes = [
        {"seed": 1},
        {"packing": False},
        {"mask_prompt": False},
        {"template": "vicuna"},
        {"max_length": 500},
        {"tokenizer": ChatLetters()},
    ]
    found = {read(path, **change).sha256 for change in changes}
    assert len(found | {first}) == len(changes) + 1
    assert len(first) == 64


def test_a_dev_file_is_taken_whole_and_has_the_same_format(write):
    path, dev = write("q.jsonl", QUESTIONS), write("d.jsonl", QUESTIONS[:3])
    data = read(path, [dev], packing=False)
    assert (len(data.train_rows), len(data.dev_rows)) == (40, 3)
    assert answers(data.dev_rows) == ["0</s>", "2</s>", "4</s>"]
    with pytest.raises(DataError, match=r"c\.jsonl:1: .*the format is alpaca"):
        read(path, [write("c.jsonl", CHAT)])


def test_chat_takes_the_tokenizers_template_where_there_is_one(write):
    path = write("c.jsonl", CHAT)
    own = read(path, tokenizer=ChatLetters())
    assert own.template == "tokenizer"
    assert answers(read(path, tokenizer=ChatLetters(), packing=False).dev_rows)[0].endswith(
        "<|im_end|>"
    )
    assert read(path).template == "vicuna"
    assert read(path, tokenizer=ChatLetters(), template="vicuna").template == "vicuna"
    with pytest.raises(DataError, match=r"c\.jsonl:1: the tokenizer has no chat template; use"):
        read(path, template="tokenizer")
    with pytest.raises(ConfigError, match="alpaca cannot write records of the format chat; use"):
        read(path, template="alpaca")


def test_one_text_is_cut_at_its_end_for_dev(write):
    lines = [f"line {n}\n" for n in range(100)]
    data = read(write("t.txt", "".join(lines)), max_length=64)
    assert (data.format, data.template) == ("text", "plain")
    train, dev = documents(data.train_rows), documents(data.dev_rows)
    # Every character but the first of each part is learned once, and the end twice.
    total = data.train_rows.learned_tokens + data.dev_rows.learned_tokens
    assert total == len("".join(lines)) - 2 + 2
    assert any(text.startswith("line 0\n") for text in train)
    assert any(text.endswith("line 99\n</s>") for text in dev)
    assert "texts cut into" in " ".join(data.notes)


def test_what_is_cut_or_left_out_is_told(write):
    records = [*QUESTIONS, {"question": "?" * 500, "answer": "no"}]
    records += [{"question": "why", "answer": "because " * 100}]
    path, dev = write("q.jsonl", records), write("d.jsonl", QUESTIONS[:2])
    notes = read(path, [dev]).notes
    assert any(note.startswith("train: 2 documents cut to 400 tokens, ") for note in notes)
    assert "train: 1 documents left out: no token to learn within max_length" in notes
    notes = read(path, [dev], drop_long="drop").notes
    assert "train: 2 documents of more than 400 tokens left out" in notes
    with pytest.raises(DataError, match=r"q\.jsonl:41: \d+ tokens, more than max_length 400 \(2"):
        read(path, [dev], drop_long="refuse")
    with pytest.raises(DataError, match=r"data\.train: no document of 42 is left \(.*\); raise"):
        read(path, [dev], max_length=20)
    path = write("id.jsonl", [record | {"id": 1} for record in QUESTIONS])
    assert "fields not used: id" in read(path).notes


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("\n", r"a\.jsonl: holds no record"),
        (json.dumps(QUESTIONS[0]), r"a\.jsonl:1: 1 document is too few to hold some out"),
    ],
)
def test_too_few_records_are_refused(write, content, why):
    with pytest.raises(DataError, match=why):
        read(write("a.jsonl", content))


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ConfigError, match=r"data\.train is empty; name a \.jsonl"):
        read_instructions(InstructionsConfig(), Letters(), 0)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("template", ["plain", "alpaca", "vicuna", "tokenizer"])
def test_a_prompt_for_generation_has_the_ids_of_training(write, template, context):
    tokenizer = ChatLetters()
    records = [{"question": f"q{n}?", "answer": "x"} for n in range(4)]
    if context:
        records = [record | {"context": f"c of {record['question']}"} for record in records]
    data = read(
        write("c.jsonl", records), format="prompt-completion", template=template,
        tokenizer=tokenizer, packing=False,
    )  # fmt: skip
    assert data.template == template
    end = [EOS] if template != "tokenizer" else tokenizer.encode("<|im_end|>")
    answer = tokenizer.encode("x" if template != "vicuna" else " x") + end
    rows, found = data.train_rows, set()
    for ids in np.split(rows.ids, rows.starts[1:-1]):
        (own,) = (r for r in records if r["question"] in shown(ids.tolist()))
        asked = {key: own[key] for key in own if key != "answer"}
        for prompt in (own, asked) if context else (own, asked, own["question"]):
            assert ids.tolist() == prompt_ids(prompt, tokenizer, template) + answer
        assert own.get("context", "") in shown(ids.tolist())
        found.add(own["question"])
    assert len(found) == len(rows) == 3  # of 4, one is held out


def test_prompts_of_every_kind_of_record():
    letters = Letters()

    def prompt(value, template, tokenizer=letters):
        return shown(prompt_ids(value, tokenizer, template))

    assert prompt("Hi", "plain") == "Hi"
    assert prompt("Hi", "plain", ChatLetters()) == "<s>Hi"
    assert prompt({"text": "Hi"}, "plain") == "Hi"
    asked = {"instruction": "Add", "input": "1"}
    assert prompt(asked, "alpaca").endswith("### Input:\n1\n\n### Response:")
    assert prompt(asked | {"output": "1"}, "alpaca") == prompt(asked, "alpaca")
    assert prompt({"instruction": "Add"}, "alpaca") == prompt("Add", "alpaca")
    whole = [{"from": "system", "value": "S"}, {"from": "human", "value": "a"}]
    answer = {"from": "gpt", "value": "b"}
    assert prompt({"conversations": whole}, "vicuna") == "S USER: a ASSISTANT:"
    assert prompt({"conversations": [*whole, answer]}, "vicuna") == "S USER: a ASSISTANT:"
    assert prompt({"messages": CHAT[0]["messages"]}, "tokenizer", ChatLetters()) == (
        "<|im_start|>user\nu0<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_ids("", ChatLetters(), "plain") == [BOS]


@pytest.mark.parametrize(
    ("value", "template", "error", "why"),
    [
        ({"output": "x"}, "alpaca", DataError, "no prompt: found the fields 'output'; give one of"),
        ({"instruction": 5}, "alpaca", DataError, "a prompt must be a string, got int"),
        (CHAT[0], "alpaca", ConfigError, "alpaca cannot write records of the format chat"),
        ({"instruction": "a", "input": "b"}, "plain", ConfigError, "plain cannot write"),
        ("a</s>", "plain", DataError, "^a text holds '</s>'.* control token"),
    ],
)
def test_a_prompt_that_cannot_be_written_is_refused(value, template, error, why):
    with pytest.raises(error, match=why):
        prompt_ids(value, ChatLetters(), template)
