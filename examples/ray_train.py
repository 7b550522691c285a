"""A policy of halfstep on Ray Train's workers, under DDP or FSDP2, with a checkpoint of both.

Run: python examples/ray_train.py bf16-split ddp
"""

import sys
import tempfile

import ray.train.torch
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import halfstep


def state_of(model, optimizer, precision, step=0):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "precision": precision, "step": step}


def train(config):
    """Train on this worker, from the newest checkpoint if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 34), nn.GELU(), nn.Linear(34, 3))
    sharded = config["parallel"] == "fsdp2"
    model = fully_shard(model) if sharded else ray.train.torch.prepare_model(model)
    optimizer = halfstep.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    precision = halfstep.Precision(config["policy"], model, optimizer)
    context, state = ray.train.get_context(), state_of(model, optimizer, precision)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **loaded)
    for step in range(state["step"], 20):
        x = torch.randn(8, 9, generator=torch.Generator().manual_seed(step))
        x = x[context.get_world_rank() :: context.get_world_size()]
        with precision.autocast():
            loss = nn.functional.mse_loss(model(x), x[:, :3].sin())
        result = precision.step(loss, max_norm=1.0)
        with tempfile.TemporaryDirectory() as folder:
            if saved := step + 1 == 10:  # each worker its part; Ray brings them together
                dcp.save(state_of(model, optimizer, precision, 10), checkpoint_id=folder)
            checkpoint = Checkpoint.from_directory(folder) if saved else None
            told = {"loss": result.loss, "norm": result.grad_norm}
            ray.train.report(told, checkpoint=checkpoint)


if __name__ == "__main__":
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"policy": sys.argv[1], "parallel": sys.argv[2]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    )
    print(trainer.fit().metrics)
