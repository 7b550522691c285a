"""Labels that are ids of a table of names, blanks between Chinese words, and the first examples."""

import json

import pytest

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.labelled import join_words, read_known, read_labelled, read_names

NAMES = ("其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴")
TABLE = {name: number for number, name in enumerate(NAMES)}
HOLE = "t.json: the ids must run from 0 without a hole, one for each name"
POSTS = [[f"今天 的 天气 {i} 号", i * 5 % 6] for i in range(24)]


@pytest.fixture
def posts(write):
    return str(write("posts.json", json.dumps(POSTS, ensure_ascii=False)))


def refusal(train, **fields):
    with pytest.raises(DataError) as error:
        read_labelled(LabelledConfig(train=(train,), **fields), 0)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.json", TABLE),
        ("ids.json", dict(reversed(TABLE.items()))),
        ("list.json", NAMES),
    ],
)
def test_ids_get_the_names_of_the_table(write, posts, name, content):
    table = str(write(name, json.dumps(content, ensure_ascii=False)))
    given = read_labelled(LabelledConfig(train=(posts,), labels_file=table), 0)
    assert given.names == NAMES
    assert read_labelled(LabelledConfig(train=(posts,), labels=NAMES), 0) == given
    want = dict(POSTS)
    for part in (given.train, given.dev):
        assert part.labels == [want[text] for text in part.texts]


def test_names_instead_of_ids_give_the_same_data(write, posts):
    named = str(write("n.jsonl", [{"文本": text, "标签": NAMES[i]} for text, i in POSTS]))
    a, b = (
        read_labelled(LabelledConfig(train=(file,), labels=NAMES), 0) for file in (posts, named)
    )
    assert a == b
    # ids in a file for evaluation, too
    texts, _ = read_known((posts,), LabelledConfig(), NAMES, "test")
    assert texts.labels == [label for _, label in POSTS]


def test_a_class_that_is_called_by_a_number_is_meant_by_its_name(write):
    train = str(write("t.jsonl", [{"text": f"x{i}", "label": 1 + i % 2} for i in range(8)]))
    data = read_labelled(LabelledConfig(train=(train,), labels=("2", "1")), 0)
    together = zip(
        [*data.train.texts, *data.dev.texts], [*data.train.labels, *data.dev.labels], strict=True
    )
    assert dict(together) == {f"x{i}": 1 - i % 2 for i in range(8)}
    message = refusal(train, labels=("1", "3"))
    assert "unknown label '2'" in message


def test_ids_without_names_say_how_to_name_them(posts):
    data = read_labelled(LabelledConfig(train=(posts,)), 0)
    assert data.names == ("0", "1", "2", "3", "4", "5")
    assert any("--labels-file gives their names" in note for note in data.notes)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('{"a": 0, "b": 2}', HOLE),
        ('{"a": 1, "b": 2}', HOLE),
        ('{"a": 1, "b": 1}', HOLE),
        ('{"a": 0, "a": 1}', HOLE),
        ('{"0": "a", "1": "a"}', HOLE),
        ('{"0": "a", "0": "b"}', HOLE),
        ('{"a": 0, "b": "x"}', HOLE),
        ('{"a": 0, "b": true}', HOLE),
        ('{"a": "b"}', HOLE),
        ('{" ": 0}', "the label is empty"),
        ("{}", HOLE),
        ('{"a": 0', "t.json:1: not JSON"),
    ],
)
def test_a_table_that_is_none_is_refused(write, table, says):
    with pytest.raises(DataError) as error:
        read_names(str(write("t.json", table)))
    assert says in str(error.value)


def test_an_id_outside_the_table_is_refused_with_its_place(write, posts):
    message = refusal(posts, labels=NAMES[:5])
    assert message.startswith(f"{posts}: item 2: no class has the id 5 (allowed: 0 其他, 1 喜好")
    assert "correct it, or name the class" in message
    below = str(write("b.json", '[["x", 0], ["y", -1]]'))
    assert "b.json: item 2: no class has the id -1" in refusal(below, labels=NAMES)


def test_names_and_ids_together_are_refused_with_both_places(write):
    mixed = str(write("m.json", '[["x", 0], ["y", 1], ["z", "喜好"]]'))
    message = refusal(mixed, labels=NAMES)
    assert message.startswith(
        f"{mixed}: item 3: the label '喜好' is a name, and 0 at {mixed}: item 1"
    )
    assert message.endswith("write all labels as names, or all as ids")
    unknown = str(write("u.json", '[["x", 0], ["z", "?"]]'))
    assert "item 2: unknown label '?'" in refusal(unknown, labels=NAMES)


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("银色 的 罗马 高跟鞋 ， 圆球 吊饰", "银色的罗马高跟鞋，圆球吊饰"),
        ("很 \u3000好 ！", "很好！"),
        ("走 了 …… 再 见", "走了……再见"),
        ("ひらがな カタカナ", "ひらがなカタカナ"),
        ("𠀀 𠀁", "𠀀𠀁"),
        ("a quiet day", "a quiet day"),
        ("我 爱 New York 的 夜", "我爱 New York 的夜"),
        ("第 3 名", "第 3 名"),
        ("오늘 날씨", "오늘 날씨"),
        ("行\n行", "行\n行"),
        (" 前后 ", " 前后 "),
    ],
)
def test_blanks_go_between_chinese_characters_only(text, joined):
    assert join_words(text) == joined


def test_joining_is_asked_for_and_a_note_tells_of_it(write):
    file = str(write("t.json", json.dumps([["我 爱 你", 0], ["a b", 1], ["不 好", 1]] * 4)))
    kept = read_labelled(LabelledConfig(train=(file,)), 0)
    assert {*kept.train.texts, *kept.dev.texts} == {"我 爱 你", "a b", "不 好"}
    assert any("8 of 12 train texts have blanks" in n and "--join-words" in n for n in kept.notes)
    joined = read_labelled(LabelledConfig(train=(file,), join_words=True), 0)
    assert {*joined.train.texts, *joined.dev.texts} == {"我爱你", "a b", "不好"}
    assert not any("--join-words" in note for note in joined.notes)


def test_the_first_examples_are_those_of_train_alone(write, posts):
    more = str(write("more.json", '[["one more", 0], ["two more", 1]]'))
    config = LabelledConfig(train=(posts, more), dev=(posts, more), labels=NAMES, limit=12)
    data = read_labelled(config, 0)
    assert data.train.texts == [text for text, _ in POSTS[:12]]
    assert len(data.dev.texts) == 26
    with pytest.raises(ConfigError, match=r"data\.limit=-1; allowed: integers >= 0"):
        LabelledConfig(limit=-1)
