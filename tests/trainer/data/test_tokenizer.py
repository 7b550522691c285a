"""Tokenizers: their promises on any text, training, and loading from files."""

import itertools
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as Engine, models, normalizers, pre_tokenizers

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    Tokenizer,
    byte_letters,
    byte_level,
    load_tokenizer,
    train_bpe,
)

SAMPLE = "the cat sat on the mat; the dog, the cat's. \u00e9t\u00e9 \u732b\u732b 12 12\r\n" * 8
WORDS = "".join(f"{a}{b}{c} " for a in "abcde" for b in "fghij" for c in "klmno") * 3
TRAINED = train_bpe([SAMPLE], 280)
LETTERS = {letter: number for number, letter in enumerate(byte_letters())}
BOTH = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED], ids=["bytes", "bpe"])
LOOKALIKE = st.lists(
    st.one_of(st.text(), st.sampled_from([END_OF_TEXT, "the cat", " ", "\r\n", "\0", "\ufeff"]))
).map("".join)


@BOTH
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


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_decoded_as_python_does(data):
    assert ByteTokenizer().decode(list(data)) == data.decode("utf-8", errors="replace")


def test_the_byte_tokenizer_is_utf8():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("h\u00e9") == [0x68, 0xC3, 0xA9]
    assert tokenizer.decode([0x68, 0xC3]) == "h\ufffd"
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (256, None)


def test_end_of_text_is_id_0_and_is_shown_when_decoded():
    assert TRAINED.end_of_text == 0
    assert TRAINED.decode([0]) == END_OF_TEXT


def test_a_saved_tokenizer_comes_back_the_same(tmp_path):
    for name, tokenizer in (("bytes", ByteTokenizer()), ("bpe", TRAINED)):
        tokenizer.save(tmp_path / name)
        for loaded in (
            load_tokenizer(tmp_path / name),
            load_tokenizer(tmp_path / name / "tokenizer.json"),
        ):
            assert type(loaded) is type(tokenizer)
            assert loaded.fingerprint == tokenizer.fingerprint
            assert loaded.vocab_size == tokenizer.vocab_size
            assert loaded.end_of_text == tokenizer.end_of_text
            assert loaded.encode(SAMPLE + END_OF_TEXT) == tokenizer.encode(SAMPLE + END_OF_TEXT)


def test_a_saved_byte_tokenizer_has_the_same_ids_for_other_programs(tmp_path):
    ByteTokenizer().save(tmp_path)
    other = Engine.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(map(chr, range(0x250))) + "\u732b\U0001f600"
    assert other.encode(text).ids == list(text.encode())
    assert other.decode(list(text.encode())) == text


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
    assert all(len(bytes.fromhex(p)) == 32 for p in prints)


def test_byte_letters_are_those_of_the_library():
    letters = byte_letters()
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    # Each letter stands for its byte in the library's own pre-tokenizer; bytes above 0x7f in pairs.
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in range(0x800):
        expected = "".join(letters[byte] for byte in chr(code).encode())
        assert split.pre_tokenize_str(chr(code))[0][0] == expected


def plain_engine(**options):
    return byte_level(models.BPE(vocab=LETTERS, merges=[], **options))


def test_a_plain_added_end_of_text_is_made_special():
    engine = plain_engine()
    engine.add_tokens([END_OF_TEXT])
    tokenizer = Tokenizer(engine, END_OF_TEXT)
    assert tokenizer.end_of_text == 256
    assert tokenizer.encode(END_OF_TEXT) == list(END_OF_TEXT.encode())
    assert tokenizer.vocab_size == 257


def test_truncation_and_padding_of_a_file_do_not_touch_the_text():
    engine = plain_engine()
    engine.enable_truncation(3)
    engine.enable_padding(length=8)
    tokenizer = Tokenizer(engine, None)
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("a") == list(b"a")


def test_the_vocabulary_reaches_to_the_largest_id_over_gaps():
    tokenizer = Tokenizer(byte_level(models.BPE(vocab={"a": 0, "b": 9}, merges=[])), None)
    assert tokenizer.vocab_size == 10


