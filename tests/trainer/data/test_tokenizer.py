"""Tokenizers: their promises on any text, training, and loading from files."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import models

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.corpus import (
    END_OF_TEXT,
    ByteTokenizer,
    Tokenizer,
    byte_level,
    load_tokenizer,
    train_bpe,
)

SAMPLE = "the cat sat on the mat; the dog, the cat's. \u00e9t\u00e9 \u732b\u732b 12 12\r\n" * 8
TRAINED = train_bpe([SAMPLE], 280)
LETTERS = json.loads(ByteTokenizer()._engine.to_str())["model"]["vocab"]
LOOKALIKE = st.lists(
    st.one_of(st.text(), st.sampled_from([END_OF_TEXT, "the cat", " ", "\r\n", "\0", "\ufeff"]))
).map("".join)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED], ids=["bytes", "bpe"])
@given(texts=st.lists(LOOKALIKE, max_size=4))
def test_text_comes_back_and_a_batch_is_encoded_as_if_each_were_alone(tokenizer, texts):
    alone = [tokenizer.encode(text) for text in texts]
    arrays = tokenizer.encode_batch(texts)
    assert [array.tolist() for array in arrays] == alone
    assert {array.dtype for array in arrays} <= {np.dtype(np.uint32)}
    for text, ids in zip(texts, alone, strict=True):
        assert tokenizer.decode(ids) == text
        assert all(0 <= index < tokenizer.vocab_size for index in ids)
        assert tokenizer.end_of_text not in ids
        if isinstance(tokenizer, ByteTokenizer):
            assert ids == list(text.encode())


def test_a_saved_tokenizer_comes_back_the_same(tmp_path):
    for name, tokenizer in (("bytes", ByteTokenizer()), ("bpe", TRAINED)):
        tokenizer.save(tmp_path / name)
        for path in (tmp_path / name, tmp_path / name / "tokenizer.json"):
            loaded = load_tokenizer(path)
            assert type(loaded) is type(tokenizer)
            assert loaded.fingerprint == tokenizer.fingerprint
            assert loaded.vocab_size == tokenizer.vocab_size
            assert loaded.end_of_text == tokenizer.end_of_text
            assert loaded.encode(SAMPLE + END_OF_TEXT) == tokenizer.encode(SAMPLE + END_OF_TEXT)


def test_fingerprints_differ_with_anything_that_changes_ids():
    # Pinned: it names what earlier versions left in the cache.
    assert ByteTokenizer().fingerprint.startswith("a7c4f254bc6914cc")
    prints = [
        ByteTokenizer().fingerprint,
        train_bpe(["ab ab ab"], 258).fingerprint,
        train_bpe(["ba ba ba"], 258).fingerprint,
        train_bpe(["abc abc abc"], 259).fingerprint,
        Tokenizer(train_bpe(["ab ab ab"], 258)._engine, None).fingerprint,
    ]
    assert len(set(prints)) == len(prints)


def test_what_a_file_says_of_its_tokens_padding_and_chance_does_not_touch_the_text():
    vocabulary = {**LETTERS, "ab": 256, "abc": 300}
    merges = [("a", "b"), ("ab", "c")]
    engine = byte_level(models.BPE(vocab=vocabulary, merges=merges, dropout=0.5))
    engine.enable_truncation(3)
    engine.enable_padding(length=8)
    engine.add_tokens([END_OF_TEXT])  # as ordinary text
    tokenizer = Tokenizer(engine, END_OF_TEXT)
    assert [tokenizer.encode("abc") for _ in range(50)] == [[300]] * 50
    assert tokenizer.encode("fedfed") == list(b"fedfed")
    assert tokenizer.encode(END_OF_TEXT) == list(END_OF_TEXT.encode())
    assert tokenizer.end_of_text not in tokenizer.encode(END_OF_TEXT)
    assert tokenizer.vocab_size == 1 + max(300, tokenizer.end_of_text)  # over gaps


def test_transformers_reads_what_save_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, tokenizer in (("bytes", ByteTokenizer()), ("bpe", TRAINED)):
        tokenizer.save(tmp_path / name)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs(SAMPLE)["input_ids"] == tokenizer.encode(SAMPLE)
        config = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert theirs.eos_token == config.get("eos_token")


def test_too_little_text_is_refused_with_the_size_that_works():
    why = r"data\.tokenizer asks for bpe:500; .* use --tokenizer bytes or bpe:(\d+)"
    with pytest.raises(ConfigError, match=why) as e:
        train_bpe(["ab ab abc abc"], 500)
    possible = int(str(e.value).split("bytes or bpe:")[1].split(",")[0])
    with pytest.raises(ConfigError, match=r"asks for bpe:9; .* bytes or bpe:257, or"):
        train_bpe(["ab ab abc abc"], 9)
    tokenizer = train_bpe(["ab ab abc abc"], possible)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (possible, 0)
    assert tokenizer.decode([0]) == END_OF_TEXT


def saved(folder, *special, config=None):
    engine = byte_level(models.BPE(vocab=LETTERS, merges=[]))
    engine.add_special_tokens(list(special))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(engine.to_str())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, 257),
        ({"eos_token": "<end>"}, 256),
        ({"eos_token": {"content": "<end>", "special": True}}, 256),
        ({"eos_token": None}, 257),
        ({"eos_token": "<absent>"}, None),
    ],
)
def test_the_config_beside_it_names_the_end_of_text(tmp_path, config, expected):
    folder = saved(tmp_path / "t", "<end>", END_OF_TEXT, config=config)
    assert load_tokenizer(folder).end_of_text == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", content) for content in (b"", b"[]", b'{"model": 3}', b"\xff\xfe")),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = saved(tmp_path / "t")
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer .*t: cannot be used"):
        load_tokenizer(folder)
