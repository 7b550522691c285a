"""Estimates the memory of training, of a configuration or a number of parameters alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.diagnostics.estimate import estimate_state, with_saved
from halfstep.diagnostics.memory import Memory
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import POLICIES, PrecisionPolicy
from halfstep.precision.policy.recipe import Recipe
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.run import OptimizerConfig
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.models.gpt import GPT
from halfstep.trainer.step import Batch, make_optimizer

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


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


def averages(config: OptimizerConfig, model: nn.Module) -> float | Mapping[str, float]:
    """How many tensors of a parameter's size the optimizer keeps: 2 for AdamW, 1 for SGD.

    By parameter for Muon, where it depends on the shape; for any other counted on a small
    parameter.
    """
    if config.name == "muon":
        muon: Any = make_optimizer(model, config, POLICIES["fp32"])
        found: Mapping[str, float] = muon.averages(model)
        return found
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = make_optimizer(nn.ParameterList([weight]), config, POLICIES["fp32"])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    kept = [t for t in optimizer.state[weight].values() if isinstance(t, Tensor) and t.dim()]
    return sum(t.numel() for t in kept) / weight.numel()


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
    config = load_config(spec)
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"--config {spec} loads its model from a folder; halfstep.estimate(model, policy, "
            "batch) answers for any model, or give --params"
        )
    run, shape = config.run, config.model
    vocabulary = shape.vocab_size or _vocabulary(config.data.tokenizer)
    with torch.device("meta"):
        model = GPT(dataclasses.replace(shape, vocab_size=vocabulary))
    rows = rows or max(1, run.batch_size // (run.grad_accum * layout.batch_ranks))
    tokens = torch.empty(rows, config.block_size, dtype=torch.int64, device="meta")
    kept, ranks = averages(optimizer or config.optimizer, model), layout.shard * layout.tensor
    found = []
    for policy in policies:
        state = estimate_state(model, policy, ranks, averages=kept, micro_batches=run.grad_accum)
        memory = with_saved(state, model, policy, (tokens, tokens), _mean_loss)
        found.append(dataclasses.replace(memory, ranks=layout.size))
    return found


def _mean_loss(model: Any, batch: Batch) -> Tensor:
    total, count = model.loss_sum(batch)
    loss: Tensor = total / count
    return loss


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
