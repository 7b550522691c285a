"""Whether the shards in a manifest make up a tensor, and where two of them meet."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import torch

from halfstep.trainer.shards import Shard, fault, overlap


def box(shard):
    return tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.local, strict=True))


def test_overlap_and_fault_agree_with_painted_elements():
    rng = random.Random(0)
    kinds = Counter()
    for _ in range(3000):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        shards = []
        if rng.random() < 0.5:  # a partition, perhaps with a shard less or one moved
            cuts = [sorted({0, n, *(rng.randint(0, n) for _ in range(2))}) for n in shape]
            for edges in itertools.product(*(itertools.pairwise(c) for c in cuts)):
                shards.append(
                    Shard(shape, tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
                )
            rng.shuffle(shards)
            if rng.random() < 0.3:
                shards.pop()
            if shards and rng.random() < 0.3:
                p = shards[0]
                moved = tuple(o + rng.randint(0, 1) for o in p.offset)
                shards[0] = Shard(shape, moved, p.local)
        else:
            for _ in range(rng.randint(0, 4)):
                offset = tuple(rng.randint(0, n) for n in shape)
                shards.append(Shard(shape, offset, tuple(rng.randint(1, n) for n in shape)))
        big = torch.zeros([2 * n for n in shape], dtype=torch.int32)
        for shard in shards:
            big[box(shard)] += 1
        inside = big[tuple(slice(0, n) for n in shape)]
        good = bool((inside == 1).all()) and int(big.sum()) == int(inside.sum())
        assert (fault(shape, shards) == "") == good
        kinds[good] += 1
        for a, b in itertools.combinations(shards, 2):
            cells = torch.arange(big.numel()).view(big.shape)
            common = set(cells[box(a)].flatten().tolist()) & set(cells[box(b)].flatten().tolist())
            met = overlap(a, b)
            assert (met is not None) == bool(common)
            if met is not None:
                assert torch.equal(cells[box(a)][met[0]], cells[box(b)][met[1]])
                assert set(cells[box(a)][met[0]].flatten().tolist()) == common
    assert min(kinds[True], kinds[False]) > 500
