import hashlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data import batches as module
from halfstep.trainer.data.batches import (
    EpochBatches,
    evaluation_batches,
    evaluation_shares,
    permutation,
    philox_bits,
)

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=300)
SIZES = st.integers(1, 70)
SEEDS = st.integers(0, 2**64 - 1)


def epoch(batches, number=0):
    first = number * batches.steps_per_epoch
    return [batches.indices(first + step) for step in range(batches.steps_per_epoch)]


@settings(max_examples=40)
@given(LENGTHS, SIZES, SEEDS, st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_a_step_is_a_pure_function(lengths, size, seed, steps):
    given_lengths = np.array(lengths)
    held = EpochBatches(given_lengths, size, seed)
    given_lengths[:] = 1  # what a caller does to what it gave changes nothing
    for step in steps:
        fresh = EpochBatches(np.array(lengths), size, seed).indices(step)
        assert np.array_equal(held.indices(step), fresh)
        held.indices(step)[:] = 0  # what a caller does to its copy changes nothing


@settings(max_examples=60)
@given(
    st.integers(1, 4), st.integers(1, 9) | st.integers(40, 260), st.integers(1, 5),
    st.integers(0, 9), SEEDS,
)  # fmt: skip
def test_batches_are_cut_from_windows_sorted_by_length(size, steps, longest, short, seed):
    count = size * steps - min(short, size - 1)
    lengths = np.random.default_rng(seed % 99).integers(1, longest + 1, count).tolist()
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
    assert {batch.dtype for batch in found} == {np.dtype(np.int64)}
    assert sorted(i for batch in expected for i in batch) == list(range(count))  # each once
    sizes = [len(batch) for batch in expected]
    assert size >= max(sizes) >= min(sizes) >= max(sizes) - 1


def test_the_batches_of_today_are_the_batches_for_ever():
    # Pinned: a run resumed by another version or on another platform goes on with the same data.
    batches = EpochBatches([5, 3, 8, 1, 9, 2, 7], 3, 42)
    found = [batch.tolist() for batch in epoch(batches) + epoch(batches, 1)]
    assert found == [[6, 2, 4], [1, 0], [3, 5], [1, 0], [6, 2, 4], [3, 5]]
    # The definition: Philox under the first 16 bytes of a hash.
    key = int.from_bytes(hashlib.sha256(b"halfstep:some:42:3").digest()[:16], "little")
    wanted = np.random.Philox(key=key).random_raw(2)
    assert philox_bits("some", 42, 3, 2).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("lengths", "size", "seed", "error", "says"),
    [
        ([], 4, 0, DataError, "there is no example"),
        ([1], 0, 0, ConfigError, "batch_size must be at least 1, got 0"),
        ([1], 1, -1, ConfigError, "seed must be at least 0"),
        ([1], 1, 2**64, ConfigError, "seed must be at least 0 and below"),
    ],
)
def test_what_makes_no_batches_is_refused(lengths, size, seed, error, says):
    with pytest.raises(error, match=says):
        EpochBatches(lengths, size, seed).indices(0)
    if not seed:
        with pytest.raises(error, match=says):
            evaluation_batches(lengths, size)


def test_two_neighbouring_epochs_are_ordered_once_however_they_alternate(monkeypatch):
    # As batches made ahead of training do at the end of an epoch.
    drawn = []

    def counted(purpose, seed, epoch, count):
        drawn.append((purpose, epoch))
        return permutation(purpose, seed, epoch, count)

    monkeypatch.setattr(module, "permutation", counted)
    batches = EpochBatches([1] * 12, 3, 0)
    for step in range(12):
        batches.indices(step + 2)
        batches.indices(step)
    assert len(drawn) == len(set(drawn)) == 2 * 4  # epochs 0 to 3, each its examples and batches


@given(LENGTHS, SIZES)
def test_evaluation_takes_every_example_once_sorted_by_length(lengths, size):
    found = evaluation_batches(lengths, size)
    joined = np.concatenate(found).tolist()
    assert joined == sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    assert [len(batch) for batch in found[:-1]] == [size] * (len(found) - 1)
    assert 1 <= len(found[-1]) <= size


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 7), st.integers(0, 9),
    st.integers(1, 5),
)  # fmt: skip
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


def test_some_batches_are_spread_over_all_lengths():
    lengths = list(range(1, 101))
    found = [int(i[0]) for i, _ in evaluation_shares(lengths, 1, 4)]
    assert found == [0, 25, 50, 75]


def test_bits_are_well_mixed():
    keys = np.concatenate(
        [philox_bits("some", seed, step, 64) for seed in range(16) for step in range(16)]
    )
    assert np.array_equal(philox_bits("some", 0, 0, 99)[:64], keys[:64])
    assert len(set(keys.tolist())) == len(keys)  # 16384 of 2**64: a repetition has p < 2e-11
    bits = keys[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    # Mean of 16384 fair bits: sigma 0.0039; six sigma over 64 columns and all pairs of neighbours.
    assert np.all(np.abs(bits.mean(0) - 0.5) < 0.0235)
    for shift in (1, 64, 1024):  # next place, next step, next seed
        changed = (bits[shift:] != bits[:-shift]).mean(0)
        assert np.all(np.abs(changed - 0.5) < 0.0242)  # sigma of 15360 bits: 0.004
    with pytest.raises(ConfigError, match="epoch or step must be at least 0"):
        philox_bits("some", 0, -1, 1)


def test_purposes_do_not_meet():
    assert not np.array_equal(philox_bits("a", 0, 0, 4), philox_bits("b", 0, 0, 4))
    assert not np.array_equal(philox_bits("a", 1, 11, 4), philox_bits("a", 11, 1, 4))
