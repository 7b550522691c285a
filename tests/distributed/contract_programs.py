"""Programs over ranks, each sound or with a collective in another dtype, for the contract."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parallel import DistributedDataParallel

from halfstep.diagnostics import contract as library

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self, d=16, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 32, bias), nn.Linear(32, d, bias)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Sharing(torch.optim.AdamW):
    """Sends each parameter from one rank to the others, as ZeRO's first stage does."""

    dtype = FP32

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for i, p in enumerate(self.param_groups[0]["params"]):
            sent = p.to(self.dtype)
            dist.broadcast(sent, i % dist.get_world_size())
            p.copy_(sent)


def in_bf16(state, bucket):
    future = dist.all_reduce(bucket.buffer().bfloat16(), async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def sharded(model, mesh, param=BF16, reduce=FP32):
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_force_sum_reduction_for_comms(True)
    return model


def split(model, mesh):
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def made(kind):
    """The model of a kind of program."""
    torch.manual_seed(0)
    bias = kind != "2d_norms"
    model, size = nn.Sequential(Block(bias=bias), Block(bias=bias)), dist.get_world_size()
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model)
        if kind == "ddp_bf16":
            model.register_comm_hook(None, in_bf16)
        return model
    if kind.startswith("fsdp"):
        dtypes = {"fsdp": (BF16, FP32), "fsdp_reduce": (BF16, None), "fsdp_fp32": (FP32, FP32)}
        return sharded(
            model, init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), *dtypes[kind]
        )
    if kind.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rep", "shard"))
        return sharded(model, mesh, reduce=FP32 if kind == "hsdp" else BF16)
    if kind.startswith("2d"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        model = split(model, mesh["tp"])
        for block in model if kind == "2d_norms" else ():  # what is whole on the ranks of tp
            policy = MixedPrecisionPolicy(FP32, FP32, output_dtype=BF16)
            fully_shard(block.norm, mesh=mesh["dp"], mp_policy=policy)
            block.norm.set_force_sum_reduction_for_comms(True)
        return sharded(model, mesh["dp"], param=FP32 if kind == "2d_fp32" else BF16)
    return model


def reduced(kind, model):
    """All-reduce gradients by hand."""
    for p in model.parameters():
        if kind == "hand_bf16":
            low = p.grad.bfloat16()
            dist.all_reduce(low)
            p.grad.copy_(low)
        elif kind == "thread_bf16":
            low = p.grad.bfloat16()
            thread = threading.Thread(target=dist.all_reduce, args=(low,))
            thread.start()
            thread.join()
        else:
            dist.all_reduce(p.grad)


def train(rank, kind, batch=2, steps=2, seed=0):
    """The program itself."""
    model = made(kind)
    zero = kind.startswith("ddp_zero")
    optimizer = (Sharing if zero else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    if kind == "ddp_zero_bf16":
        optimizer.dtype = BF16
    torch.manual_seed(seed + rank)
    for _ in range(steps):
        low = kind == "rank_1" and rank == 1
        with torch.autocast("cpu", BF16, enabled=low):
            y = model(torch.randn(batch, 4 if kind.startswith("2d") else 8, 16))
        y = y.to_local() if hasattr(y, "to_local") else y
        y.float().square().mean().backward()
        if kind in ("hand", "hand_bf16", "thread_bf16", "rank_1"):
            reduced(kind, model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def many(rank, cases):
    """The contracts of several programs on this rank, one after another."""
    library._mesh_name = lambda world: "dp"  # not that of a mesh of another test in this process
    found = []
    for case in cases:
        with library.contract() as seen:
            train(rank, **case)
        found.append(seen.recorded())
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), sys.argv[1], steps=int(sys.argv[2]))
    print(f"rank {dist.get_rank()} has ended")
    dist.destroy_process_group()
