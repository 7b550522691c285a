"""Shards of tensors by their definition, torch.chunk, and whole states cut into them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from halfstep.errors import PeerError
from halfstep.trainer.checkpoint import Checkpoint, save_checkpoint
from halfstep.trainer.shards import Shard


def chunk(tensor, dim, parts, number):
    """One of torch.chunk's parts and its offset; the parts that it leaves out are empty."""
    found = list(torch.chunk(tensor, parts, dim))
    if number >= len(found):
        return tensor.narrow(dim, 0, 0), 0
    return found[number], sum(part.shape[dim] for part in found[:number])


def cut(tensor, how, rank, size):
    """A rank's part of a tensor, and its shard; ``how`` is a dim, or None where all have it."""
    if how is None or tensor.dim() == 0:
        return tensor.clone(), Shard.whole(tensor.shape, written=rank == 0)
    part, start = chunk(tensor, how, size, rank)
    offset = tuple(start if dim == how else 0 for dim in range(tensor.dim()))
    return part.clone(), Shard(tuple(tensor.shape), offset, tuple(part.shape))


def whole_state(seed=0) -> Checkpoint:
    """Whole tensors of many shapes and dtypes."""
    g = torch.Generator().manual_seed(seed)
    weights = {
        "w": torch.randn(8, 6, generator=g),
        "u": torch.randn(7, 5, generator=g).bfloat16(),
        "three": torch.randn(3, generator=g),
        "one": torch.randn(1, generator=g),
        "scalar": torch.randn((), generator=g),
        "i": torch.randint(-(2**15), 2**15, (6, 4), generator=g).short(),
        "none": torch.randn(0, 4, generator=g),
        "cube": torch.randn(3, 4, 5, generator=g),
        "t": torch.randn(80, 9, generator=g).t().contiguous().t(),
    }
    weights["w"][0, :3] = torch.tensor([-0.0, 1e-42, 3e38])
    optimizer = {"rng/cpu": torch.randint(0, 256, (5056,), generator=g).byte()}
    for name, weight in weights.items():
        optimizer[f"{name}/step"] = torch.tensor(7.0)
        first = torch.randn(weight.shape, generator=g)
        second = torch.rand(weight.shape, generator=g)
        optimizer[f"{name}/exp_avg"] = first.bfloat16() if name == "u" else first
        optimizer[f"{name}/exp_avg_sq"] = second
    return Checkpoint(weights, optimizer, {"note": "Zürich 字"})


# How each parameter is cut; over four ranks "three", "one", "u" (dim 0: 2, 2, 2, 1) and "none" are
# uneven or leave ranks without an element.
LAYOUTS = {
    "rows": dict.fromkeys(whole_state().weights, 0),
    "replicated": dict.fromkeys(whole_state().weights, None),
    "columns": {n: w.dim() - 1 for n, w in whole_state().weights.items()},
    "mixed": {
        "w": 1, "u": 0, "three": 0, "one": None, "scalar": None, "i": 1, "none": 1, "cube": 1,
        "t": 0,
    },
}  # fmt: skip


def cut_state(whole: Checkpoint, layout, rank, size) -> Checkpoint:
    """A rank's state."""
    weights, optimizer, shards = {}, {}, {}
    for name, weight in whole.weights.items():
        weights[name], shards[name] = cut(weight, layout[name], rank, size)
    for key, tensor in whole.optimizer.items():
        name, _, kind = key.rpartition("/")
        alone = name == "rng" or kind == "step"
        optimizer[key] = tensor if alone else cut(tensor, layout[name], rank, size)[0]
    return Checkpoint(weights, optimizer, whole.state, shards)


class Ranks:
    """One of several ranks, each in a thread: what a save asks of a World."""

    def __init__(self, rank, box, barrier):
        self.rank, self.size, self.is_main = rank, len(box), rank == 0
        self.box, self.barrier = box, barrier

    def gather(self, work):
        value = work()
        self.box[self.rank] = value
        self.barrier.wait(30)
        found = [*self.box]
        self.barrier.wait(30)
        return found


def save_side_by_side(folder, step, states, keep=2):
    """Every rank's save; their results, or what they raised."""
    box, barrier = [None] * len(states), threading.Barrier(len(states))

    def save(rank):
        try:
            world = Ranks(rank, box, barrier)
            return save_checkpoint(folder, step, states[rank], keep, world)
        except BaseException as error:
            if not isinstance(error, Exception):  # killed: the others must not wait for it
                barrier.abort()
            return error

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(save, range(len(states))))


def save_all(folder, step, states, keep=2):
    """Every rank's save; the first one's error is raised, or else that of another."""
    results = save_side_by_side(folder, step, states, keep)
    lost = (threading.BrokenBarrierError, PeerError)
    for error in sorted((r for r in results if isinstance(r, BaseException)),
                        key=lambda error: isinstance(error, lost)):  # fmt: skip
        raise error
    (path,) = set(results)
    return path


def assert_same(got, wanted):
    """Names, dtypes and bits."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert bits(got[name]) == bits(tensor), name


def bits(tensor):
    return (
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if (tensor.numel())
        else b""
    )
