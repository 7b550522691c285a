"""Shards of real DTensors over gloo: what four ranks save, they and one process read."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from halfstep.distributed.world import World
from halfstep.trainer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from halfstep.trainer.shards import shard_of
from trainer.checkpoint.sharded import assert_same

CASES = [
    ((4,), [Shard(0)], (8, 6)),
    ((4,), [Shard(1)], (8, 6)),
    ((4,), [Replicate()], (3, 2)),
    ((4,), [Shard(0)], (7, 5)),
    ((4,), [Shard(0)], (2,)),
    ((2, 2), [Shard(0), Replicate()], (5, 3)),
    ((2, 2), [Replicate(), Shard(1)], (5, 3)),
    ((2, 2), [Shard(0), Shard(1)], (5, 3)),
    ((2, 2), [Shard(0), Shard(0)], (5, 3)),
]


def examine(rank, folder):
    """Shards of real DTensors, and what they save and load; the faults found."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    weights, shards, tensors = {}, {}, {}
    for number, (mesh, placements, shape) in enumerate(CASES):
        torch.manual_seed(number)
        whole = torch.randn(shape)
        tensors[f"p{number}"] = distribute_tensor(whole, meshes[mesh], placements)
    # On the tensor axis alone: each data rank has its own mesh, and one of them writes.
    torch.manual_seed(99)
    tensors["sub"] = distribute_tensor(torch.randn(5, 3), named["tensor"], [Shard(0)])
    torch.manual_seed(100)
    tensors["plain"] = torch.randn(3)
    torch.manual_seed(101)
    layer = nn.Linear(6, 5)
    fully_shard(layer, mesh=meshes[4,])
    tensors |= dict(layer.named_parameters())
    for name, tensor in tensors.items():
        shard = shard_of(tensor, rank)
        if isinstance(tensor, DTensor):
            local, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            assert shard.local == tuple(local), name
            assert shard.numel == 0 or shard.offset == tuple(offset), name
            weights[name] = tensor.to_local().detach()
        else:
            weights[name] = tensor
        shards[name] = shard
    optimizer = {f"{n}/exp_avg": 2 * w for n, w in weights.items()}
    optimizer |= {f"{n}/step": torch.tensor(3.0) for n in weights}
    mine = Checkpoint(weights, optimizer, {"step": 1}, shards)
    path = save_checkpoint(folder, 1, mine, 1, World.around_group())
    dist.barrier()
    again = load_checkpoint(path, shards)
    assert_same(again.weights, weights)
    assert_same(again.optimizer, optimizer)
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().numpy()
        for n, t in tensors.items()
    }


@pytest.mark.distributed
def test_real_dtensors_on_four_ranks_come_back_and_one_process_reads_them_whole(pool4, tmp_path):
    whole = pool4.run(examine, folder=tmp_path)[0]
    loaded = load_checkpoint(tmp_path / "step-00000001")
    assert_same(loaded.weights, {n: torch.from_numpy(a) for n, a in whole.items()})
    for name, values in whole.items():
        assert torch.equal(loaded.optimizer[f"{name}/exp_avg"], 2 * torch.from_numpy(values))
