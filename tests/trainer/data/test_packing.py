import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from halfstep.trainer.data.corpus.batches import IGNORED
from halfstep.trainer.data.instructions.documents import Documents
from halfstep.trainer.data.instructions.packing import best_fit_decreasing, lm_batch, pack
from halfstep.trainer.data.labelled.length_batches import EpochBatches

PAD = 999


def documents(parts):
    """Documents of (id, learned) pairs."""
    flat = [pair for part in parts for pair in part]
    return Documents(
        np.array([i for i, _ in flat], dtype=np.int32),
        np.array([learned for _, learned in flat], dtype=bool),
        np.cumsum([0, *map(len, parts)]),
        tuple(f"f:{n}" for n in range(len(parts))),
    )


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
    targets = [i if learned else IGNORED for i, learned in part[1:]]
    return ids, [*targets, IGNORED]


token = st.tuples(st.integers(0, 900), st.booleans())
document = st.lists(token, min_size=1, max_size=12).map(lambda d: [(d[0][0], False), *d[1:]])


@settings(max_examples=100)
@given(st.lists(document, min_size=1, max_size=40), st.integers(12, 40), st.booleans(), st.data())
def test_packing_neither_loses_nor_makes_anything(parts, max_length, packing, data):
    rows = pack(documents(parts), max_length, packing=packing)
    assert rows.lengths.max() <= max_length
    assert rows.tokens == sum(map(len, parts))
    assert rows.learned_tokens == sum(learned for part in parts for _, learned in part)
    order = data.draw(st.permutations(range(len(rows))))
    size = data.draw(st.integers(1, len(rows)))
    found, learned, real = [], 0, 0
    for first in range(0, len(rows), size):
        indices = order[first : first + size]
        batch = lm_batch(rows, indices, PAD)
        assert all(part.dtype == torch.int64 and part.is_contiguous() for part in batch)
        assert all(part.shape == (len(indices), rows.lengths[indices].max()) for part in batch)
        learned += int((batch[1] != IGNORED).sum())
        real += int((batch[0] != PAD).sum())
        found += [piece for piece in unpack(batch) if piece[0][0] != PAD]
        for ids, targets in unpack(batch):
            if ids[0] == PAD:
                assert set(ids) == {PAD}
                assert set(targets) == {IGNORED}
    assert sorted(found) == sorted(map(expected, parts))  # every document once, whole and alone
    assert learned == rows.learned_tokens
    assert real == rows.tokens
    if not packing:
        assert len(rows) == len(parts)


@given(st.lists(document, min_size=1, max_size=20))
def test_without_packing_rows_are_the_documents_in_order(parts):
    rows = pack(documents(parts), 12, packing=False)
    for number, part in enumerate(parts):
        ids, targets, positions = lm_batch(rows, [number], PAD)
        assert (ids[0].tolist(), targets[0].tolist()) == expected(part)
        assert positions[0].tolist() == list(range(len(part)))


def naive_best_fit(lengths, capacity):
    """Looks at every bin for every length."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [n for n, room in enumerate(rooms) if room >= length]
        best = min(fitting, key=lambda n: rooms[n], default=None)
        if best is None:
            rooms.append(capacity)
            best = len(rooms) - 1
        rooms[best] -= length
    return sorted(rooms)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 45))
def test_bins_are_those_of_best_fit_decreasing(lengths, capacity):
    bins = best_fit_decreasing(lengths, capacity)
    assert sorted(n for one in bins for n in one) == list(range(len(lengths)))
    rooms = sorted(capacity - sum(lengths[n] for n in one) for one in bins)
    assert rooms == naive_best_fit(lengths, capacity)
    assert bins == best_fit_decreasing(list(lengths), capacity)


def test_a_case_by_hand():
    # 6 leaves 4, filled by 4; 5 leaves 5, 3 then 2 fill it; 3 opens a third.
    assert best_fit_decreasing([3, 5, 6, 4, 2, 3], 10) == [[2, 3], [1, 0, 4], [5]]


def test_many_lengths_are_packed_fast_and_full():
    lengths = np.random.default_rng(0).integers(1, 2049, 100_000).tolist()
    bins = best_fit_decreasing(lengths, 2048)
    # Uniform lengths pair up: what is left over is far below 1 %.
    assert sum(lengths) / (2048 * len(bins)) > 0.99


def test_the_last_token_of_a_document_has_no_target_and_padding_is_a_document():
    parts = [[(5, False), (6, True), (7, True)], [(8, False), (9, True)], [(4, False), (3, True)]]
    rows = pack(documents(parts), 5, packing=True)
    ids, targets, positions = lm_batch(rows, [0, 1], PAD)
    _ = IGNORED
    assert ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, PAD, PAD, PAD]]
    assert targets.tolist() == [[6, 7, _, 9, _], [3, _, _, _, _]]
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert rows.efficiency == pytest.approx(0.7)  # 7 tokens of 2 rows of 5
    assert lm_batch(rows, [1], PAD)[0].shape == (1, 2)  # padded to the batch, not to max_length
    assert lm_batch(rows, [1, 0], PAD)[0][1].tolist() == [5, 6, 7, 8, 9]


def test_no_rows_are_an_empty_batch():
    rows = pack(documents([[(5, False), (6, True)]]), 5, packing=True)
    assert [part.shape for part in lm_batch(rows, [], PAD)] == [(0, 0)] * 3


def test_an_epoch_of_rows_learns_every_token_once():
    rng = np.random.default_rng(1)
    parts = [
        [(int(i), n > 0) for n, i in enumerate(rng.integers(0, 900, rng.integers(2, 30)))]
        for _ in range(200)
    ]
    rows = pack(documents(parts), 32, packing=True)
    batches = EpochBatches(rows.lengths, 4, seed=3)
    for epoch in range(2):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        found = [piece for s in steps for piece in unpack(lm_batch(rows, batches.indices(s), PAD))]
        assert sorted(p for p in found if p[0][0] != PAD) == sorted(map(expected, parts))
