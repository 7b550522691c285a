import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.batches import batch, start_of_sequence, validation_batches
from halfstep.trainer.data.token_file import TokenFile


def token_file(path, ids, dtype="uint16"):
    path.write_bytes(np.array(ids).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    return TokenFile(
        path=path, dtype=dtype, count=len(ids), text_bytes=1, vocab_size=2**32, sha256="",
    )  # fmt: skip


@pytest.fixture
def tokens(tmp_path):
    """A file of ids that count up."""
    return lambda count: token_file(tmp_path / "tokens.bin", range(count))


U64 = st.integers(0, 2**64 - 1)


@given(U64, U64, st.integers(0, 2**63), st.integers(1, 2**40))
def test_starts_are_those_of_philox(seed, step, number, places):
    key, counter = np.array([seed, 0], np.uint64), np.array([0, number, step, 0], np.uint64)
    first = int(np.random.Philox(key=key, counter=counter).random_raw())
    assert start_of_sequence(seed, step, number, places) == first * places >> 64


def test_starts_are_pinned_for_ever():
    # Written down once: a change would silently change every run that is resumed.
    found = [start_of_sequence(1337, step, number, 10**6) for step in (0, 1) for number in (0, 1)]
    assert found == [919616, 560172, 919532, 337227]


def test_targets_are_the_next_tokens(tokens):
    inputs, targets = batch(tokens(500), seed=1, step=2, sequences=range(6), block_size=32)
    assert inputs.shape == targets.shape == (6, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)  # the tokens count up
    assert torch.equal(inputs - inputs[:, :1], torch.arange(32).expand(6, 32))
    starts = [start_of_sequence(1, 2, number, 500 - 32) for number in range(6)]
    assert inputs[:, 0].tolist() == starts


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("shared") / "shared.bin", range(300))


@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(1, 16), st.data())
def test_a_step_is_the_same_however_it_is_shared_out(shared, seed, step, count, data):
    file = shared
    cut = data.draw(st.integers(0, count))
    whole = batch(file, seed=seed, step=step, sequences=range(count), block_size=8)
    parts = [
        batch(file, seed=seed, step=step, sequences=part, block_size=8)
        for part in (range(cut), range(cut, count))
    ]
    for i in (0, 1):
        assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))
    again = batch(file, seed=seed, step=step, sequences=range(count), block_size=8)
    assert torch.equal(whole[0], again[0])


def test_both_ends_of_the_file_are_reached(tokens):
    file = tokens(6)
    inputs, targets = batch(file, seed=0, step=0, sequences=range(100), block_size=4)
    assert sorted(set(inputs[:, 0].tolist())) == [0, 1]
    assert targets.max() == 5
    exact, _ = batch(tokens(5), seed=0, step=0, sequences=range(3), block_size=4)
    assert exact.tolist() == [[0, 1, 2, 3]] * 3


def test_no_sequences_are_an_empty_batch(tokens):
    inputs, targets = batch(tokens(9), seed=0, step=0, sequences=range(0), block_size=4)
    assert inputs.shape == targets.shape == (0, 4)


def test_large_ids_are_not_wrapped(tmp_path):
    file = token_file(tmp_path / "t.bin", [65_535, 70_000, 4_000_000_000], "uint32")
    inputs, targets = batch(file, seed=0, step=0, sequences=range(1), block_size=2)
    assert inputs.tolist() == [[65_535, 70_000]]
    assert targets.tolist() == [[70_000, 4_000_000_000]]


@pytest.mark.parametrize("count", [1, 4])
def test_too_few_tokens_are_refused_with_the_counts(tokens, count):
    words = rf"^{count} tokens are too few for block_size 4, which needs 5; use"
    with pytest.raises(DataError, match=words):
        batch(tokens(count), seed=0, step=0, sequences=range(1), block_size=4)
    with pytest.raises(DataError, match=words):
        validation_batches(tokens(count), block_size=4, batch_size=1, max_batches=None)


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"max_batches": 0}])
def test_validation_arguments_out_of_range_are_refused(tokens, bad):
    given = {"block_size": 4, "batch_size": 1, "max_batches": None} | bad
    with pytest.raises(ConfigError, match=next(iter(bad))):
        validation_batches(tokens(9), **given)


@pytest.mark.parametrize("count", [5, 8, 9, 10, 41, 100, 101])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_validation_counts_every_target_once_and_in_order(tokens, count, block_size, batch_size):
    given = {"block_size": block_size, "batch_size": batch_size, "max_batches": None}
    found = list(validation_batches(tokens(count), **given))
    for inputs, targets in found:
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == block_size
        assert inputs.shape[0] <= batch_size
        assert inputs.dtype == targets.dtype == torch.int64
        kept = targets != -100
        assert torch.equal(targets[kept], inputs[kept] + 1)
        assert torch.all(inputs[~kept] == 0)
        assert kept.any(dim=1).all()  # no window without a target
    assert all(len(inputs) == batch_size for inputs, _ in found[:-1])
    flat = torch.cat([targets.flatten() for _, targets in found])
    assert flat[flat != -100].tolist() == list(range(1, count))
    again = list(validation_batches(tokens(count), **given))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize(("batch_size", "max_batches"), [(1, 1), (2, 3), (3, 7), (4, 5), (2, 99)])
def test_limited_validation_is_spread_evenly_without_overlap(tokens, batch_size, max_batches):
    count, block_size = 101, 4  # 25 windows
    found = list(
        validation_batches(
            tokens(count), block_size=block_size, batch_size=batch_size, max_batches=max_batches
        )
    )
    assert all(len(inputs) == batch_size for inputs, _ in found[:-1])
    starts = torch.cat([inputs[:, 0] for inputs, _ in found]).tolist()
    assert len(starts) == min(25, batch_size * max_batches)
    assert all(start % block_size == 0 for start in starts)
    gaps = [(b - a) // block_size for a, b in itertools.pairwise(starts)]
    assert starts[0] == 0
    if gaps:
        assert min(gaps) >= 1
        assert max(gaps) - min(gaps) <= 1
        assert 25 - starts[-1] // block_size <= min(gaps) + 1
