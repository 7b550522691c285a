"""The rows of classify_methods.py: one training each, in a process of its own, or two.

    python benchmarks/classify_rows.py ROW JOB.json FOLDER

All load the same model and tokenizer, train on the same examples with the same optimizer, learning
rates and clipping, and count the same dev examples. ``torch``, ``ddp``, ``accelerate`` and
``trainer`` are written as those libraries' own tutorials write them: random batches, padded to the
longest of the batch by ``DataCollatorWithPadding``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from classify_setup import BETAS, EPS, MAX_NORM, WEIGHT_DECAY, Watch, Work
from halfstep import Precision
from halfstep.distributed.world import open_world
from halfstep.integrations.accelerate import attach
from halfstep.integrations.hf_trainer import attach as attach_trainer
from halfstep.trainer.config.config import load_config
from halfstep.trainer.environment import keep_freed_memory
from halfstep.trainer.loop import train
from halfstep.trainer.run import create_run
from halfstep.trainer.session import open_session

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def epochs(loader: DataLoader) -> Iterator[dict]:
    """Batches without end."""
    epoch = 0
    while True:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def around(format: str, device: str) -> Any:
    """Makes a row's context of the forward."""
    if format == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device, dtype=FORMATS[format])


def by_hand(
    job: dict, format: str, grouped: bool = False, ranks: int = 1, wrapper: Any = None
) -> dict:
    """The loop of torch's tutorials; of several ranks with DistributedDataParallel."""
    if ranks > 1:
        dist.init_process_group("gloo")
        wrapper = DistributedDataParallel
    work = Work(job, dist.get_rank() if ranks > 1 else 0, ranks)
    model: Any = wrapper(work.model) if wrapper else work.model
    scaler = torch.amp.GradScaler(job["device"], enabled=format == "fp16")
    watch, skipped, context = Watch(job["count"]), 0, around(format, job["device"])
    model.train()
    watch.start()
    for batch in epochs(work.loader(grouped)):
        with context():
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(work.optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        before = scaler.get_scale()
        scaler.step(work.optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        work.schedule.step()
        work.optimizer.zero_grad()
        if watch.step():
            break
    watch.found["skipped"] = skipped if format == "fp16" else None
    work.evaluate(watch, context)
    if ranks > 1:
        dist.destroy_process_group()
    return watch.results()


def by_spawn(job: dict, format: str) -> None:
    """The same on two ranks that ``torch.multiprocessing.spawn`` starts instead of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_spawned, (port, job, format), nprocs=2)


def _spawned(rank: int, port: int, job: dict, format: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                   "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # fmt: skip
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    write(by_hand(job, format, ranks=2), job["scratch"])


def with_deepspeed(job: dict, format: str) -> dict:
    """DeepSpeed's engine, which casts, clips, steps and moves the schedule itself."""
    import deepspeed  # not a dependency: the row is left out where it is missing

    deepspeed.init_distributed("gloo")
    ranks = dist.get_world_size()
    work, watch = Work(job, dist.get_rank(), ranks), Watch(job["count"])
    config = {
        "train_batch_size": job["batch_size"], "gradient_clipping": MAX_NORM,
        format: {"enabled": True}, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=work.model, optimizer=work.optimizer, lr_scheduler=work.schedule, config=config
    )
    engine.train()
    watch.start()
    for batch in epochs(work.loader()):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if watch.step():
            break
    work.evaluate(watch, contextlib.nullcontext)
    dist.destroy_process_group()
    return watch.results()


def with_accelerate(job: dict, format: str, attached: bool = False) -> dict:
    """Accelerate's loop; with halfstep's loss scaler in it where ``attached``."""
    mixed = "no" if format == "fp32" else format
    accelerator = Accelerator(cpu=job["device"] == "cpu", mixed_precision=mixed)
    scaler = attach(accelerator) if attached else None
    work, watch = Work(job), Watch(job["count"])
    model, optimizer, loader, schedule = accelerator.prepare(
        work.model, work.optimizer, work.loader(), work.schedule
    )
    model.train()
    watch.start()
    for batch in epochs(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if watch.step():
            break
    watch.found["skipped"] = scaler.skipped_total if scaler is not None else None
    work.evaluate(watch, accelerator.autocast)
    return watch.results()


def precision_in_accelerate(job: dict, policy: str) -> dict:
    """Accelerate prepares model and data, and halfstep's ``Precision`` takes the steps."""
    accelerator, work, watch = (
        Accelerator(cpu=job["device"] == "cpu"),
        Work(job),
        Watch(job["count"]),
    )
    model, loader = accelerator.prepare(work.model, work.loader())
    precision = Precision(policy, model, work.optimizer)
    model.train()
    watch.start()
    for batch in epochs(loader):
        with precision.autocast():
            loss = model(**batch).loss
        result = precision.step(loss, max_norm=MAX_NORM)
        watch.found["skipped"] = result.skipped_total
        if result.applied:
            work.schedule.step()
        if watch.step():
            break
    work.evaluate(watch, precision.autocast)
    return watch.results()


class Stamps(TrainerCallback):
    """The stopwatch inside a Trainer."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.watch.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stamp, and stop a short row."""
        control.should_training_stop |= self.watch.step()


def with_trainer(job: dict, format: str, grouped: bool = False, attached: bool = False) -> dict:
    """The Transformers Trainer; with halfstep attached where ``attached``."""
    work, watch = Work(job), Watch(job["count"])
    settings = TrainingArguments(
        job["scratch"], max_steps=job["steps"], per_device_train_batch_size=job["batch_size"],
        per_device_eval_batch_size=job["batch_size"], max_grad_norm=MAX_NORM, seed=job["seed"],
        bf16=format == "bf16", use_cpu=job["device"] == "cpu", save_strategy="no", report_to=[],
        disable_tqdm=True, logging_steps=50, dataloader_pin_memory=False,
        train_sampling_strategy="group_by_length" if grouped else "random",
    )  # fmt: skip
    trainer = Trainer(
        work.model, settings, data_collator=work.collate, train_dataset=work.train,
        eval_dataset=work.dev, optimizers=(work.optimizer, work.schedule),
        processing_class=work.tokenizer, callbacks=[Stamps(watch)],
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
    )  # fmt: skip
    callback = attach_trainer(trainer) if attached else None
    trainer.train()
    if callback is not None and callback.scaler is not None:
        watch.found["skipped"] = callback.scaler.skipped_total
    if not job["short"]:
        with watch.evaluating():
            watch.found["accuracy"] = float(trainer.evaluate()["eval_accuracy"])
    return watch.results()


class Classifier(pl.LightningModule):
    """The model, its optimizer and its schedule as Lightning wants them."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.model = work, work.model

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        """The loss of a batch."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> dict:
        """The schedule moves at every step."""
        schedule = {"scheduler": self.work.schedule, "interval": "step"}
        return {"optimizer": self.work.optimizer, "lr_scheduler": schedule}


class LightningStamps(pl.Callback):
    """The stopwatch inside Lightning's Trainer."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_start(self, *_: Any) -> None:
        """Start."""
        self.watch.start()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stamp, and stop a short row."""
        trainer.should_stop |= self.watch.step()


def with_lightning(job: dict, format: str) -> dict:
    """Lightning's Trainer, which clips no gradients of a fused optimizer in mixed precision."""
    work, watch = Work(job, fused=False), Watch(job["count"])
    trainer = pl.Trainer(
        max_steps=job["steps"], precision="32-true" if format == "fp32" else f"{format}-mixed",
        gradient_clip_val=MAX_NORM, accelerator=job["device"], callbacks=[LightningStamps(watch)],
        default_root_dir=job["scratch"], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(work).train(), work.loader())
    work.evaluate(watch, around(format, job["device"]))
    return watch.results()


def ours(job: dict, policy: str, kept: bool = True) -> dict:
    """What ``halfstep finetune classify`` does, stopped by the same watch.

    The training's seconds hold all that is between the first step and the end: its own measurement
    of the processor, the metrics file and the checkpoint of the last step.
    """
    if kept:
        keep_freed_memory()
    settings = [
        ("model.source", job["model"]), ("model.max_length", job["max_length"]),
        ("data.train", [job["train"]]), ("data.dev", [job["dev"]]), ("data.labels", job["labels"]),
        ("precision", policy), ("optimizer.learning_rate", job["learning_rate"]),
        ("optimizer.beta1", BETAS[0]), ("optimizer.beta2", BETAS[1]), ("optimizer.eps", EPS),
        ("optimizer.weight_decay", WEIGHT_DECAY), ("optimizer.max_norm", MAX_NORM),
        ("schedule.warmup_steps", job["warmup"]), ("schedule.min_ratio", 0.0),
        ("run.max_steps", job["steps"]), ("run.eval_every", job["steps"]),
        ("run.device", job["device"]), ("run.batch_size", job["batch_size"]),
        ("run.seed", job["seed"]),
    ]  # fmt: skip
    config, watch = load_config("classify-pretrained", settings), Watch(job["count"])
    with open_world(job["device"]) as world:
        session = open_session(config, world=world)
        path = Path(job["scratch"]) / "run"
        run = world.main_only(lambda: create_run(path, session))
        evaluate = session.task.evaluate

        def timed(judge: Any) -> Any:
            with watch.evaluating():
                return evaluate(judge)

        session.task.evaluate = timed
        in_steps, tokens = 0.0, 0
        watch.start()
        ticks = train(session, path)
        for tick in ticks:
            assert tick.record.tokens
            assert tick.record.tokens_per_second
            in_steps += (tick.record.tokens - tokens) / tick.record.tokens_per_second
            tokens = tick.record.tokens
            watch.found["accuracy"] = tick.evaluation and tick.evaluation.accuracy
            watch.found["skipped"] = tick.record.skipped_total
            if watch.step():
                break
        ticks.close()
        if run is not None:
            run.close()
        done = [session.task.tokens(step) for step in range(job["steps"])]
        # lengths differ from batch to batch, so a short row has not done its steps' share
        watch.found["share_after_first_step"] = sum(done[1 : len(watch.stamps) - 1]) / sum(done)
        results = watch.results(inside=watch.found["evaluation_seconds"])
        return results | {"outside_steps_seconds": results["train_seconds"] - in_steps}


ROWS: dict[str, tuple] = {
    "torch fp32": (by_hand, "fp32"),
    "torch bf16": (by_hand, "bf16"),
    "torch fp16": (by_hand, "fp16"),
    "torch fp32, length groups": (by_hand, "fp32", True),
    "accelerate fp32": (with_accelerate, "fp32"),
    "accelerate bf16": (with_accelerate, "bf16"),
    "trainer fp32": (with_trainer, "fp32"),
    "trainer bf16": (with_trainer, "bf16"),
    "trainer fp32, length groups": (with_trainer, "fp32", True),
    "trainer bf16, length groups": (with_trainer, "bf16", True),
    "accelerate fp32 + halfstep": (with_accelerate, "fp32", True),
    "accelerate + halfstep fp16-mixed": (precision_in_accelerate, "fp16-mixed"),
    "trainer fp32 + halfstep": (with_trainer, "fp32", False, True),
    "halfstep fp32": (ours, "fp32"),
    "halfstep fp32, default malloc": (ours, "fp32", False),
    "halfstep fp16-mixed": (ours, "fp16-mixed"),
    "halfstep bf16-mixed": (ours, "bf16-mixed"),
    "halfstep bf16-split": (ours, "bf16-split"),
    "dataparallel fp32": (by_hand, "fp32", False, 1, DataParallel),
    "lightning fp32": (with_lightning, "fp32"),
    "lightning bf16": (with_lightning, "bf16"),
    "2 x ddp fp32": (by_hand, "fp32", False, 2),
    "2 x ddp spawn fp32": (by_spawn, "fp32"),
    "2 x ddp fp16": (by_hand, "fp16", False, 2),
    "2 x ddp bf16": (by_hand, "bf16", False, 2),
    "2 x deepspeed bf16": (with_deepspeed, "bf16"),
    "2 x halfstep fp32": (ours, "fp32"),
    "2 x halfstep bf16-mixed": (ours, "bf16-mixed"),
}
"""Name of a row to the function that trains it, and its arguments; "2 x" are two processes."""


def write(results: dict, folder: str) -> None:
    """The results of this process, under the number of its rank."""
    file = Path(folder) / f"rank-{os.environ.get('RANK', '0')}.json"
    file.write_text(json.dumps(results))


def main(arguments: Iterable[str]) -> None:
    name, job_file, folder = arguments
    job = json.loads(Path(job_file).read_text()) | {"scratch": folder}
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    row, *rest = ROWS[name]
    if (results := row(job, *rest)) is not None:
        write(results, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
