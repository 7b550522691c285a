"""The vocabulary-parallel head: NaN, ignored rows, and the parts of a table."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from halfstep.distributed.tensor_parallel import ShardedVocabulary
from halfstep.precision.casting.autocast import SimulatedProducts
from halfstep.trainer.models.cross_entropy import (
    linear_cross_entropy_sum,
)
from trainer.models.test_cross_entropy import problem

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


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
