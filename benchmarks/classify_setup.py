"""What the rows of classify_methods.py share: stopwatch, memory, model, data and optimizer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from halfstep.trainer.config.run import ScheduleConfig
from halfstep.trainer.data.batches import LabelledTexts
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.labelled import read_labelled
from halfstep.trainer.step import learning_rate

BETAS, EPS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.999), 1e-8, 0.01, 1.0


class Watch:
    """The stopwatch of every row: a stamp before the first step and after each."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.stamps: list[float] = []
        self.found: dict[str, Any] = {"accuracy": None, "skipped": None, "evaluation_seconds": 0.0}

    def start(self) -> None:
        """Everything before is setup."""
        self.found["resident_bytes_before"] = resident_bytes("VmRSS")
        self.stamps = [time.perf_counter()]

    def step(self) -> bool:
        """Whether this was the last step of this process."""
        if len(self.stamps) == self.steps and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.stamps.append(time.perf_counter())
        return len(self.stamps) > self.steps

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Its block is evaluation."""
        begin = time.perf_counter()
        yield
        self.found["evaluation_seconds"] += time.perf_counter() - begin

    def results(self, inside: float = 0.0) -> dict[str, Any]:
        """What is found; ``inside`` is evaluation that lies between the stamps."""
        return self.found | {
            "steps": len(self.stamps) - 1,
            "train_seconds": self.stamps[-1] - self.stamps[0] - inside,
            "seconds_after_first_step": self.stamps[-1] - self.stamps[1] - inside,
            "peak_bytes": peak_bytes(),
        }


def resident_bytes(field: str) -> int | None:
    """Of this process alone: ``getrusage`` tells its parent's peak where that was larger."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(field)]
    return found[0] if found else None


def peak_bytes() -> int | None:
    """The most memory that the process took: the GPU's where it uses one."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resident_bytes("VmHWM")


class Work:
    """Model, data, optimizer and schedule of a row that is not halfstep's own trainer."""

    def __init__(self, job: dict, rank: int = 0, ranks: int = 1, *, fused: bool = True) -> None:
        self.job, self.rank, self.ranks = job, rank, ranks
        torch.manual_seed(job["seed"])
        self.model = AutoModelForSequenceClassification.from_pretrained(job["model"])
        self.model.to(job["device"])
        self.tokenizer = AutoTokenizer.from_pretrained(job["model"])
        config = LabelledConfig(
            train=(job["train"],), dev=(job["dev"],), labels=tuple(job["labels"])
        )
        data = read_labelled(config, job["seed"])
        self.train, self.dev = self._encoded(data.train), self._encoded(data.dev)
        self.collate = DataCollatorWithPadding(self.tokenizer)
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": WEIGHT_DECAY},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=job["learning_rate"], betas=BETAS, eps=EPS, fused=fused,
        )  # fmt: skip
        curve = ScheduleConfig(warmup_steps=job["warmup"], min_ratio=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate(1.0, curve, step, job["steps"])
        )

    def _encoded(self, texts: LabelledTexts) -> list[dict]:
        found = self.tokenizer(
            texts.texts, truncation=True, max_length=self.job["max_length"],
            return_token_type_ids=False,
        )  # fmt: skip
        return [
            {"input_ids": ids, "attention_mask": mask, "labels": label}
            for ids, mask, label in zip(
                found["input_ids"], found["attention_mask"], texts.labels, strict=True
            )
        ]

    def on_device(self, rows: list[dict]) -> dict:
        """A padded batch where the model is."""
        return {name: part.to(self.job["device"]) for name, part in self.collate(rows).items()}

    def loader(self, grouped: bool = False) -> DataLoader:
        """This rank's training batches of an epoch."""
        size = self.job["batch_size"] // self.ranks
        sampler: Any = None
        if self.ranks > 1:
            sampler = DistributedSampler(self.train, self.ranks, self.rank, seed=self.job["seed"])
        elif grouped:
            lengths = [len(row["input_ids"]) for row in self.train]
            sampler = LengthGroupedSampler(self.job["batch_size"], lengths=lengths)
        return DataLoader(
            self.train, size, shuffle=sampler is None, sampler=sampler, collate_fn=self.on_device
        )

    def dev_loader(self) -> DataLoader:
        """This rank's dev examples; each is one rank's."""
        return DataLoader(
            self.dev[self.rank :: self.ranks], self.job["batch_size"], collate_fn=self.on_device
        )

    @torch.no_grad()
    def evaluate(self, watch: Watch, around: Any) -> None:
        """Accuracy over all dev examples of all ranks."""
        if self.job["short"]:
            return
        with watch.evaluating():
            self.model.eval().to(self.job["device"])  # Lightning moves it to the CPU at its end
            right = torch.zeros((), device=self.job["device"])
            for batch in self.dev_loader():
                with around():
                    logits = self.model(batch["input_ids"], batch["attention_mask"]).logits
                right += (logits.argmax(dim=-1) == batch["labels"]).sum()
            if self.ranks > 1:
                dist.all_reduce(right)
            watch.found["accuracy"] = float(right) / len(self.dev)
