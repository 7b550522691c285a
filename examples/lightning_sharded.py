"""FSDP2 and tensor parallelism by Lightning's ModelParallelStrategy, in any policy of halfstep.

Run: torchrun --nproc-per-node 2 examples/lightning_sharded.py bf16-split 2 1
"""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from halfstep.integrations.lightning import HalfstepPrecision
from halfstep.optim import AdamW


class Model(pl.LightningModule):
    """Two layers, which learn a sine."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.net, self.losses = nn.Sequential(nn.Linear(9, 34), nn.GELU(), nn.Linear(34, 3)), []

    def configure_model(self):
        """Lay the model out in fp32, as it is: the policy casts it then."""
        if self.device_mesh is not None:  # several devices
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        """Compute the loss of this rank's rows; a resumed run sees the same ones."""
        x = torch.randn(8, 9, generator=torch.Generator().manual_seed(self.global_step))
        if data := self.device_mesh and self.device_mesh["data_parallel"]:
            x = x[data.get_local_rank() :: data.size()]
        self.losses.append(nn.functional.mse_loss(self.net(x), x[:, :3].sin()))
        return self.losses[-1]

    def configure_optimizers(self):
        """Return an optimizer that every policy takes."""
        return AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def main(policy="bf16-split", data=1, tensor=1, steps=40, folder=None):
    model, precision = Model(), HalfstepPrecision(policy)
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(data, tensor) if data * tensor > 1 else "auto",
        plugins=[precision], devices=data * tensor, accelerator="cpu", max_steps=steps,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, range(steps), ckpt_path=folder)  # a folder of torch.distributed.checkpoint
    trainer.print(f"{policy}: loss {model.losses[0]:.3f}, then {model.losses[-1]:.3f}")
    return trainer, model, precision


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
