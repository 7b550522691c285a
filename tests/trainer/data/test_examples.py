import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data import batches as module
from halfstep.trainer.data.batches import encode_examples, padded
from halfstep.trainer.data.config import LabelledTexts
from halfstep.trainer.data.token_file import ENCODE


class Codepoints:
    """1, the code points, 2; at most ``max_length`` ids."""

    def __init__(self, max_length=12):
        self.max_length = max_length
        self.calls = []

    def encode_batch(self, texts):
        self.calls.append(len(texts))
        return [[1, *list(map(ord, text))[: self.max_length - 2], 2] for text in texts]


def encoded(texts, labels=None, **options):
    labels = list(range(len(texts))) if labels is None else labels
    return encode_examples(Codepoints(**options).encode_batch, LabelledTexts(texts, labels))


@given(st.lists(st.text(st.characters(codec="utf-8")), max_size=30), st.integers(1, 7))
def test_every_example_is_what_the_tokenizer_gave(texts, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_TEXTS", chunk)
        found = encoded(texts)
    rows = Codepoints().encode_batch(texts)
    assert len(found) == len(texts)
    assert [
        found.ids[a:b].tolist() for a, b in zip(found.starts, found.starts[1:], strict=False)
    ] == rows
    assert found.lengths.tolist() == list(map(len, rows))
    assert (found.ids.dtype, found.starts.dtype) == (np.int32, np.int64)
    assert found.labels.tolist() == list(range(len(texts)))
    assert found.labels.dtype == np.int64


def test_texts_go_to_the_tokenizer_in_chunks_and_progress_is_told():
    tokenizer, told = Codepoints(), []
    texts = ["\u00e9"] * 2500
    encode_examples(
        tokenizer.encode_batch, LabelledTexts(texts, [0] * 2500), lambda *what: told.append(what)
    )
    assert tokenizer.calls == [1024, 1024, 452]
    assert told == [(ENCODE, 2048, 5000), (ENCODE, 4096, 5000), (ENCODE, 5000, 5000)]


def test_a_text_without_tokens_is_refused():
    class Nothing:
        def encode_batch(self, texts):
            return [[] if text == "?" else [1] for text in texts]

    with pytest.raises(DataError, match=r"no token for the text '\?'; use a tokenizer that adds"):
        encode_examples(Nothing().encode_batch, LabelledTexts(["x", "?"], [0, 1]))


@settings(max_examples=100)
@given(st.lists(st.text("abc", max_size=20), min_size=1, max_size=12), st.data())
def test_rows_are_padded_on_the_right(texts, data):
    found = encoded(texts, max_length=40)
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=15))
    ids, mask, labels = padded(found, np.array(chosen, dtype=np.int64), pad_id=7)
    rows = Codepoints(40).encode_batch([texts[i] for i in chosen])
    width = max(map(len, rows), default=0)
    assert ids.tolist() == [row + [7] * (width - len(row)) for row in rows]
    assert mask.tolist() == [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    assert labels.tolist() == chosen
    before = found.ids.tobytes() + found.labels.tobytes()
    for tensor in (ids, labels):
        tensor.zero_()  # a batch can be changed without changing the examples
    assert found.ids.tobytes() + found.labels.tobytes() == before
    assert (ids.dtype, mask.dtype, labels.dtype) == (torch.int64, torch.bool, torch.int64)
    assert ids.shape == mask.shape == (len(chosen), width)
