import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data.instructions.documents import Documents, fit


def documents(parts):
    """Documents of (id, learned) pairs."""
    flat = [pair for part in parts for pair in part]
    return Documents(
        np.array([i for i, _ in flat], dtype=np.int32),
        np.array([learned for _, learned in flat], dtype=bool),
        np.cumsum([0, *map(len, parts)]),
        tuple(f"f:{n}" for n in range(len(parts))),
    )


def pairs(found):
    """[(place, pairs)] of documents."""
    return [
        (
            found.places[n],
            list(
                zip(
                    found.ids[found.starts[n] : found.starts[n + 1]].tolist(),
                    found.learned[found.starts[n] : found.starts[n + 1]].tolist(),
                    strict=True,
                )
            ),
        )
        for n in range(len(found))
    ]


token = st.tuples(st.integers(0, 90), st.booleans())
document = st.lists(token, min_size=1, max_size=20).map(lambda d: [(d[0][0], False), *d[1:]])
corpora = st.lists(document, min_size=1, max_size=12)


def learns(part):
    return any(learned for _, learned in part)


@settings(max_examples=100)
@given(corpora, st.integers(2, 22), st.sampled_from(["truncate", "drop"]))
def test_documents_are_cut_or_dropped_by_definition(parts, max_length, drop_long):
    found, notes = fit(documents(parts), max_length, drop_long, text=False)
    kept = [
        (f"f:{n}", part[:max_length])
        for n, part in enumerate(parts)
        if drop_long == "truncate" or len(part) <= max_length
    ]
    assert pairs(found) == [(place, part) for place, part in kept if learns(part)]
    long = sum(len(part) > max_length for part in parts)
    lost = sum(max(len(part) - max_length, 0) for part in parts)
    if long and drop_long == "truncate":
        assert notes[0] == f"{long} documents cut to {max_length} tokens, {lost} tokens left out"
    if long and drop_long == "drop":
        assert notes[0] == f"{long} documents of more than {max_length} tokens left out"
    empty = sum(not learns(part) for _, part in kept)
    told = [
        n for n in notes if n == f"{empty} documents left out: no token to learn within max_length"
    ]
    assert len(told) == bool(empty)
    assert len(notes) == bool(long) + bool(empty)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(2, 12))
def test_text_is_cut_so_that_every_token_is_learned_once(lengths, max_length):
    tokens = iter(range(1000))
    parts = [[(next(tokens), n > 0) for n in range(length)] for length in lengths]
    found, _ = fit(documents(parts), max_length, "truncate", text=True)
    learned, read = [], []
    for place, part in pairs(found):
        assert 2 <= len(part) <= max_length
        assert not part[0][1]
        ids = [i for i, _ in part]
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        assert set(ids) <= {i for i, _ in parts[int(place[2:])]}
        learned += [i for i, counts in part if counts]
        read += ids[:-1]  # what stands before a learned token
    assert learned == [i for part in parts for i, counts in part if counts]
    assert read == [i for part in parts for i, _ in part[:-1]]


def test_refuse_names_the_first_that_is_too_long():
    parts = [[(1, False), (2, True)], [(1, False)] * 4 + [(3, True)], [(1, True)] * 9]
    why = r"f:1: 5 tokens, more than max_length 4 \(2 such in all, the longest has 9\); raise"
    with pytest.raises(DataError, match=why):
        fit(documents(parts), 4, "refuse", text=False)
    found, notes = fit(documents(parts), 9, "refuse", text=False)
    assert (len(found), notes) == (3, [])


def test_select_takes_documents_in_any_order():
    parts = [[(1, False), (2, True)], [(3, False)], [(4, False), (5, True), (6, True)]]
    found = documents(parts).select(np.array([2, 0, 2]))
    assert pairs(found) == [("f:2", parts[2]), ("f:0", parts[0]), ("f:2", parts[2])]
    assert len(documents(parts).select(np.array([], dtype=np.int64))) == 0


def test_a_part_whose_only_learned_token_is_its_first_is_left_out():
    part = [(0, False), (1, False), (2, True), (3, False), (4, False)]
    found, notes = fit(documents([part]), 3, "truncate", text=True)
    assert pairs(found) == [("f:0", part[:3])]
    assert notes[-1] == "1 documents left out: no token to learn within max_length"
