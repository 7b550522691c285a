import hashlib

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from halfstep.errors import DataError
from halfstep.trainer.data import sources
from halfstep.trainer.data.corpus.prepare import TokenSpan, check_ids, split_file, whole_file
from halfstep.trainer.data.sources import find_sources
from halfstep.trainer.data.tokenizers.tokenizer import ByteTokenizer, LibraryTokenizer

BYTES = ByteTokenizer()


@pytest.fixture
def tokens(write):
    def tokens(ids, name="train.bin"):
        return write(name, np.array(ids, dtype="<u2").tobytes())

    return tokens


def span_of(*paths):
    return whole_file(find_sources(tuple(map(str, paths)), "data.train"), "data.train")


def test_a_file_is_used_where_it_lies(tokens):
    path = tokens(range(200))
    found = check_ids(span_of(path), BYTES)
    assert found.path == path
    assert found.tokens.tolist() == list(range(200))
    assert found.dtype == "uint16"
    assert found.vocab_size == 256
    assert found.text_bytes == 200
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"),
    [(100, 0.1, 10), (10, 0.01, 1), (2, 0.5, 1), (2, 0.9, 1), (3, 0.99, 2)],
)
def test_the_last_tokens_are_validation(tokens, count, fraction, held_out):
    path = tokens(range(count))
    first, second = split_file(span_of(path), fraction)
    train, validation = check_ids(first, BYTES), check_ids(second, BYTES)
    assert train.tokens.tolist() == list(range(count - held_out))
    assert validation.tokens.tolist() == list(range(count - held_out, count))
    assert validation.sha256 == hashlib.sha256(path.read_bytes()[-2 * held_out :]).hexdigest()


def test_one_token_cannot_be_split(tokens):
    with pytest.raises(DataError, match=r"train\.bin: 2 bytes in too few"):
        split_file(span_of(tokens([1])), 0.5)


def test_an_odd_number_of_bytes_is_refused_with_the_size(write):
    with pytest.raises(DataError, match=r"train\.bin: 7 bytes are not a whole number of uint16"):
        span_of(write("train.bin", b"1234567"))


def test_several_files_are_refused_with_the_way_out(tokens):
    paths = tokens([1, 2], "train.bin"), tokens([3], "val.bin")
    with pytest.raises(DataError, match=r"2 \.bin files \(.*train\.bin, .*val\.bin.*validation"):
        span_of(*paths)


@pytest.mark.parametrize("chunk", [1, 3, 8, 1 << 20])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(tokens, monkeypatch, chunk):
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
    path = tokens([1, 2, 255, 3, 256, 999])
    with pytest.raises(
        DataError,
        match=r"train\.bin: token 256 at offset 4 \(byte 8\) is outside the vocabulary of 256 ids",
    ):
        check_ids(span_of(path), BYTES)
    second = TokenSpan(span_of(path).source, 5, 6)
    with pytest.raises(DataError, match=r"token 999 at offset 5 \(byte 10\)"):
        check_ids(second, BYTES)
    check_ids(TokenSpan(second.source, 0, 4), BYTES)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_text_bytes_are_exact_and_reads_may_end_within_a_token(tokens, monkeypatch, chunk):
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
    calls = []
    found = check_ids(span_of(tokens([65] * 9)), BYTES, lambda *call: calls.append(call))
    assert found.text_bytes == 9
    assert found.sha256 == hashlib.sha256(b"A\0" * 9).hexdigest()
    assert calls[-1] == ("check", 18, 18)


def test_text_bytes_are_unknown_where_the_tokenizer_does_not_know(tokens):
    engine = Tokenizer(models.WordLevel({"cat": 0, "dog": 1}, unk_token="cat"))
    assert check_ids(span_of(tokens([0, 1])), LibraryTokenizer(engine, None)).text_bytes is None


def test_a_file_that_shrinks_meanwhile_is_noticed(tokens):
    path = tokens(range(10))
    span = span_of(path)
    path.write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"train\.bin: changed while it was read"):
        check_ids(span, BYTES)
