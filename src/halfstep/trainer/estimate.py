"""Estimates the memory of a run, and refuses one whose state alone is more than the device has."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.diagnostics.estimate import estimate_state, with_saved
from halfstep.diagnostics.memory import Memory, size_text
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError, PrecisionError
from halfstep.precision.casting.autocast import support
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.recipe import Recipe
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.run import OptimizerConfig
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.memory import memory_bytes
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.optimizer import OWN, averages
from halfstep.trainer.step import Batch
from halfstep.trainer.tasks.task import Task

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_LEANER = ("bf16-split", "bf16-split,moments=8bit")
"""Policies to offer where one does not fit, the nearest first."""


def estimate_count(
    count: int,
    policies: Sequence[PrecisionPolicy],
    layout: Layout,
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  (frozen)
) -> list[Memory]:
    """Count what training keeps for that many parameters, under each policy, without a batch.

    All count as hidden matrices, of shapes that are not known.
    """
    with torch.device("meta"):
        model = nn.Linear(count, 1, bias=False)
    ranks, kept = layout.shard * layout.tensor, averages(optimizer, model)
    # a recipe changes nothing that is kept between steps, and needs layers of a known shape
    stored = [dataclasses.replace(p, recipe=Recipe()) for p in policies]
    found = [estimate_state(model, policy, ranks, averages=kept) for policy in stored]
    return [
        dataclasses.replace(memory, policy=str(policy), ranks=layout.size)
        for memory, policy in zip(found, policies, strict=True)
    ]


def estimate_config(
    spec: str,
    policies: Sequence[PrecisionPolicy],
    rows: int,
    layout: Layout,
    optimizer: OptimizerConfig | None = None,
) -> list[Memory]:
    """Estimate what a step of a configuration's GPT holds on each rank, under each policy.

    Args:
        spec: As for :func:`halfstep.trainer.config.config.load_config`.
        policies: The policies.
        rows: Sequences of one micro-batch; 0: the configuration's.
        layout: How ranks share the work; activations count as without tensor parallelism.
        optimizer: None: the configuration's.

    Raises:
        ConfigError: For a task whose model is not described by its configuration.
        PrecisionError: For moments that the optimizer does not keep.
    """
    config, model = described_model(
        spec, "halfstep.estimate(model, policy, batch) answers for any model, or give --params"
    )
    run = config.run
    rows = rows or max(1, run.batch_size // (run.grad_accum * layout.batch_ranks))
    tokens = torch.empty(rows, config.block_size, dtype=torch.int64, device="meta")
    kept, ranks = averages(optimizer or config.optimizer, model), layout.shard * layout.tensor
    found = []
    for policy in policies:
        state = estimate_state(model, policy, ranks, averages=kept, micro_batches=run.grad_accum)
        memory = with_saved(state, model, policy, (tokens, tokens), _mean_loss)
        found.append(dataclasses.replace(memory, ranks=layout.size))
    return found


def described_model(spec: str, instead: str) -> tuple[TrainConfig, GPT]:
    """A configuration and its GPT without memory, where the configuration alone describes it.

    Args:
        spec: As for :func:`halfstep.trainer.config.config.load_config`.
        instead: What answers for another model, for the message.

    Raises:
        ConfigError: For a model that is loaded from a folder.
    """
    config = load_config(spec)
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"--config {spec} loads its model from a folder; {instead}")
    shape = config.model
    vocabulary = shape.vocab_size or _vocabulary(config.data.tokenizer)
    with torch.device("meta"):
        return config, GPT(dataclasses.replace(shape, vocab_size=vocabulary))


def _mean_loss(model: Any, batch: Batch) -> Tensor:
    total, count = model.loss_sum(batch)
    loss: Tensor = total / count
    return loss


def require_memory(task: Task, device: torch.device, layout: Layout) -> Memory:
    """Estimate a run's step on each rank, and refuse the run whose state exceeds the device.

    Activations are in what is returned where the forward runs on shapes alone. They refuse
    nothing: how much of them lives at once depends on kernels and checkpointing.

    Raises:
        ConfigError: With the parts, what the device has, and what would fit.
    """
    config: Any = task.config
    run, policy = config.run, config.precision
    kept = 0 if task.own_optimizer else averages(config.optimizer, task.model)

    def of(policy: PrecisionPolicy, ranks: int) -> Memory:
        return estimate_state(task.model, policy, ranks, kept, run.grad_accum)

    ranks, have = layout.shard * layout.tensor, memory_bytes(device)
    found = of(policy, ranks)
    if found.total > have:
        ours = config.optimizer.name in OWN and not task.own_optimizer
        fitting = [
            _typed(task, "precision", name)
            for name in (_LEANER if ours else ())
            if support(parse_policy(name, device), device).status == "native"
            and of(parse_policy(name, device), ranks).total <= have
        ]
        more = 2 * ranks * -(-found.total // (2 * have))
        fitting.append(f"{_typed(task, 'parallel', f'shard={more}')} on {more} devices")
        raise ConfigError(
            f"the run keeps at least {size_text(found.total)} between steps, {device} has "
            f"{size_text(have)}: {found.parts_text()}. Try {fitting[0]}, or a smaller model"
        )
    rows = task.batch_size(0) // (run.grad_accum * layout.batch_ranks)
    batch = None if run.compile or layout.tensor > 1 else task.shapes(rows)
    if batch is not None:
        with contextlib.suppress(PrecisionError):
            found = with_saved(found, task.model, policy, batch, _mean_loss)
    return dataclasses.replace(found, ranks=layout.size)


def _typed(task: Task, key: str, value: object) -> str:
    """A setting as a user types it: to a command, or to ``halfstep.Trainer``."""
    if not task.config.COMMAND:
        return f"{key}={value!r}"
    return f"--{key.replace('_', '-')} {value}"


def read_count(text: str, option: str) -> int:
    """Read a number with a unit: ``1.3B``, ``124M``, ``16GB``, ``7e9``.

    Raises:
        ConfigError: Naming the option.
    """
    plain = text.strip().lower().replace("_", "")
    if len(plain) > 1 and plain.endswith("b") and plain[-2] in _UNITS:  # GB
        plain = plain[:-1]
    factor = _UNITS.get(plain[-1:], 1)
    try:
        count = float(plain[:-1] if factor > 1 else plain) * factor
    except ValueError:
        count = 0.0
    if not 1 <= count < 2**60:
        raise ConfigError(f"{option} {text!r}; allowed: a number from 1, such as 1.3B or 124M")
    return round(count)


def _vocabulary(tokenizer: str) -> int:
    """The number of tokens that a tokenizer's spelling names."""
    if tokenizer == "bytes":
        return 256
    kind, _, size = tokenizer.partition(":")
    if kind == "bpe" and size.isdecimal():
        return int(size)
    raise ConfigError(
        f"data.tokenizer={tokenizer}: its vocabulary is in its file; set model.vocab_size in the "
        "configuration"
    )
