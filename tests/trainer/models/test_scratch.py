"""Classifiers from random weights: the named sizes, the tokenizer of the texts, and folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.trainer.models.pretrained import open_tokenizer
from halfstep.trainer.tasks.classify import (
    SIZES,
    make_classifier,
    scratch_size,
    train_tokenizer,
)

TEXTS = ["你好你好你好世界", "你好，Hello hello world", "世界世界 hello", "［泪］[泪][泪] ok"] * 3
TIED = [chr(0x4E00 + number) for number in range(400)]


def train(vocab_size=60, max_length=16, texts=TEXTS):
    return train_tokenizer(texts, vocab_size, max_length)


def make(size="tiny", names=("a", "b"), **options):
    return make_classifier(SIZES[size], names, **{"vocab_size": 60, "max_length": 16, **options})


def vocabulary(tokenizer, folder):
    """The saved vocabulary's entries, by id."""
    tokenizer.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return {i: token for token, i in content["model"]["vocab"].items()}


# --- the tokenizer ---


def test_frequent_strings_become_one_id_and_others_letters(tmp_path):
    tokenizer = train()
    by_id = vocabulary(tokenizer, tmp_path)

    def names(text):
        return [by_id[i] for i in tokenizer.encode_batch([text])[0]]

    assert names("你好世") == ["[CLS]", "你好", "世", "[SEP]"]
    # a word inside of another is not the word
    assert names("好 hello")[1:-1] == ["好", "▁hello"]
    assert "▁hello" not in names("好hello")
    assert train(vocab_size=30).vocab_size == 30
    assert train(vocab_size=5000).vocab_size < 100
    few = train(texts=["aaaaabbbbc"] * 3, vocab_size=6)  # the most frequent characters stay
    assert few.encode_batch(["abc"]) == [[2, 4, 5, 1, 3]]


def test_what_a_text_becomes():
    tokenizer = train(max_length=6)
    a, b = tokenizer.encode_batch(["［泪］ＯＫ", "[泪]ok"])  # width and case are folded
    assert a == b
    assert tokenizer.encode_batch(["", "鑫"]) == [[2, 3], [2, 1, 3]]
    assert (tokenizer.pad_id, tokenizer.truncated) == (0, 0)
    long, exact = tokenizer.encode_batch(["鑫" * 9, "鑫" * 4])
    assert long == exact == [2, 1, 1, 1, 1, 3]
    assert tokenizer.truncated == 1


def test_special_names_in_a_text_are_letters(tmp_path):
    texts = ["[CLS] [SEP] [PAD] [UNK] [cls] [sep] [pad]"] * 50
    tokenizer = train(texts=texts, vocab_size=100)
    tokenizer.save(tmp_path)
    for each in (tokenizer, open_tokenizer(tmp_path, max_length=16)):
        for text in ("[CLS]", "[SEP]", "[PAD]", "[UNK]"):
            ids = each.encode_batch([text])[0]
            assert (ids[0], ids[-1]) == (2, 3)
            assert min(ids[1:-1]) > 3


def fingerprints_of_ties():
    pairs = ["".join(TIED[n : n + 2]) for n in range(0, 400, 2)]
    every = (TIED, 100), (TIED * 2, 300), (pairs * 3, 500), ([" ".join(pairs)] * 3, 450)
    return [train_tokenizer(texts, size, 16).fingerprint for texts, size in every]


def test_ties_of_characters_and_pairs_are_settled_alike_in_every_process():
    """Of 400 characters, and of 200 pairs, each as frequent as any other, some have to go."""
    code = "from tests.trainer.models.test_scratch import *; print(*fingerprints_of_ties())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RAYON_NUM_THREADS": "4", "PYTHONHASHSEED": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == fingerprints_of_ties()
    assert len({*done.stdout.split()}) == 4


# --- the model ---


def test_weights_follow_their_seed_and_no_other_and_options_reach_the_model():
    before = torch.get_rng_state()
    one, same, other = (make(seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.model.classifier.weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    model = make(label_smoothing=0.1)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert (model.label_smoothing, model.max_length, model.training) == (0.1, 16, True)


def test_an_unknown_size_is_refused():
    with pytest.raises(ConfigError, match=r"'scratch:huge'\. Allowed: scratch:tiny"):
        scratch_size("scratch:huge")
