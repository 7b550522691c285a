"""What a policy is inside the Trainer of transformers, and in those that are made from it.

The Trainer has no word for most policies; this is how each is asked for, as its users would do it:
by its own arguments, by the format of the model that is given to it, by its optimizer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import halfstep
from halfstep.integrations.hf_trainer import attach
from strangers.packages.runs import Run

# Each without a way into the Trainer: nobody keeps masters of its 16-bit weights.
NO_MASTERS = "with nothing behind them"


@dataclass(frozen=True)
class Way:
    """How a policy is asked for.

    Attributes:
        stored: What the model is cast to before the Trainer gets it.
        arguments: Of ``TrainingArguments``.
        trainer: Of the Trainer.
        attach: Of ``attach``.
        autocast: A policy that the Trainer's ``training_step`` is put under, or none.
    """

    stored: torch.dtype = torch.float32
    arguments: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    attach: dict[str, Any] = field(default_factory=dict)
    autocast: str = ""


def way_of(name: str, lr: float) -> Way:
    policy = halfstep.parse_policy(name)
    if policy.needs_own_optimizer:
        moments = {"moments": "8bit"} if policy.moments == "8bit" else {}
        chosen = (halfstep.optim.AdamW, {"lr": lr, "update": policy.update, **moments})
        return Way(policy.param_dtype, trainer={"optimizer_cls_and_kwargs": chosen})
    if policy.param_dtype != torch.float32:
        return Way(policy.param_dtype, attach={"allow_pure": name == "bf16-pure"})
    if policy.compute_dtype == torch.bfloat16:
        return Way(arguments={"bf16": True})
    if policy.compute_dtype == torch.float16:  # fp16=True is for GPUs
        return Way(attach={"scaler": True, "init_scale": 256.0}, autocast=name)
    return Way()


def recorded(trainer: Any) -> list[float]:
    """The list to which the trainer's losses will be added; its log rounds them."""
    losses: list[float] = []
    original = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = original(*args, **kwargs)
        losses.append(loss.item())
        return loss

    trainer.training_step = training_step
    return losses


def trained(run: Run, rate: float, make: Callable[[str, Way], Any]) -> list[float]:
    """The losses of a trainer that ``make`` builds, in a folder and as the policy is asked for."""
    way = Way() if run.policy is None else way_of(run.policy, rate)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(folder, way)
        losses = recorded(trainer)
        if run.policy is not None:
            attach_to(trainer, way)
        trainer.train()
    return losses


def attach_to(trainer: Any, way: Way) -> None:
    if way.autocast:  # the backward too: activation checkpointing computes forwards again there
        trainer.training_step = halfstep.autocast(way.autocast, "cpu")(trainer.training_step)
    attach(trainer, lost_updates_every=0, **way.attach)


REFUSED = {
    "bf16-master": NO_MASTERS,
    "fp16-master,init_scale=256": NO_MASTERS,
    "fp16-pure,init_scale=256": NO_MASTERS,
}
