"""The vocabulary-parallel head: loss and gradients against the NumPy oracle of one device."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from halfstep.distributed.styles import ShardedVocabulary
from halfstep.errors import ConfigError
from halfstep.precision.casting.simulate import SimulatedProducts
from halfstep.trainer.models.cross_entropy import (
    linear_cross_entropy_sum,
)
from trainer.models.test_cross_entropy import bounds, oracle, problem

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def axis():
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def split(weight, mesh):
    """A table's rows over the mesh, as a parameter."""
    part = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    table = DTensor.from_local(part, mesh, [Shard(0)], shape=weight.shape, stride=weight.stride())
    return torch.nn.Parameter(table)


def head(rank, x, w, targets, **options):
    """Loss, count, dX and the whole dW of a sharded table."""
    mesh = axis()
    x, table = x.detach().requires_grad_(), split(w, mesh)
    vocabulary = ShardedVocabulary(len(w), mesh)
    with SimulatedProducts(torch.float16):
        loss, count = linear_cross_entropy_sum(x, table, targets, vocabulary=vocabulary, **options)
        loss.backward()
    assert table.grad.placements == (Shard(0),)
    assert table.grad.dtype == w.dtype
    return loss.detach(), count, x.grad, table.grad.full_tensor()


def check(pool, x, w, targets, bound, **options):
    """All ranks agree in every bit and are within ``bound`` (loss, dX, dW) of the definition."""
    wanted = oracle(x, w, targets)
    results = pool.run(head, x=x.detach(), w=w.detach(), targets=targets, **options)
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert torch.equal(ours, theirs)
    loss, count, dx, dw = results[0]
    assert count.item() == (targets != -100).sum().item()
    assert abs(loss.item() - wanted[0]) <= bound[0]
    assert (dx.double() - wanted[1]).abs().max().item() <= bound[1]
    assert (dw.double() - wanted[2]).abs().max().item() <= bound[2]
    assert (dx[targets == -100] == 0).all()
    return results[0]


def partial_bounds(pool, x, w, dtype):
    """``bounds`` of one device, and one more rounding of dX for every rank's part of it.

    A row of a part of E sums to at most 2 in magnitude, so a part of dX is at most 2 max|W|, and so
    are sums of parts: a unit of that for each part, and one for their sum.
    """
    loss, grad_x, grad_w = bounds(x, w, dtype)
    unit = torch.finfo(dtype).eps / 2
    return loss, grad_x + (pool.size + 1) * 2 * w.detach().abs().max().item() * unit, grad_w


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("vocab", [64, 67])
@pytest.mark.parametrize("chunk_bytes", [1, 2**27])
def test_value_and_gradients_match_the_definition(pool, dtype, vocab, chunk_bytes):
    x, w, targets = problem(90, 24, vocab, dtype, seed=1)
    bound = None if dtype == torch.float64 else partial_bounds(pool, x, w, dtype)
    # fp64: rounding (1.1e-16) of sums of 90 terms, with a factor 10 and more.
    bound = bound or (oracle(x, w, targets)[0] * 1e-13, 1e-13, 1e-12)
    check(pool, x, w, targets, bound, chunk_bytes=chunk_bytes)


def test_nan_on_one_rank_is_nan_on_all_and_an_ignored_row_leaves_the_loss_alone(pool):
    x, w, targets = problem(40, 8, 30, torch.float32, seed=5)
    targets[3] = -100
    clean = pool.run(head, x=x.detach(), w=w.detach(), targets=targets)[0][0]
    with torch.no_grad():
        x[3] = float("nan")
    for loss, _, dx, _ in pool.run(head, x=x.detach(), w=w.detach(), targets=targets):
        assert loss == clean
        assert (dx[3] == 0).all()
    with torch.no_grad():
        x[3], w[0] = 0, float("nan")  # a row of rank 0
    for loss, _, _, _ in pool.run(head, x=x.detach(), w=w.detach(), targets=targets):
        assert loss.isnan()


@pytest.mark.parametrize("confidence", [0.0, 20.0])
def test_confident_fp16_models_keep_their_gradients(pool, confidence):
    # As on one device: scales follow the confidence, so nothing underflows. 8 units, as above.
    x, w, targets = problem(60, 24, 67, torch.float16, seed=9, ignored=0)
    with torch.no_grad():
        x += (confidence * w[targets] / w[targets].norm(dim=1, keepdim=True) ** 2).to(x.dtype)
    _, dx, dw = oracle(x, w, targets)
    _, _, got_dx, got_dw = pool.run(head, x=x.detach(), w=w.detach(), targets=targets)[0]
    # A logit near 20 is rounded by 2^-11 * 20, and moves miss by as much, relatively.
    unit = 2.0**-11 * max(8, 2 * confidence)
    assert (got_dx.double() - dx).norm() <= unit * dx.norm()
    assert (got_dw.double() - dw).norm() <= unit * dw.norm()


def parts(rank, size):
    try:
        found = ShardedVocabulary(size, axis())
    except ConfigError as error:
        return str(error)
    return found.start, found.end, found.columns(size)


def test_parts_are_those_of_chunk_and_none_is_empty(pool4):
    assert pool4.run(parts, size=19) == [(0, 5, 5), (5, 10, 5), (10, 15, 5), (15, 19, 5)]
    assert pool4.run(parts, size=4) == [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1)]
    for size, left in ((5, 1), (9, 1), (3, 1), (1, 3)):
        for message in pool4.run(parts, size=size):
            assert f"leaves {left} of 4 tensor-parallel ranks without any" in message
