import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from halfstep.trainer.data.corpus import encode as encode_module
from halfstep.trainer.data.corpus.documents import Piece
from halfstep.trainer.data.corpus.encode import encode
from halfstep.trainer.data.tokenizers.tokenizer import ByteTokenizer
from halfstep.trainer.data.tokenizers.training import train_bpe

BPE = train_bpe([Piece("the cat sat on the mat " * 9, 207, 207, True)], 265, total_bytes=207)

DOCUMENTS = st.lists(st.lists(st.text(min_size=1), min_size=1, max_size=3), max_size=6)


def pieces(documents):
    return [
        Piece(text, len(text.encode()), 10, i == 0)
        for document in documents
        for i, text in enumerate(document)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DOCUMENTS, st.sampled_from([1, 8, 1000]))
def test_documents_are_separated_by_a_newline_or_by_end_of_text(monkeypatch, documents, batch):
    monkeypatch.setattr(encode_module, "BATCH_BYTES", batch)
    found = list(encode(pieces(documents), ByteTokenizer(), 99))
    text = "\n".join("".join(document) for document in documents).encode()
    assert np.concatenate([[], *(part.ids for part in found)]).tolist() == list(text)
    assert sum(part.text_bytes for part in found) == len(text)

    found = list(encode(pieces(documents), BPE, 99))
    ids = np.concatenate([[], *(part.ids for part in found)]).astype(int).tolist()
    assert ids.count(BPE.end_of_text) == max(len(documents) - 1, 0)
    assert BPE.decode(ids) == "<|endoftext|>".join("".join(d) for d in documents)
    assert sum(part.text_bytes for part in found) == sum(
        len("".join(d).encode()) for d in documents
    )


@pytest.mark.parametrize("batch", [1, 25, 1000])
def test_source_bytes_and_progress_count_up_to_the_total(monkeypatch, batch):
    monkeypatch.setattr(encode_module, "BATCH_BYTES", batch)
    calls = []
    given_pieces = pieces([["aaaaaaaaaa"] * 4, ["bbbbbbbbbb"] * 2])
    found = list(encode(given_pieces, ByteTokenizer(), 60, lambda *call: calls.append(call)))
    assert calls[-1] == ("encode", 60, 60)
    assert [call[1] for call in calls] == [part.source_bytes for part in found]
    assert [call[1] for call in calls] == sorted({call[1] for call in calls})
    assert len(calls) == {1: 6, 25: 2, 1000: 1}[batch]
