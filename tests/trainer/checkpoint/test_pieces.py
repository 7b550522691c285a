"""Pieces: what a rank holds, who writes it, and whether pieces make up a tensor."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from halfstep.errors import CheckpointError
from halfstep.trainer.checkpoint.index import Piece, fault, local_piece, overlap
from trainer.checkpoint.sharded import chunk


def box(piece):
    return tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.local, strict=True))


MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2)]
SHAPES = [(8, 6), (7, 5), (3,), (1,), (2, 3, 5), (0, 4), (5, 0)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_piece_is_what_chunk_by_chunk_is_left_and_one_rank_writes_each(mesh, shape):
    numbers = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()]
    whole = numbers.view(shape)
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    for placements in itertools.product(kinds, repeat=len(mesh)):
        written = Counter()
        for coordinate in itertools.product(*map(range, mesh)):
            part = whole
            for placement, parts, number in zip(placements, mesh, coordinate, strict=True):
                if isinstance(placement, Shard):
                    part, _ = chunk(part, placement.dim, parts, number)
            piece = local_piece(shape, placements, mesh, coordinate)
            assert piece.shape == shape
            assert piece.local == tuple(part.shape)
            assert torch.equal(whole[box(piece)], part)
            if piece.written:
                written.update(part.flatten().tolist())
        assert written == Counter(numbers.tolist())


def test_a_scalar_is_whole():
    pieces = [local_piece((), (Replicate(),), (2,), (rank,)) for rank in range(2)]
    assert pieces == [Piece((), (), (), True), Piece((), (), (), False)]


@pytest.mark.parametrize("rows", [8, 7, 12, 5])
def test_fsdp_over_tensor_parallel_cuts_the_same_dim_from_right_to_left(rows):
    whole = torch.arange(rows * 2).view(rows, 2)
    for data, tensor in itertools.product(range(2), range(2)):
        part, _ = chunk(whole, 0, 2, tensor)  # tensor parallel first
        part, _ = chunk(part, 0, 2, data)
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        piece = local_piece((rows, 2), placements, (2, 2), (data, tensor))
        if rows % 4 == 0:  # others: the outer chunk of DTensor is another one
            assert torch.equal(whole[box(piece)], part)


def test_what_is_no_box_or_not_finished_is_refused():
    with pytest.raises(CheckpointError, match="not cut into boxes"):
        local_piece((8,), (_StridedShard(0, split_factor=2),), (2,), (0,))
    with pytest.raises(CheckpointError, match="redistribute it before"):
        local_piece((8,), (Partial(),), (2,), (0,))


def test_overlap_and_fault_agree_with_painted_elements():
    rng = random.Random(0)
    kinds = Counter()
    for _ in range(3000):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        pieces = []
        if rng.random() < 0.5:  # a partition, perhaps with a piece less or one moved
            cuts = [sorted({0, n, *(rng.randint(0, n) for _ in range(2))}) for n in shape]
            for edges in itertools.product(*(itertools.pairwise(c) for c in cuts)):
                pieces.append(
                    Piece(shape, tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
                )
            rng.shuffle(pieces)
            if rng.random() < 0.3:
                pieces.pop()
            if pieces and rng.random() < 0.3:
                p = pieces[0]
                moved = tuple(o + rng.randint(0, 1) for o in p.offset)
                pieces[0] = Piece(shape, moved, p.local)
        else:
            for _ in range(rng.randint(0, 4)):
                offset = tuple(rng.randint(0, n) for n in shape)
                pieces.append(Piece(shape, offset, tuple(rng.randint(1, n) for n in shape)))
        big = torch.zeros([2 * n for n in shape], dtype=torch.int32)
        for piece in pieces:
            big[box(piece)] += 1
        inside = big[tuple(slice(0, n) for n in shape)]
        good = bool((inside == 1).all()) and int(big.sum()) == int(inside.sum())
        assert (fault(shape, pieces) == "") == good
        kinds[good] += 1
        for a, b in itertools.combinations(pieces, 2):
            cells = torch.arange(big.numel()).view(big.shape)
            common = set(cells[box(a)].flatten().tolist()) & set(cells[box(b)].flatten().tolist())
            met = overlap(a, b)
            assert (met is not None) == bool(common)
            if met is not None:
                assert torch.equal(cells[box(a)][met[0]], cells[box(b)][met[1]])
                assert set(cells[box(a)][met[0]].flatten().tolist()) == common
    assert min(kinds[True], kinds[False]) > 500


def test_faults_say_what():
    shape = (4, 2)
    left, right = Piece(shape, (0, 0), (2, 2)), Piece(shape, (2, 0), (2, 2))
    assert fault(shape, [right, left]) == ""
    assert fault(shape, [left]) == "its pieces hold 4 of the 8 elements"
    assert "overlap" in fault(shape, [left, right, left])
    assert "outside" in fault(shape, [left, Piece(shape, (3, 0), (2, 2))])
    assert fault((0, 3), []) == ""
    assert fault((), [Piece((), (), ())]) == ""
    assert "hold 0 of the 1" in fault((), [])
    assert "overlap" in fault((), [Piece((), (), ())] * 2)


def test_many_pieces_are_checked_in_little_time():
    shape = (4, 100_000)
    pieces = [Piece(shape, (0, n), (4, 1)) for n in range(100_000)]
    assert fault(shape, pieces) == ""
    assert "hold" in fault(shape, pieces[1:])
