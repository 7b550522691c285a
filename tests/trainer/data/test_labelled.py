"""From files to LabelledData: names, notes, the hash, and data that does not fit together."""

import hashlib
import json
import struct

import pytest
from hypothesis import given, strategies as st

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.labelled import (
    _sorted,
    read_labelled,
    stratified_split,
)


def rows(write, name, *pairs):
    return str(write(name, [{"text": text, "label": label} for text, label in pairs]))


def twenty(write, name="t.jsonl", labels=("b", "a")):
    return rows(write, name, *((f"text {i}", labels[i % len(labels)]) for i in range(20)))


def load(train, seed=0, **fields):
    return read_labelled(LabelledConfig(train=(train,), **fields), seed)


def refusal(train, **fields):
    with pytest.raises(DataError) as error:
        load(train, **fields)
    return str(error.value)


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


def test_a_dev_file_is_taken_whole(write):
    dev = rows(write, "d.jsonl", ("x", "a"), ("y", "b"), ("z", "a"))
    data = load(twenty(write), dev=(dev,))
    assert (data.dev.texts, data.dev.labels) == (["x", "y", "z"], [0, 1, 0])
    assert len(data.train) == 20


def test_names_can_be_given_in_their_order_and_stand_for_ids(write):
    train = twenty(write)
    given = load(train, labels=("b", "a"))
    assert given.names == ("b", "a")
    found = load(train)
    assert [1 - label for label in found.train.labels] == given.train.labels
    ids = load(twenty(write, "ids.jsonl", labels=(0, 1)), labels=("b", "a"))
    assert (ids.train, ids.dev) == (given.train, given.dev)
    message = refusal(twenty(write, "u.jsonl", labels=(0, 2)), labels=("b", "a"))
    assert "u.jsonl:2: unknown label '2'" in message
    # Where names are numbers, a number is a name.
    named = load(twenty(write, "n.jsonl", labels=("1", "0")), labels=("1", "0"))
    assert named.train.labels == given.train.labels
    note = "the classes are numbers: --labels gives their names"
    assert load(twenty(write, "m.jsonl", labels=(0, 1))).notes == (note,)


def test_given_names_that_disagree_are_refused(write):
    assert "data.labels lacks it" in refusal(twenty(write), labels=("a", "c"))
    with pytest.raises(ConfigError, match="one name, 'a, b'; write --labels a b"):
        load(twenty(write), labels=("a, b",))
    assert "no training text has the label 'c'" in refusal(twenty(write), labels=("a", "b", "c"))


def test_an_unknown_label_in_dev_is_refused_with_its_place(write):
    dev = rows(write, "d.jsonl", ("x", "a"), ("y", "c"), ("z", "c"))
    message = refusal(twenty(write), dev=(dev,))
    assert message.startswith(f"{dev}:2: unknown label 'c': no training text has it")
    assert "(allowed: 'a', 'b')" in message


def test_no_input_is_refused():
    with pytest.raises(ConfigError, match=r"data\.train is empty; name a file"):
        read_labelled(LabelledConfig(), 0)


def test_one_class_is_refused(write):
    assert "every text has the label 'a'" in refusal(twenty(write, labels=("a",)))
    assert "at least two classes" in refusal(twenty(write, labels=("a",)), labels=("a",))


def test_a_class_with_a_single_text_stays_in_train(write):
    pairs = [(f"text {i}", "ab"[i % 2]) for i in range(10)]
    data = load(rows(write, "t.jsonl", *pairs, ("alone", "c")), dev_fraction=0.9)
    assert "alone" in data.train.texts
    assert data.notes == ("class 'c' has a single text: it is trained on and not evaluated",)
    message = refusal(rows(write, "u.jsonl", ("x", "a"), ("y", "b")))
    assert "no class has two texts" in message


def test_what_looks_odd_is_noted(write):
    train = rows(
        write,
        "t.jsonl",
        *(("x", "a"), ("x", "b"), ("x", "a"), ("y", "A "), ("z", "b"), ("w", "b"), ("w", "b")),
    )
    dev = rows(write, "d.jsonl", ("x", "a"), ("y", "b"), ("new", "a"), ("new", "b"), ("w", "b"))
    assert load(train, dev=(dev,)).notes == (
        "dev has no text of 'A '",
        "3 of 5 dev texts also stand in train, so scores on them are too good",
    )


def oracle_sha256(data):
    """The definition, written out: every part with its length as 8 bytes before it."""
    raw = b""

    def strings(found):
        return struct.pack("<q", len(found)) + b"".join(
            struct.pack("<q", len(s.encode())) + s.encode() for s in found
        )

    raw += strings(data.names)
    for part in (data.train, data.dev):
        raw += strings(part.texts) + struct.pack(f"<{len(part.labels)}q", *part.labels)
    return hashlib.sha256(raw).hexdigest()


def test_the_hash_is_over_names_texts_and_labels(write, tmp_path):
    data = load(twenty(write))
    assert data.sha256 == oracle_sha256(data)
    # The same content from another file and format has the same hash.
    pairs = [[f"text {i}", "ba"[i % 2]] for i in range(20)]
    assert load(str(write("other.json", json.dumps(pairs)))).sha256 == data.sha256
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
SHARES = st.floats(0.01, 0.99)


@given(LABELS, SHARES, st.integers(0, 2**64 - 1))
def test_every_example_is_in_one_part_and_every_class_in_both(labels, fraction, seed):
    train, dev = stratified_split(labels, fraction, seed)
    assert sorted([*train, *dev]) == list(range(len(labels)))
    assert train.tolist() == sorted(train)
    assert dev.tolist() == sorted(dev)
    for label in set(labels):
        held = sum(labels[i] == label for i in dev)
        assert held >= (labels.count(label) > 1)
        assert held < labels.count(label)


def test_every_class_gives_its_share():
    labels = [0] * 555 + [1] * 303 + [2] * 142 + [3] * 2 + [4]
    _, dev = stratified_split(labels, 0.1, 0)
    assert [sum(labels[i] == label for i in dev) for label in range(5)] == [56, 30, 14, 1, 0]


def test_the_split_of_today_is_the_split_for_ever():
    # Pinned: runs of other versions and platforms must hold the same examples out.
    _, dev = stratified_split([0, 1, 1, 0, 1, 0, 0, 1, 2, 1], 0.3, 7)
    assert dev.tolist() == [1, 4, 5]


def test_nothing_to_hold_out_is_refused():
    with pytest.raises(DataError, match=r"no class has two texts.*give data\.dev"):
        stratified_split([0, 1, 2], 0.1, 0)
    with pytest.raises(ConfigError, match="seed must be at least 0"):
        stratified_split([0, 0], 0.5, -1)