def test_a_vocabulary_of_words_has_ids_for_words():
    engine = Engine(models.WordLevel({"cat": 0, "[UNK]": 1}, unk_token="[UNK]"))
    engine.normalizer = normalizers.Lowercase()
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(engine, None)
    assert tokenizer.encode("Cat dog") == [0, 1]


@pytest.mark.slow
def test_transformers_reads_what_save_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, tokenizer in (("bytes", ByteTokenizer()), ("bpe", TRAINED)):
        tokenizer.save(tmp_path / name)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs(SAMPLE)["input_ids"] == tokenizer.encode(SAMPLE)
        config = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert theirs.eos_token == config.get("eos_token")


# Training.


def reference_merges(words, number):
    """BPE from its definition: merge the commonest pair, again and again (Sennrich et al. 2016)."""
    counts = {tuple(word): count for word, count in Counter(words).items()}
    merges = []
    for _ in range(number):
        pairs = Counter()
        for word, count in counts.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: pairs[pair])
        merges.append("".join(best))
        merged = {}
        for word, count in counts.items():
            new, i = [], 0
            while i < len(word):
                if word[i : i + 2] == best:
                    new.append("".join(best))
                    i += 2
                else:
                    new.append(word[i])
                    i += 1
            merged[tuple(new)] = merged.get(tuple(new), 0) + count
        counts = merged
    return merges


def test_merges_are_those_of_the_definition():
    # Chosen so that no two pairs are ever equally common: the definition does not break ties.
    words = ["abcd"] * 9 + ["abce"] * 6 + ["xy"] * 4
    text = "\n".join(words)  # a newline is a word of its own for GPT-2's pre-tokenizer
    tokenizer = train_bpe([text], 261)
    learned = [tokenizer.decode([number]) for number in range(257, 261)]
    assert sorted(learned[:2]) == sorted(reference_merges(words, 2))
    assert learned[2:] == reference_merges(words, 4)[2:]


def test_too_little_text_is_refused_with_the_size_that_works():
    why = r"data\.tokenizer asks for bpe:500, .* use --tokenizer bytes or bpe:(\d+)"
    with pytest.raises(ConfigError, match=why) as e:
        train_bpe(["ab ab abc abc"], 500)
    possible = int(str(e.value).split("bytes or bpe:")[1].split(",")[0])
    assert train_bpe(["ab ab abc abc"], possible).vocab_size == possible
    with pytest.raises(ConfigError):
        train_bpe(["ab ab abc abc"], possible + 1)


def test_a_look_alike_of_end_of_text_is_text_for_training_too():
    tokenizer = train_bpe(["<|endoftext|> " * 20], 268)
    assert len(tokenizer.encode("endoftext")) < len("endoftext")  # it was merged, so it was seen
    assert tokenizer.end_of_text not in tokenizer.encode("<|endoftext|>")


def test_training_gives_the_same_tokenizer_in_every_process():
    code = (
        "from halfstep.trainer.data.tokenizer import train_bpe\n"
        f"print(train_bpe([{WORDS!r}], 320).fingerprint)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == train_bpe([WORDS], 320).fingerprint


# Loading.


def saved(folder, *special, config=None, **options):
    engine = plain_engine(**options)
    engine.add_special_tokens(list(special))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(engine.to_str())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, 258),
        ({"eos_token": "<end>"}, 257),
        ({"eos_token": {"content": "<end>", "special": True}}, 257),
        ({"eos_token": None}, 258),
        ({"eos_token": "<absent>"}, None),
    ],
)
def test_the_config_beside_it_names_the_end_of_text(tmp_path, config, expected):
    folder = saved(tmp_path / "t", "</s>", "<end>", END_OF_TEXT, config=config)
    assert load_tokenizer(folder).end_of_text == expected


def test_a_hub_name_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer gpt2: cannot be used .*downloads none"):
        load_tokenizer("gpt2")


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


def test_a_tokenizer_that_encodes_at_random_does_so_no_longer(tmp_path):
    merges = [("a", "b"), ("ab", "c")]
    vocabulary = {**LETTERS, "ab": 256, "abc": 257}
    engine = byte_level(models.BPE(vocab=vocabulary, merges=merges, dropout=0.5))
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert [tokenizer.encode("abc") for _ in range(50)] == [[257]] * 50
