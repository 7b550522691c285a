"""Shards of tensors by their definition, torch.chunk, and whole states cut into them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from halfstep.errors import PeerError
from halfstep.optim.moments import decode, encode
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


SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def codes(values, seed, *, signed):
    """8-bit codes and tops of a local moment, over its elements in memory order."""
    order = sorted(range(values.dim()), key=lambda d: -values.stride(d))
    flat = values.permute(order).reshape(-1)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, flat.shape, dtype=torch.int32, generator=generator)
    found, tops = encode(flat, "8bit", bits, signed=signed)
    back = [order.index(d) for d in range(values.dim())]
    return found.view([values.shape[d] for d in order]).permute(back), tops


def decoded(found, tops, *, signed):
    """The fp32 values of local codes."""
    order = sorted(range(found.dim()), key=lambda d: -found.stride(d))
    flat = decode(found.permute(order).reshape(-1), tops, signed=signed)
    back = [order.index(d) for d in range(found.dim())]
    return flat.view([found.shape[d] for d in order]).permute(back)


def whole_state(seed=0) -> Checkpoint:
    """Whole tensors of many shapes and dtypes; "e" and "t" are to have 8-bit moments."""
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
        "e": torch.randn(50, 7, generator=g),
        "t": torch.randn(80, 9, generator=g),
    }
    weights["w"][0, :3] = torch.tensor([-0.0, 1e-42, 3e38])
    optimizer = {"rng/cpu": torch.randint(0, 256, (5056,), generator=g).byte()}
    for name, weight in weights.items():
        optimizer[f"{name}/step"] = torch.tensor(7.0)
        first = torch.randn(weight.shape, generator=g)
        second = torch.rand(weight.shape, generator=g)
        if name == "t":  # each row of another size, so that blocks of 128 have different tops
            rows = 2.0 ** torch.arange(80).view(80, 1)
            first, second = first * rows, second * rows
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
        "e": 1, "t": 0,
    },
}  # fmt: skip


def cut_state(whole: Checkpoint, layout, rank, size, eight=()) -> Checkpoint:
    """A rank's state; the moments of parameters in ``eight`` in 8 bits, those of "t" transposed."""
    weights, optimizer, shards = {}, {}, {}
    for name, weight in whole.weights.items():
        weights[name], shards[name] = cut(weight, layout[name], rank, size)
    for key, tensor in whole.optimizer.items():
        name, _, kind = key.rpartition("/")
        if name == "rng" or kind == "step":
            optimizer[key] = tensor
            continue
        part, shard = cut(tensor, layout[name], rank, size)
        if name in eight:
            if name == "t":
                part = part.t().contiguous().t()
            part, optimizer[key + "_tops"] = codes(
                part,
                sum(shard.offset),
                signed=SIGNED[kind],  # ranks with the same part agree
            )
        optimizer[key] = part
    return Checkpoint(weights, optimizer, whole.state, shards)


def after_eight_bits(whole: Checkpoint, layout, size, eight) -> Checkpoint:
    """The whole state with the moments that 8-bit ranks hold: decoded and put together."""
    states = [cut_state(whole, layout, rank, size, eight) for rank in range(size)]
    optimizer = dict(whole.optimizer)
    for key in optimizer:
        name, _, kind = key.rpartition("/")
        if name in eight and kind in SIGNED:
            values = torch.full(whole.weights[name].shape, torch.nan)
            for state in states:
                part, shard = state.optimizer[key], state.shards[name]
                box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.local, strict=True))
                values[box] = decoded(part, state.optimizer[key + "_tops"], signed=SIGNED[kind])
            optimizer[key] = values
    return Checkpoint(dict(whole.weights), optimizer, whole.state)


class Ranks:
    """One of several ranks, each in a thread: what a save asks of a World."""

    def __init__(self, rank, box, barrier):
        self.rank, self.size, self.is_main = rank, len(box), rank == 0
        self.box, self.barrier = box, barrier

    def gather(self, value):
        self.box[self.rank] = value
        self.barrier.wait(30)
        found = [*self.box]
        self.barrier.wait(30)
        return found

    def main_only(self, work):
        result = error = None
        try:
            result = work() if self.is_main else None
        except Exception as raised:
            error = raised
        if any(self.gather(error is not None)):
            raise error or PeerError("rank 0 failed")
        return result


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
