"""The Trainer of transformers with one line of halfstep's, over its models."""

from __future__ import annotations

import torch
from transformers import Trainer, TrainingArguments

from strangers.packages import attached
from strangers.packages.runs import STEPS, Program, Run
from strangers.packages.transformer_models import KINDS, ROWS

LR = 1e-3


def arguments(folder: str, kind=TrainingArguments, **more):
    settings = {
        "output_dir": folder, "use_cpu": True, "report_to": [], "max_steps": STEPS,
        "per_device_train_batch_size": ROWS, "logging_strategy": "no", "save_strategy": "no",
        "learning_rate": LR, "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 3,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    return kind(**{**settings, **more})


def rows_of(kind):
    batch = kind.data(torch.Generator().manual_seed(0), 3 * ROWS)
    return [{key: value[i] for key, value in batch.items()} for i in range(3 * ROWS)]


def train(kind, run: Run) -> list[float]:
    torch.manual_seed(0)
    model = run.begin(kind.model())

    def make(folder, way):
        return Trainer(
            model.to(way.stored),
            arguments(folder, **{"learning_rate": LR * run.rate, **way.arguments}),
            train_dataset=rows_of(kind), **way.trainer,
        )  # fmt: skip

    return attached.trained(run, LR, make)


def made(name: str) -> Program:
    return Program(
        f"{name} in Trainer", "transformers", lambda run: train(KINDS[name], run),
        attached.REFUSED, own_loss=True,
    )  # fmt: skip


PROGRAMS = [made(name) for name in ("BERT", "GPT-2", "ViT", "T5")]
