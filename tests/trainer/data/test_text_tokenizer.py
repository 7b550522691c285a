"""TextTokenizer: what it makes of texts, cuts, remembers and refuses."""

import json
import os
import subprocess
import sys

import pytest

from halfstep.errors import DataError
from halfstep.trainer.data.tokenizers.text_tokenizer import (
    SAMPLE_CHARACTERS,
    _sample,
    load_text_tokenizer,
    train_text_tokenizer,
)

TEXTS = ["你好你好你好世界", "你好，Hello hello world", "世界世界 hello", "［泪］[泪][泪] ok"] * 3


def train(vocab_size=60, max_length=16, texts=TEXTS):
    return train_text_tokenizer(texts, vocab_size, max_length)


def names(tokenizer, folder, text):
    """The text's ids as strings, by the saved vocabulary."""
    tokenizer.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    by_id = {i: token for token, i in content["model"]["vocab"].items()}
    return [by_id[i] for i in tokenizer.encode_batch([text])[0]]


def test_frequent_strings_become_one_id_and_others_letters(tmp_path):
    tokenizer = train()
    assert names(tokenizer, tmp_path, "你好世") == ["[CLS]", "你好", "世", "[SEP]"]


def test_width_and_case_are_folded():
    tokenizer = train()
    a, b = tokenizer.encode_batch(["［泪］ＨＥＬＬＯ", "[泪]hello"])
    assert a == b


def test_a_word_inside_of_another_is_not_the_word(tmp_path):
    tokenizer = train()
    assert names(tokenizer, tmp_path, "好 hello")[1:-1] == ["好", "▁hello"]
    assert "▁hello" not in names(tokenizer, tmp_path, "好hello")


def test_unknown_characters_and_empty_texts_have_ids():
    tokenizer = train()
    assert tokenizer.encode_batch(["", "鑫"]) == [[2, 3], [2, 1, 3]]
    assert tokenizer.pad_id == 0


def test_special_names_in_a_text_are_letters():
    texts = ["[CLS] [SEP] [PAD] [UNK] [cls] [sep] [pad]"] * 50
    tokenizer = train(texts=texts, vocab_size=100)
    for text in ("[CLS]", "[SEP]", "[PAD]", "[UNK]"):
        ids = tokenizer.encode_batch([text])[0]
        assert ids[0] == 2
        assert ids[-1] == 3
        assert min(ids[1:-1]) > 3


def test_long_texts_are_cut_and_counted():
    tokenizer = train(max_length=6)
    long, exact, short = tokenizer.encode_batch(["鑫" * 9, "鑫" * 4, "鑫"])
    assert long == exact == [2, 1, 1, 1, 1, 3]
    assert short == [2, 1, 3]
    assert tokenizer.truncated == 1
    tokenizer.encode_batch(["鑫" * 5])
    assert tokenizer.truncated == 2


def test_a_vocabulary_is_as_large_as_asked_or_as_the_texts_hold():
    assert train(vocab_size=30).vocab_size == 30
    assert train(vocab_size=5000).vocab_size < 100


def test_a_small_vocabulary_keeps_the_most_frequent_characters():
    tokenizer = train(texts=["aaaaabbbbc"] * 3, vocab_size=6)
    assert tokenizer.encode_batch(["abc"]) == [[2, 4, 5, 1, 3]]


def test_training_is_a_pure_function_and_the_fingerprint_tells_tokenizers_apart():
    prints = [
        train().fingerprint,
        train(vocab_size=30).fingerprint,
        train(max_length=17).fingerprint,
        train(texts=[*TEXTS, "新字"]).fingerprint,
    ]
    assert train().fingerprint == prints[0]
    assert len(set(prints)) == 4


def characters(tokenizer, folder):
    """The saved vocabulary's entries of one character."""
    tokenizer.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return {token for token in content["model"]["vocab"] if len(token) == 1}


