"""Which rows a step takes: the same on every machine, for every number of ranks, for ever."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from halfstep.errors import DataError
from halfstep.trainer.data.batches import (
    EpochBatches,
    TokenFile,
    batch,
    evaluation_batches,
    evaluation_shares,
    permutation,
    start_of_sequence,
    validation_batches,
)


def token_file(path, ids, dtype="uint16"):
    path.write_bytes(np.array(ids).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    return TokenFile(
        path=path, dtype=dtype, count=len(ids), text_bytes=1, sha256="",
    )  # fmt: skip


@pytest.fixture
def tokens(tmp_path):
    """A file of ids that count up."""
    return lambda count: token_file(tmp_path / "tokens.bin", range(count))


U64 = st.integers(0, 2**64 - 1)


def test_starts_are_pinned_for_ever():
    # Written down once, from the Philox of the paper: a change would change every resumed run.
    found = [start_of_sequence(1337, step, number, 10**6) for step in (0, 1) for number in (0, 1)]
    assert found == [919616, 560172, 919532, 337227]


def test_targets_are_the_next_tokens(tokens):
    inputs, targets = batch(tokens(500), seed=1, step=2, sequences=range(6), block_size=32)
    assert inputs.shape == targets.shape == (6, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)  # the tokens count up
    assert torch.equal(inputs - inputs[:, :1], torch.arange(32).expand(6, 32))
    starts = [start_of_sequence(1, 2, number, 500 - 32) for number in range(6)]
    assert inputs[:, 0].tolist() == starts


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("shared") / "shared.bin", range(300))


@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(1, 16), st.data())
def test_a_step_is_the_same_however_it_is_shared_out(shared, seed, step, count, data):
    cut = data.draw(st.integers(0, count))
    whole, *parts = (
        batch(shared, seed=seed, step=step, sequences=part, block_size=8)
        for part in (range(count), range(cut), range(cut, count))
    )
    for i in (0, 1):
        assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))


def test_too_few_tokens_are_refused_with_the_counts(tokens):
    words = r"^4 tokens are too few for block_size 4, which needs 5; use"
    with pytest.raises(DataError, match=words):
        batch(tokens(4), seed=0, step=0, sequences=range(1), block_size=4)
    with pytest.raises(DataError, match=words):
        validation_batches(tokens(4), block_size=4, batch_size=1, max_batches=None)


@pytest.mark.parametrize("count", [5, 8, 9, 10, 101])
@pytest.mark.parametrize(("block_size", "batch_size"), [(1, 3), (4, 1), (4, 3)])
def test_validation_counts_every_target_once_and_in_order(tokens, count, block_size, batch_size):
    given = {"block_size": block_size, "batch_size": batch_size, "max_batches": None}
    found = list(validation_batches(tokens(count), **given))
    for inputs, targets in found:
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == block_size
        assert inputs.shape[0] <= batch_size
        kept = targets != -100
        assert torch.equal(targets[kept], inputs[kept] + 1)
        assert torch.all(inputs[~kept] == 0)
        assert kept.any(dim=1).all()  # no window without a target
    assert all(len(inputs) == batch_size for inputs, _ in found[:-1])
    flat = torch.cat([targets.flatten() for _, targets in found])
    assert flat[flat != -100].tolist() == list(range(1, count))


@pytest.mark.parametrize(("batch_size", "max_batches"), [(1, 1), (2, 3), (3, 7), (2, 99)])
def test_limited_validation_is_spread_evenly_without_overlap(tokens, batch_size, max_batches):
    given = {"block_size": 4, "batch_size": batch_size, "max_batches": max_batches}
    found = list(validation_batches(tokens(101), **given))  # 25 windows
    starts = torch.cat([inputs[:, 0] for inputs, _ in found]).tolist()
    assert len(starts) == min(25, batch_size * max_batches)
    assert all(start % 4 == 0 for start in starts)
    gaps = [(b - a) // 4 for a, b in itertools.pairwise(starts)]
    assert starts[0] == 0
    assert not gaps or 1 <= min(gaps) <= max(gaps) <= min(gaps) + 1


# Batches of examples of different lengths.

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=300).map(np.array)
SIZES = st.integers(1, 70)


def epoch(batches, number=0):
    first = number * batches.steps_per_epoch
    return [batches.indices(first + step) for step in range(batches.steps_per_epoch)]


@settings(max_examples=60)
@given(
    st.integers(1, 4), st.integers(1, 9) | st.integers(40, 260), st.integers(1, 5),
    st.integers(0, 9), U64,
)  # fmt: skip
def test_batches_are_cut_from_windows_sorted_by_length(size, steps, longest, short, seed):
    count = size * steps - min(short, size - 1)
    lengths = np.random.default_rng(seed % 99).integers(1, longest + 1, count)
    shuffled = permutation("examples of an epoch", seed, 1, count).tolist()
    windows = max(1, steps // 50)
    expected = []
    for window in range(windows):
        first, last = (w * steps // windows for w in (window, window + 1))
        members = shuffled[first * count // steps : last * count // steps]
        members.sort(key=lambda example: lengths[example])
        for step in range(first, last):
            start, stop = (s * count // steps for s in (step, step + 1))
            expected.append([members.pop(0) for _ in range(start, stop)])
        assert not members
    order = permutation("batches of an epoch", seed, 1, steps)
    found = epoch(EpochBatches(lengths, size, seed), 1)
    assert [batch.tolist() for batch in found] == [expected[i] for i in order]
    assert sorted(i for batch in expected for i in batch) == list(range(count))  # each once
    sizes = [len(batch) for batch in expected]
    assert size >= max(sizes) >= min(sizes) >= max(sizes) - 1


def test_the_batches_of_today_are_the_batches_for_ever():
    # Pinned: a run resumed by another version or on another platform goes on with the same data.
    batches = EpochBatches(np.array([5, 3, 8, 1, 9, 2, 7]), 3, 42)
    found = [batch.tolist() for batch in epoch(batches) + epoch(batches, 1)]
    assert found == [[6, 2, 4], [1, 0], [3, 5], [1, 0], [6, 2, 4], [3, 5]]


@given(LENGTHS, SIZES)
def test_evaluation_takes_every_example_once_sorted_by_length(lengths, size):
    found = evaluation_batches(lengths, size)
    joined = np.concatenate(found).tolist()
    assert joined == sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    assert [len(batch) for batch in found[:-1]] == [size] * (len(found) - 1)
    assert 1 <= len(found[-1]) <= size


@given(LENGTHS, st.integers(1, 7), st.integers(0, 9), st.integers(1, 5))
def test_ranks_share_an_evaluation(lengths, size, most, ranks):
    shares = [list(evaluation_shares(lengths, size, most, rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1  # all ranks run as often
    counted = [indices.tolist() for share in shares for indices, counts in share if counts]
    every = [indices.tolist() for indices in evaluation_batches(lengths, size)]
    assert len(counted) == (min(most, len(every)) or len(every))
    assert all(batch in every for batch in counted)
    assert len({tuple(batch) for batch in counted}) == len(counted)  # each once
    fillers = [indices for share in shares for indices, counts in share if not counts]
    assert len(fillers) < ranks
    assert all(len(filler) == 1 for filler in fillers)
