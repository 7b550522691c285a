"""Bytes per step: small cases counted by hand, the published ratios, and a ring that is walked."""

from __future__ import annotations

from halfstep.distributed import traffic


def walk_ring(chunks: list[int], ranks: int) -> int:
    """Bytes that rank 0 sends in a ring all-reduce of these chunks, one of them per rank."""
    sent = 0
    for round_number in range(2 * (ranks - 1)):  # reduce-scatter, then all-gather
        sent += chunks[-round_number % ranks]
    return sent


def test_an_all_reduce_sends_what_a_ring_sends():
    for ranks in (1, 2, 3, 4, 8, 64):
        ring = walk_ring([64 * 3 * 16 // ranks] * ranks, ranks)
        assert traffic.all_reduce(64 * 3 * 16, ranks) == ring


def test_small_cases_by_hand():
    for ranks, bytes_ in ((1, 0), (2, 12), (3, 16), (4, 18), (12, 22)):
        assert traffic.all_reduce(12, ranks) == bytes_
        assert traffic.all_gather(12, ranks) + traffic.reduce_scatter(12, ranks) == bytes_


def test_bytes_are_rounded_up():
    assert traffic.all_gather(10, 3) == 7  # 6.67
    assert traffic.all_reduce(10, 3) == 14  # 13.33


def test_16_bits_halve_the_traffic():
    wide = traffic.data_parallel(1000, 4, reduce_bytes=4)
    assert wide.gradients == wide.total == 6000
    assert traffic.data_parallel(1000, 4, reduce_bytes=2).total == 3000


def test_full_sharding_sends_one_and_a_half_times_as_much():
    """ZeRO, section 7.2.2: 3 times the model's size instead of 2."""
    whole = traffic.data_parallel(1 << 20, 8, reduce_bytes=2)
    sharded = traffic.fully_sharded(1 << 20, 8, gather_bytes=2, reduce_bytes=2)
    assert sharded.total * 2 == whole.total * 3
    assert sharded.parameters == 2 * sharded.gradients


def test_full_sharding_with_micro_batches():
    def of(**options):
        return traffic.fully_sharded(800, 4, gather_bytes=2, reduce_bytes=4, **options)

    assert (of().parameters, of().gradients) == (2 * 1200, 2400)
    assert (of(micro_batches=3).parameters, of(micro_batches=3).gradients) == (7200, 7200)
    assert of(reshard_after_forward=False).parameters == 1200


def test_parts_add_up():
    both = traffic.data_parallel(100, 2, reduce_bytes=4) + traffic.Traffic(activations=512)
    assert (both.gradients, both.parameters, both.activations) == (400, 0, 512)
    assert both.total == 912


def test_one_rank_sends_nothing():
    assert traffic.data_parallel(100, 1, reduce_bytes=4).total == 0
    assert traffic.fully_sharded(100, 1, gather_bytes=4, reduce_bytes=4).total == 0
