"""The same loop on one device and on many: data parallel or sharded, in any policy.

Run: python examples/distributed_loop.py
     torchrun --nproc-per-node 2 examples/distributed_loop.py bf16-mixed data=2
     torchrun --nproc-per-node 2 examples/distributed_loop.py bf16-split shard=2
"""

import sys

import torch
from torch import nn

import halfstep
from halfstep.distributed import Layout, ParallelPlan, choose_strategy, open_world

BATCH = 64


def main(policy: str = "bf16-mixed", parallel: str = "") -> list[halfstep.StepResult]:
    with open_world("cpu") as world:  # torchrun's ranks, or this process alone
        layout = Layout.choose(parallel, world.size)
        strategy = choose_strategy(layout, policy, torch.device("cpu"))

        torch.manual_seed(0)  # the same weights on every rank
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
        model = nn.Sequential(*blocks, nn.Linear(32, 1))
        strategy.place_(model, ParallelPlan(blocks=tuple(blocks)))
        optimizer = halfstep.optim.AdamW(model.parameters(), lr=1e-2)  # after place_
        precision = halfstep.Precision(policy, model, optimizer, ranks=strategy.ranks)
        strategy.attach_(precision)

        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(512, 32, generator=generator)
        targets = inputs[:, :4].sum(dim=1, keepdim=True).tanh()
        results = []
        for step in range(60):
            rows = torch.randint(len(inputs), (BATCH,), generator=generator)
            mine = rows[strategy.batch_rank :: layout.batch_ranks]  # this rank's share
            (count,) = strategy.sum([len(mine)])  # of the whole batch
            with strategy.micro_batch(last=True), precision.autocast():
                errors = nn.functional.mse_loss(model(inputs[mine]), targets[mine], reduction="sum")
                precision.backward(errors / count)
            strategy.finish()  # gradients are sums over all ranks now
            results.append(precision.step(max_norm=1.0))
            if world.is_main and step % 20 == 0:
                print(f"step {step:3}  loss {results[-1].loss:.4f}  on {layout}")
        return results


if __name__ == "__main__":
    main(*sys.argv[1:3])
