import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from halfstep.trainer.data.instructions import (
    Encoded,
    best_fit_decreasing,
    fit,
    lm_batch,
    pack,
)
from halfstep.trainer.models import IGNORE_INDEX

PAD = 999


def documents(parts):
    """Documents of (id, learned) pairs."""
    return [
        Encoded(
            np.array([i for i, _ in part], dtype=np.int32),
            np.array([learned for _, learned in part], dtype=bool),
        )
        for part in parts
    ]


def unpack(batch):
    """Takes a batch apart by the words of the contract: [(ids, targets) of each document]."""
    found = []
    for ids, targets, positions in zip(*(part.tolist() for part in batch), strict=True):
        for i, target, position in zip(ids, targets, positions, strict=True):
            if position == 0:
                found.append(([], []))
            assert position == len(found[-1][0])
            found[-1][0].append(i)
            found[-1][1].append(target)
    return found


def expected(part):
    """(ids, targets) of a document by definition: the next id where that one is learned."""
    ids = [i for i, _ in part]
    targets = [i if learned else IGNORE_INDEX for i, learned in part[1:]]
    return ids, [*targets, IGNORE_INDEX]


token = st.tuples(st.integers(0, 900), st.booleans())
document = st.lists(token, min_size=1, max_size=12).map(lambda d: [(d[0][0], False), *d[1:]])


@settings(max_examples=100)
@given(st.lists(document, min_size=1, max_size=40), st.integers(12, 40), st.booleans(), st.data())
def test_packing_neither_loses_nor_makes_anything(parts, max_length, packing, data):
    rows = pack(documents(parts), max_length, packing=packing)
    assert rows.lengths.max() <= max_length
    assert len(rows.ids) == sum(map(len, parts))
    assert rows.learned_tokens == sum(learned for part in parts for _, learned in part)
    order = data.draw(st.permutations(range(len(rows))))
    size = data.draw(st.integers(1, len(rows)))
    found, learned, real = [], 0, 0
    for first in range(0, len(rows), size):
        indices = order[first : first + size]
        batch = lm_batch(rows, indices, PAD)
        assert all(part.dtype == torch.int64 and part.is_contiguous() for part in batch)
        assert all(part.shape == (len(indices), rows.lengths[indices].max()) for part in batch)
        learned += int((batch[1] != IGNORE_INDEX).sum())
        real += int((batch[0] != PAD).sum())
        found += [piece for piece in unpack(batch) if piece[0][0] != PAD]
        for ids, targets in unpack(batch):
            if ids[0] == PAD:
                assert set(ids) == {PAD}
                assert set(targets) == {IGNORE_INDEX}
    assert sorted(found) == sorted(map(expected, parts))  # every document once, whole and alone
    assert learned == rows.learned_tokens
    assert real == len(rows.ids)
    if not packing:
        assert len(rows) == len(parts)


def test_bins_are_those_of_best_fit_decreasing():
    # 9, 7, 5 open bins; the other 5 fills one; 4 opens one; 4, 3, 2, 1 go where least is left
    lengths = [5, 3, 9, 4, 2, 7, 1, 5, 4]
    assert best_fit_decreasing(lengths, 10) == [[2, 6], [5, 1], [0, 7], [3, 8, 4]]
    # of equal rooms, the bin that came to it last
    assert best_fit_decreasing([6, 6, 4, 4], 10) == [[0, 3], [1, 2]]


def test_the_last_token_of_a_document_has_no_target_and_padding_is_a_document():
    parts = [[(5, False), (6, True), (7, True)], [(8, False), (9, True)], [(4, False), (3, True)]]
    rows = pack(documents(parts), 5, packing=True)
    ids, targets, positions = lm_batch(rows, [0, 1], PAD)
    _ = IGNORE_INDEX
    assert ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, PAD, PAD, PAD]]
    assert targets.tolist() == [[6, 7, _, 9, _], [3, _, _, _, _]]
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert rows.efficiency == pytest.approx(0.7)  # 7 tokens of 2 rows of 5
    assert lm_batch(rows, [1], PAD)[0].shape == (1, 2)  # padded to the batch, not to max_length
    assert lm_batch(rows, [1, 0], PAD)[0][1].tolist() == [5, 6, 7, 8, 9]


def pairs(found):
    """The pairs of each document."""
    return [list(zip(ids.tolist(), learned.tolist(), strict=True)) for ids, learned in found]


corpora = st.lists(document, min_size=1, max_size=12)


def learns(part):
    return any(learned for _, learned in part)


@settings(max_examples=100)
@given(corpora, st.integers(2, 22))
def test_documents_are_cut_by_definition(parts, max_length):
    found, notes = fit(documents(parts), max_length, text=False)
    kept = [part[:max_length] for part in parts]
    assert pairs(found) == [part for part in kept if learns(part)]
    long = sum(len(part) > max_length for part in parts)
    empty = sum(not learns(part) for part in kept)
    assert [note.split()[0] for note in notes] == [str(n) for n in (long, empty) if n]


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(2, 12))
def test_text_is_cut_so_that_every_token_is_learned_once(lengths, max_length):
    tokens = iter(range(1000))
    parts = [[(next(tokens), n > 0) for n in range(length)] for length in lengths]
    found, _ = fit(documents(parts), max_length, text=True)
    learned, read = [], []
    for part in pairs(found):
        assert 2 <= len(part) <= max_length
        assert not part[0][1]
        ids = [i for i, _ in part]
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        assert any(set(ids) <= {i for i, _ in part} for part in parts)
        learned += [i for i, counts in part if counts]
        read += ids[:-1]  # what stands before a learned token
    assert learned == [i for part in parts for i, counts in part if counts]
    assert read == [i for part in parts for i, _ in part[:-1]]
