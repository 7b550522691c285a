"""Tokenizers of pretrained models: ids, cuts, specials, and folders that do not fit."""

from __future__ import annotations

import threading

import pytest
from tests.trainer.models.pretrained_folders import (
    save_classifier,
    save_lm,
    save_tokenizer,
    silence,
)

from halfstep.errors import CheckpointError, ConfigError, DataError
from halfstep.trainer.models import pretrained
from halfstep.trainer.models.pretrained import open_tokenizer as opened
from halfstep.trainer.tasks.classify import open_classifier


def open_tokenizer(folder, max_length=99, **more):
    return opened(folder, max_length=max_length, **more)


PAD, UNK, CLS, SEP, THE, CAT, SAT, ON, MAT = range(9)
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture
def folder(tmp_path):
    return save_tokenizer(tmp_path / "t", model_max_length=30)


def test_ids_have_special_tokens_and_are_cut_between_them(folder):
    tokenizer = open_tokenizer(folder, max_length=5)
    texts = ["the cat", "the cat sat on the mat", "dog", "", "the cat sat"]
    assert tokenizer.encode_batch(texts) == [
        [CLS, THE, CAT, SEP],
        [CLS, THE, CAT, SAT, SEP],
        [CLS, UNK, SEP],
        [CLS, SEP],
        [CLS, THE, CAT, SAT, SEP],
    ]
    assert tokenizer.truncated == 1
    tokenizer.encode_batch(["the cat sat on"] * 3)
    assert tokenizer.truncated == 4
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode_plain(["the cat sat on the mat"]) == [[THE, CAT, SAT, ON, THE, MAT]]
    assert tokenizer.truncated == 4
    assert tokenizer.decode([CLS, THE, CAT, SEP]) == "the cat"


def test_the_limit_is_the_least(tmp_path):
    model = open_classifier(save_classifier(tmp_path / "m"), ("a", "b"))
    assert model.max_length == 40
    for own, asked, given, limit in [(30, 99, None, 30), (99, 99, model, 40), (99, 10, model, 10)]:
        folder = save_tokenizer(tmp_path / f"{own} {asked}", model_max_length=own)
        tokenizer = open_tokenizer(folder, max_length=asked, model=given)
        assert tokenizer.max_length == limit
        assert len(tokenizer.encode_batch(["the " * 99])[0]) == limit
    without = save_tokenizer(tmp_path / "w")  # transformers writes 1e30 for none
    assert open_tokenizer(without, max_length=7).max_length == 7


def test_padding_falls_back_to_the_end_of_text(tmp_path):
    for pad, eos, pad_id, eos_id in [
        ("[PAD]", "<e>", 0, 1), (None, "<e>", 0, 0), (None, None, 0, None)
    ]:  # fmt: skip
        folder = save_tokenizer(tmp_path / f"{pad}{eos_id}", pad=pad, eos=eos)
        tokenizer = open_tokenizer(folder, max_length=9)
        assert tokenizer.pad_id == pad_id
        if eos_id is not None:
            assert tokenizer.end_of_text() == eos_id
    with pytest.raises(ConfigError, match="has no end-of-text token"):
        tokenizer.end_of_text()


def test_the_fingerprint_follows_what_decides_ids(folder, tmp_path):
    one, same = open_tokenizer(folder), open_tokenizer(folder)
    assert one.fingerprint == same.fingerprint
    assert len(one.fingerprint) == 64
    one.encode_batch(["the cat " * 50])  # cuts leave no trace in the tokenizer
    with silence():
        one.save(tmp_path / "again")
    assert open_tokenizer(tmp_path / "again").fingerprint == same.fingerprint
    words = save_tokenizer(tmp_path / "w", words=("the", "dog"), model_max_length=30)
    others = [open_tokenizer(folder, max_length=8), open_tokenizer(words)]
    assert len({t.fingerprint for t in (one, *others)}) == 3


def test_the_vocabulary_must_fit_the_embedding(folder, tmp_path):
    small, fits = (
        open_classifier(save_classifier(tmp_path / f"{n}", vocab_size=n), ("a", "b"))
        for n in (8, 9)
    )
    with pytest.raises(ConfigError, match=r"ids up to 8, but the model's embedding has 8 rows"):
        open_tokenizer(folder, model=small)
    open_tokenizer(folder, model=fits)


def test_a_chat_template(tmp_path):
    folder = save_tokenizer(tmp_path / "t", chat_template=CHAT, model_max_length=30)
    assert open_tokenizer(folder).chat([{"role": "the", "content": "cat"}]) == "the cat "
    with pytest.raises(DataError, match=r"chat_template is not set.*write instruction"):
        open_tokenizer(save_tokenizer(tmp_path / "n"), max_length=30).chat([])
    for number, bad in enumerate(
        ("{{ raise_exception('no') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    ):
        refusing = save_tokenizer(tmp_path / f"b{number}", chat_template=bad, model_max_length=30)
        with pytest.raises(DataError, match="refuses the conversation"):
            open_tokenizer(refusing).chat([{"role": "system", "content": "be brief"}])


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_a_chat_template_that_loops_is_stopped(tmp_path, monkeypatch, where):
    monkeypatch.setattr(pretrained, "TEMPLATE_SECONDS", 0.3)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    folder = save_tokenizer(tmp_path / "t", chat_template=loop, model_max_length=30)
    tokenizer, told = open_tokenizer(folder), []

    def ask() -> None:
        with pytest.raises(DataError, match=r"ran for over 0\.3 s on one conversation"):
            tokenizer.chat([{"role": "user", "content": "a"}])
        told.append(where)

    if where == "main thread":
        ask()
    else:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert told == [where]


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"none of vocab\.txt, tokenizer\.json"):
        open_tokenizer(save_classifier(tmp_path / "m"), max_length=9)
    with pytest.raises(CheckpointError, match=r"has no tokenizer"):
        open_tokenizer(save_lm(tmp_path / "gpt2", "GPT2"), max_length=9)


@pytest.mark.parametrize("text", ["", "{", '{"model": 3}'])
def test_a_damaged_tokenizer(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="has no tokenizer that can be read"):
        open_tokenizer(folder)