def test_of_characters_as_frequent_the_lower_code_points_stay(tmp_path):
    for number in range(3):  # the library's own order is another one at every call
        tokenizer = train(texts=["".join(TIED[number::3]) for number in range(3)], vocab_size=84)
        assert characters(tokenizer, tmp_path / str(number)) == set(TIED[:80])
    # what a text becomes is counted: 3 of "a" beside 2 of "b", 2 of a space (both its ways), 1 of c
    tokenizer = train(texts=["aＡＡ bb▁c"], vocab_size=6)
    assert characters(tokenizer, tmp_path / "folded") == {"a", "b"}
    tokenizer = train(texts=["aＡＡ b▁c "], vocab_size=6)
    assert characters(tokenizer, tmp_path / "spaces") == {"a", "▁"}


TIED = [chr(0x4E00 + number) for number in range(400)]
IN_A_PROCESS = """
from halfstep.trainer.data.tokenizers.text_tokenizer import train_text_tokenizer
tied = [chr(0x4E00 + number) for number in range(400)]
pairs = ["".join(tied[n : n + 2]) for n in range(0, 400, 2)]
for texts, size in ((tied, 100), (tied * 2, 300), (pairs * 3, 500), ([" ".join(pairs)] * 3, 450)):
    print(size, train_text_tokenizer(texts, size, 16).fingerprint)
"""


def test_ties_of_characters_and_pairs_are_settled_alike_in_every_process():
    """Of 400 characters, and of 200 pairs, each as frequent as any other, some have to go."""
    found = []
    for threads, seed in (("1", "1"), ("4", "2"), ("2", "3")):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        found.append(
            subprocess.run(
                [sys.executable, "-c", IN_A_PROCESS],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert len(set(found)) == 1
    assert len(set(found[0].split())) == 8


def test_a_saved_tokenizer_comes_back(tmp_path):
    tokenizer = train()
    tokenizer.save(tmp_path / "a" / "b")
    loaded = load_text_tokenizer(tmp_path / "a" / "b")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.vocab_size, loaded.max_length) == (tokenizer.vocab_size, 16)
    texts = [*TEXTS, "[CLS]", "Ｏｋ 鑫"]
    assert loaded.encode_batch(texts) == tokenizer.encode_batch(texts)


def test_half_a_surrogate_pair_is_explained():
    for use in (train().encode_batch, lambda texts: train(texts=texts)):
        with pytest.raises(DataError, match=r"U\+D800\) at character 2"):
            use(["ok", "ab\ud800"])


def test_texts_without_characters_are_refused():
    with pytest.raises(DataError, match="the 2 training texts hold no characters"):
        train(texts=["", ""])


@pytest.mark.parametrize("length", [2, 0, -1, True, 7.0, None, "16"])
def test_a_wrong_length_is_refused(tmp_path, length):
    train().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "model_max_length": length}))
    with pytest.raises(DataError, match=r"max_length must be an integer from 3"):
        load_text_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: cannot be read"),
        ("tokenizer.json", "{", r"tokenizer\.json: not a usable tokenizer"),
        ("tokenizer_config.json", None, r"tokenizer_config\.json: cannot be read"),
        ("tokenizer_config.json", "{", "not readable JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", "{}", "halfstep_tokenizer is not 'text'"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, name, content, message):
    train().save(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_text_tokenizer(tmp_path)


def test_an_engine_without_our_special_tokens_is_refused(tmp_path):
    train().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = file.read_text(encoding="utf-8").replace("[PAD]", "[pad]")
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"must be ids 0 to 3, got \[None, 1, 2, 3\]"):
        load_text_tokenizer(tmp_path)


def test_training_looks_at_an_even_sample(monkeypatch):
    assert list(_sample(["ab", "c"])) == ["ab", "c"]
    monkeypatch.setattr("halfstep.trainer.data.tokenizers.text_tokenizer.SAMPLE_CHARACTERS", 10)
    texts = [f"{i:02d}" for i in range(50)]
    sample = list(_sample(texts))
    assert sample == texts[9::10]
    assert SAMPLE_CHARACTERS > 2**20
