"""One rank of the experiment on communication: ``python -m ...costs.rank ORDER``, an order in JSON.

Ranks meet by a file. Rank 0 prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.data.reducer import DataParallel
from halfstep.distributed.layout import Layout
from halfstep.distributed.plan import ParallelPlan
from halfstep.lab import material
from halfstep.optim import AdamW
from halfstep.precision.step import Precision

WIRES = ("fp32", "bf16", "fp16")
LAYERS, LENGTH, SEQUENCES, WARM_UP = 2, 64, 4, 20


def main(order: dict[str, Any]) -> None:
    """Sum a GPT's gradient over the ranks in each format, and print bytes and errors."""
    rank, ranks = order["rank"], order["ranks"]
    store = dist.FileStore(order["meet"], ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"sent": {}, "error": {}}
    sums = {wire: _summed(wire, order, found, seed=1) for wire in WIRES}
    other = _summed("fp32", order, {"sent": {}}, seed=2)
    exact = sums["fp32"]
    for wire, total in sums.items():
        found["error"][wire] = float((total - exact).norm() / exact.norm())
    found["noise"] = float((other - exact).norm() / exact.norm())
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def _summed(wire: str, order: dict[str, Any], found: dict[str, Any], seed: int) -> Tensor:
    """The gradient of all ranks' batches, as fp64, after a few steps that all ranks take alike."""
    layout = Layout(data=order["ranks"])
    policy = f"bf16-mixed,reduce={wire}"
    model = material.gpt(LAYERS, order["width"], LENGTH)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    material.train("fp32", model, optimizer, material.batches(8, LENGTH, seed=0), WARM_UP)
    strategy = DataParallel(layout, policy, torch.device("cpu"))
    strategy.place_(model, ParallelPlan(blocks=tuple(model.blocks())))
    optimizer = AdamW(model.parameters())
    precision = Precision(policy, model, optimizer, ranks=strategy.ranks)
    strategy.attach_(precision)
    count = order["micro_batches"]
    own = material.batches(SEQUENCES, LENGTH, seed=1000 * seed + order["rank"])
    for number, batch in enumerate(islice(own, count), 1):
        with strategy.micro_batch(last=number == count), precision.autocast():
            loss = material.loss_of(model, batch) / (count * order["ranks"])
            precision.backward(loss)
    strategy.finish()
    sent, _ = strategy.traffic(count)
    found["sent"][wire] = sent.total
    found["parameters"] = sum(p.numel() for p in model.parameters())
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    precision.discard()
    precision.close()
    return torch.cat(gradients)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
