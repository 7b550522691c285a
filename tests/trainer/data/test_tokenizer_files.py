import json

import pytest
from tokenizers import models

from halfstep.errors import DataError
from halfstep.trainer.data.tokenizers.files import load_tokenizer
from halfstep.trainer.data.tokenizers.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    byte_letters,
    byte_level,
)

LETTERS = {letter: number for number, letter in enumerate(byte_letters())}


def gpt2_files(folder, *, end=END_OF_TEXT):
    folder.mkdir()
    vocab = {**LETTERS, "at": 256, "c" + "at": 257, end: 258}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na t\nc at\n")
    return folder


def engine_with(*special):
    engine = byte_level(models.BPE(vocab=LETTERS, merges=[]))
    engine.add_special_tokens(list(special))
    return engine


def saved(folder, engine, config=None):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(engine.to_str())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_gpt2s_own_two_files_are_read(tmp_path):
    tokenizer = load_tokenizer(gpt2_files(tmp_path / "gpt2"))
    assert tokenizer.encode("cat hat") == [257, LETTERS["\u0120"], ord("h"), 256]
    assert tokenizer.end_of_text == 258
    assert tokenizer.vocab_size == 259
    text = f"a{END_OF_TEXT}b"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([257, 258]) == "cat" + END_OF_TEXT


def test_tokenizer_json_goes_before_gpt2s_files(tmp_path):
    folder = saved(gpt2_files(tmp_path / "both"), engine_with())
    assert load_tokenizer(folder).encode("cat") == list(b"cat")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, END_OF_TEXT),
        ({"eos_token": "<end>"}, "<end>"),
        ({"eos_token": {"content": "<end>", "special": True}}, "<end>"),
        ({"eos_token": None}, END_OF_TEXT),
        ({"eos_token": "<absent>"}, None),
    ],
)
def test_the_config_beside_it_names_the_end_of_text(tmp_path, config, expected):
    engine = engine_with("</s>", "<end>", END_OF_TEXT)
    tokenizer = load_tokenizer(saved(tmp_path / "t", engine, config))
    assert tokenizer.end_of_text == (None if expected is None else engine.token_to_id(expected))


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_well_known_names_serve_without_a_config(tmp_path, name):
    folder = saved(tmp_path / "t", engine_with("<other>", name))
    assert load_tokenizer(folder).end_of_text == 257
    assert load_tokenizer(folder / "tokenizer.json").end_of_text == 257


def test_without_any_there_is_none(tmp_path):
    assert load_tokenizer(saved(tmp_path / "t", engine_with("<other>"))).end_of_text is None


def test_a_path_may_be_a_string_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    ByteTokenizer().save(tmp_path / "t")
    assert isinstance(load_tokenizer("~/t"), ByteTokenizer)


def test_a_hub_name_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer gpt2: no such .*halfstep downloads none"):
        load_tokenizer("gpt2")


def test_a_folder_without_a_tokenizer_says_what_it_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer in this folder; give .* tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 3}', b"\xff\xfe"])
def test_a_damaged_tokenizer_json_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer .*tokenizer\.json: not a usable tokenizer"):
        load_tokenizer(tmp_path)


def test_damaged_gpt2_files_are_named(tmp_path):
    folder = gpt2_files(tmp_path / "gpt2")
    (folder / "vocab.json").write_text("{")
    with pytest.raises(DataError, match="gpt2: not a usable tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_is_named(tmp_path, content):
    folder = saved(tmp_path / "t", engine_with())
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer .*tokenizer_config\.json: "):
        load_tokenizer(folder)


def test_an_unusable_tokenizer_is_named_with_its_file(tmp_path):
    folder = saved(tmp_path / "t", byte_level(models.BPE(vocab=LETTERS, merges=[], dropout=0.1)))
    with pytest.raises(DataError, match=r"tokenizer .*t: the tokenizer has BPE dropout"):
        load_tokenizer(folder)
