import hashlib
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.documents import Piece
from halfstep.trainer.data.tokenizers.files import load_tokenizer
from halfstep.trainer.data.tokenizers.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    LibraryTokenizer,
    byte_letters,
    byte_level,
)
from halfstep.trainer.data.tokenizers.training import train_bpe

SAMPLE = "the cat sat on the mat; the dog, the cat's. \u00e9t\u00e9 \u732b\u732b 12 12\r\n" * 8
TRAINED = train_bpe(
    [Piece(SAMPLE, len(SAMPLE.encode()), len(SAMPLE.encode()), True)], 280, total_bytes=1000
)
BOTH = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED], ids=["bytes", "bpe"])
LOOKALIKE = st.lists(
    st.one_of(st.text(), st.sampled_from([END_OF_TEXT, "the cat", " ", "\r\n", "\0", "\ufeff"]))
).map("".join)


@BOTH
@given(text=LOOKALIKE)
def test_decoding_gives_any_text_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= index < tokenizer.vocab_size for index in ids)
    assert tokenizer.end_of_text not in ids


@BOTH
@given(texts=st.lists(LOOKALIKE, max_size=4))
def test_a_batch_encodes_each_text_as_if_alone(tokenizer, texts):
    alone = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == alone
    arrays = tokenizer.encode_arrays(texts)
    assert [array.tolist() for array in arrays] == alone
    assert {array.dtype for array in arrays} <= {np.dtype(np.uint32)}


@BOTH
@given(text=LOOKALIKE)
def test_token_bytes_add_up_to_the_bytes_of_the_text(tokenizer, text):
    lengths = tokenizer.token_bytes
    assert lengths.shape == (tokenizer.vocab_size,)
    assert sum(lengths[index] for index in tokenizer.encode(text)) == len(text.encode())


def test_the_byte_tokenizer_is_utf8():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("h\u00e9") == [0x68, 0xC3, 0xA9]
    assert tokenizer.decode([0x68, 0xC3]) == "h\ufffd"
    assert tokenizer.vocab_size == 256
    assert tokenizer.end_of_text is None


@pytest.mark.parametrize("bad", [256, -1])
def test_the_byte_tokenizer_names_an_id_that_is_no_byte(bad):
    with pytest.raises(DataError, match=f"id {bad} is not a byte"):
        ByteTokenizer().decode([65, bad])


@BOTH
@pytest.mark.parametrize("method", ["encode", "encode_batch", "encode_arrays"])
def test_half_a_surrogate_pair_is_refused(tokenizer, method):
    text = "ab\ud800" if method == "encode" else ["fine", "ab\ud800"]
    with pytest.raises(DataError, match=r"half a surrogate pair \(U\+D800\) at character 2"):
        getattr(tokenizer, method)(text)


def test_end_of_text_is_id_0_with_no_bytes_of_text_and_is_shown_when_decoded():
    assert TRAINED.end_of_text == 0
    assert TRAINED.token_bytes[0] == 0
    assert TRAINED.decode([0]) == END_OF_TEXT


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


def test_a_saved_byte_tokenizer_has_the_same_ids_for_other_programs(tmp_path):
    ByteTokenizer().save(tmp_path)
    other = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(map(chr, range(0x250))) + "\u732b\U0001f600"
    assert other.encode(text).ids == list(text.encode())
    assert other.decode(list(text.encode())) == text


def test_a_pickled_tokenizer_still_takes_special_tokens_for_text():
    copy = pickle.loads(pickle.dumps(TRAINED))
    assert copy.fingerprint == TRAINED.fingerprint
    assert copy.encode("a" + END_OF_TEXT) == TRAINED.encode("a" + END_OF_TEXT)
    assert copy.end_of_text not in copy.encode(END_OF_TEXT)


def test_fingerprints_differ_with_anything_that_changes_ids():
    def make(text, size, end=END_OF_TEXT):
        piece = Piece(text, len(text), len(text), True)
        trained = train_bpe([piece], size, total_bytes=len(text))
        return LibraryTokenizer(trained._engine, end)

    prints = [
        ByteTokenizer().fingerprint,
        make("ab ab ab", 258).fingerprint,
        make("ba ba ba", 258).fingerprint,
        make("abc abc abc", 259).fingerprint,
        make("ab ab ab", 258, None).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert make("ab ab ab", 258).fingerprint == prints[1]
    assert all(len(bytes.fromhex(p)) == hashlib.sha256().digest_size for p in prints)


def test_byte_letters_are_those_of_the_library():
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "".join(byte_letters())
    # Each letter stands for its byte in the library's own pre-tokenizer.
    for byte in range(0x80):
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        assert split.pre_tokenize_str(chr(byte))[0][0] == letters[byte]


def plain_engine(**options):
    vocab = {letter: number for number, letter in enumerate(byte_letters())}
    return byte_level(models.BPE(vocab=vocab, merges=[], **options))


def test_a_plain_added_end_of_text_is_made_special():
    engine = plain_engine()
    engine.add_tokens([END_OF_TEXT])
    tokenizer = LibraryTokenizer(engine, END_OF_TEXT)
    assert tokenizer.end_of_text == 256
    assert tokenizer.encode(END_OF_TEXT) == list(END_OF_TEXT.encode())
    assert tokenizer.vocab_size == 257


def test_truncation_and_padding_of_a_file_do_not_touch_the_text():
    engine = plain_engine()
    engine.enable_truncation(3)
    engine.enable_padding(length=8)
    tokenizer = LibraryTokenizer(engine, None)
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("a") == list(b"a")


def test_the_vocabulary_reaches_to_the_largest_id_over_gaps():
    engine = byte_level(models.BPE(vocab={"a": 0, "b": 9}, merges=[]))
    tokenizer = LibraryTokenizer(engine, None)
    assert tokenizer.vocab_size == 10
    assert tokenizer.token_bytes.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_plain_added_tokens_count_their_bytes():
    engine = plain_engine()
    engine.add_tokens([AddedToken("  ", normalized=False), AddedToken("\u00e9t\u00e9")])
    tokenizer = LibraryTokenizer(engine, None)
    text = "a  b \u00e9t\u00e9"
    ids = tokenizer.encode(text)
    assert {256, 257} <= set(ids)
    assert sum(tokenizer.token_bytes[ids]) == len(text.encode())


def test_a_tokenizer_that_encodes_at_random_is_refused():
    with pytest.raises(DataError, match=r"BPE dropout 0\.5.* set \"dropout\" to null"):
        LibraryTokenizer(plain_engine(dropout=0.5), None)


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(DataError, match="empty vocabulary"):
        LibraryTokenizer(byte_level(models.BPE()), None)


def test_bytes_of_tokens_are_unknown_where_letters_are_not_bytes():
    engine = Tokenizer(models.WordLevel({"cat": 0, "[UNK]": 1}, unk_token="[UNK]"))
    engine.normalizer = normalizers.Lowercase()
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = LibraryTokenizer(engine, None)
    assert tokenizer.token_bytes is None
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
