"""Runs of a tiny GPT on a text file, which take a second."""

from __future__ import annotations

import json
from contextlib import closing

import torch

from halfstep.precision.policy.policy import POLICIES
from halfstep.trainer.checkpoint import list_checkpoints, load_checkpoint
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import Use
from halfstep.trainer.loop import train
from halfstep.trainer.run import (
    create_run,
    lock_run,
    resume,
    run_config,
    with_run_folder,
)
from halfstep.trainer.session import open_session
from halfstep.trainer.tasks.text import TrainedText

ON_CPU = [name for name in POLICIES if name not in ("tf32", "bf16-module")]  # GPUs, FSDP2 only
TIMES = {"tokens_per_second", "peak_memory_bytes"}


def small_config(corpus, policy="bf16-mixed", **overrides):
    """The configuration of a run; ``__`` stands for a dot in keys."""
    values = {
        "precision": policy,
        "data.train": [str(corpus)],
        "data.tokenizer": "bytes",
        "model.n_layer": 1,
        "model.n_head": 2,
        "model.n_embd": 32,
        "model.block_size": 32,
        "run.max_steps": 8,
        "run.batch_size": 4,
        "run.eval_every": 4,
        "run.eval_batches": 2,
        "run.save_every": 4,
        "run.keep": 9,
        "run.device": "cpu",
        "schedule.warmup_steps": 2,
    }
    if policy == "fp16-pure":
        values["optimizer.eps"] = 1e-4  # 1e-8 is 0 in fp16
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config("gpt-tiny", list(values.items()))


def overflowing(policy):
    """The policy; a dynamic scale in it overflows at first and grows soon."""
    spelled = {
        "fp16-mixed": "params=fp32,compute=fp16",
        "fp16-master": "params=fp16",
        "fp16-pure": "params=fp16,master=fp16",
    }
    fields = spelled.get(policy, policy)
    dynamic = POLICIES[policy].loss_scale.kind == "dynamic"
    return f"{fields},scale=dynamic,init_scale=1048576,growth_interval=3" if dynamic else policy


def start(config, path):
    session = open_session(with_run_folder(config, path))
    return session, create_run(path, session)


def run(config, path, until=None):
    """Train, or go on with the run in the folder, to the step ``until``; session and ticks."""
    session = open_session(with_run_folder(config, path))
    folder = lock_run(path) if path.exists() else create_run(path, session)
    ticks = []
    with closing(folder):
        resume(session, path / "checkpoints")
        for tick in train(session, path):
            ticks.append(tick)
            if tick.record.step == until:
                break
    return session, ticks


def opened_run(path, precision="fp32"):
    """The trained model that ``halfstep train`` left, on the CPU."""
    use = Use(run=str(path), device="cpu", precision=precision)
    return TrainedText(path, run_config(path)).open(use)


def metrics(path):
    """What the steps left that does not depend on the clock."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def newest(path):
    return load_checkpoint(list_checkpoints(path / "checkpoints")[-1])


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
