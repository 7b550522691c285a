from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.labelled.labelled import dev_sizes, single_examples, stratified_split

LABELS = st.lists(st.integers(0, 6), min_size=2, max_size=200).filter(
    lambda labels: any(labels.count(label) > 1 for label in labels)
)
SHARES = st.floats(0.01, 0.99)


def hamilton(counts, total):
    """Largest remainders as in the books, in fractions and without bounds."""
    quotas = [Fraction(count * total, sum(counts)) for count in counts]
    sizes = [int(quota) for quota in quotas]
    order = sorted(range(len(counts)), key=lambda c: (sizes[c] - quotas[c], c))
    for c in order[: total - sum(sizes)]:
        sizes[c] += 1
    return sizes


@given(LABELS, SHARES, st.integers(0, 2**64 - 1))
def test_every_example_is_in_one_part_and_every_class_in_both(labels, fraction, seed):
    train, dev = stratified_split(labels, fraction, seed)
    assert sorted([*train, *dev]) == list(range(len(labels)))
    assert train.tolist() == sorted(train)
    assert dev.tolist() == sorted(dev)
    for label in set(labels):
        held = sum(labels[i] == label for i in dev)
        assert held >= (labels.count(label) > 1)
        assert held < labels.count(label)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(sum), st.data())
def test_sizes_are_the_largest_remainders_where_these_keep_the_bounds(counts, data):
    total = data.draw(st.integers(0, sum(counts)))
    sizes = dev_sizes(counts, total)
    low = [int(count > 1) for count in counts]
    high = [max(count - 1, 0) for count in counts]
    assert all(a <= size <= b for a, size, b in zip(low, sizes, high, strict=True))
    assert sum(sizes) == min(max(total, sum(low)), sum(high))
    books = hamilton(counts, total)
    if all(a <= size <= b for a, size, b in zip(low, books, high, strict=True)):
        assert sizes == books


def test_a_known_apportionment():
    # 1000 * 0.1 = 100 places; quotas 55.5, 30.3, 14.2: the largest remainder gets the last one.
    assert dev_sizes([555, 303, 142], 100) == [56, 30, 14]
    assert dev_sizes([1000, 2, 1], 100) == [99, 1, 0]


@settings(max_examples=30)
@given(LABELS, SHARES, st.integers(0, 2**64 - 1))
def test_it_is_a_function_of_seed_and_order_alone(labels, fraction, seed):
    first = stratified_split(labels, fraction, seed)
    np.random.default_rng(0).random(3)
    again = stratified_split(tuple(labels), fraction, seed)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_another_seed_holds_others_out_and_each_example_has_its_chance():
    labels = [0] * 60 + [1] * 40
    times = np.zeros(100)
    for seed in range(400):
        _, dev = stratified_split(labels, 0.25, seed)
        times[dev] += 1
    # Binomial(400, 0.25): mean 100, sigma 8.7; six sigma holds for 100 places with p > 1 - 1e-6.
    assert np.all(np.abs(times - 100) < 52)
    assert times.std() > 4  # and it is no fixed pattern


def test_the_split_of_today_is_the_split_for_ever():
    # Pinned: runs of other versions and platforms must hold the same examples out.
    _, dev = stratified_split([0, 1, 1, 0, 1, 0, 0, 1, 2, 1], 0.3, 7)
    assert dev.tolist() == [1, 4, 5]


def test_nothing_to_hold_out_is_refused():
    with pytest.raises(DataError, match=r"no class has two texts.*give data\.dev"):
        stratified_split([0, 1, 2], 0.1, 0)
    with pytest.raises(ConfigError, match="seed must be at least 0"):
        stratified_split([0, 0], 0.5, -1)


def test_single_examples_are_found():
    assert single_examples([3, 1, 1, 0]) == [0, 3]
