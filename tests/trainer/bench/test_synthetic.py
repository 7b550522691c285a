"""Synthetic data: the same in every call, learnable, and as long as the configuration asks for."""

import json
from pathlib import Path

import numpy as np
import pytest

from halfstep.trainer.bench.synthetic import WORDS, chain, with_data
from halfstep.trainer.config.config import load_config
from halfstep.trainer.data.corpus.prepare import prepare
from halfstep.trainer.data.labelled.labelled import read_labelled
from halfstep.trainer.data.tokenizer import byte_letters, load_tokenizer


def test_a_chain_has_few_followers_and_frequent_symbols():
    found = chain(1000, 64, 400)
    assert np.array_equal(found, chain(1000, 64, 400))
    assert found.shape == (64, 400)
    assert found.min() >= 0
    assert found.max() < 1000
    followers = {}
    for now, after in zip(found[:, :-1].ravel(), found[:, 1:].ravel(), strict=True):
        followers.setdefault(now, set()).add(after)
    assert max(map(len, followers.values())) <= 16
    # (1/16)^(1/4) = 1/2 of all draws; as a chain they concentrate somewhat more or less
    assert 0.4 < (found < 1000 / 16).mean() < 0.7


def test_words_are_different_and_plain():
    assert len(set(WORDS)) == len(WORDS) >= 1024 - 64
    assert all(word.isascii() and word.isalpha() for word in WORDS)


@pytest.mark.parametrize(("tokenizer", "size"), [("bpe:700", 700), ("bytes", 256)])
def test_text_without_data_gets_tokens_of_its_vocabulary(tmp_path, tokenizer, size):
    config = load_config("gpt-tiny", [("data.tokenizer", tokenizer)])
    given = with_data(config, tmp_path)
    data = prepare(given.data)
    assert data.tokenizer.vocab_size == size
    assert data.train.count > 900_000
    assert int(np.max(data.train.tokens)) < size
    assert data.validation.count > config.block_size


def test_text_without_data_keeps_a_tokenizer_of_the_users(tmp_path):
    with_data(load_config("gpt-tiny", [("data.tokenizer", "bpe:300")]), tmp_path)
    mine = tmp_path / "mine.json"
    (tmp_path / "tokenizer.json").rename(mine)
    config = load_config("gpt-tiny", [("data.tokenizer", str(mine))])
    given = with_data(config, tmp_path)
    assert given.data.tokenizer == str(mine)
    assert load_tokenizer(given.data.tokenizer).vocab_size == 300
    assert int(np.fromfile(given.data.train[0], dtype="<u2").max()) < 300


def test_long_sequences_get_more_tokens(tmp_path):
    config = load_config("gpt-tiny", [("model.block_size", 50_000), ("data.tokenizer", "bytes")])
    data = prepare(with_data(config, tmp_path).data)
    assert data.validation.count > 50_000


def test_a_classifier_without_data_gets_two_classes_that_differ(tmp_path):
    config = load_config("classify-scratch", [("data.label_column", "topic")])
    data = read_labelled(with_data(config, tmp_path).data, seed=0)
    assert data.names == ("a", "b")
    assert len(data.train) + len(data.dev) == 16 * config.run.batch_size
    first = set(WORDS[:512])
    about = [text.split()[0] in first for text in data.train.texts]
    assert all(set(text.split()) <= first for text in data.train.texts if text.split()[0] in first)
    right = [a == (label == 0) for a, label in zip(about, data.train.labels, strict=True)]
    assert 0.75 < sum(right) / len(right) < 0.85  # every fifth label is the other one
    assert max(len(text.split()) for text in data.train.texts) <= config.model.max_length // 2


def test_a_language_model_without_data_gets_texts(tmp_path):
    config = load_config("lm-lora", [("data.max_length", 64), ("run.batch_size", 2)])
    given = with_data(config, tmp_path).data
    lines = Path(given.train[0]).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 32
    lengths = [len(record["text"].split()) for record in records]
    assert 8 <= min(lengths) <= max(lengths) <= 32
    assert set(byte_letters()) >= set("".join(WORDS))


@pytest.mark.parametrize("name", ["gpt-tiny", "classify-scratch", "lm-lora"])
def test_data_of_the_user_is_left_alone(tmp_path, name):
    config = load_config(name, [("data.train", ["mine.txt"])])
    assert with_data(config, tmp_path) is config
    assert not list(tmp_path.iterdir())
