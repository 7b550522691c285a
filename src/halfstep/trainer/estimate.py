"""The memory of a training step: of a run, a configuration, or a model that is only a number.

A run that cannot fit is refused by it before its first step, with what would fit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from halfstep.diagnostics.memory.estimate import estimate
from halfstep.diagnostics.memory.table import Memory, size_text
from halfstep.distributed.layout import Layout
from halfstep.distributed.tensor.styles import STYLES
from halfstep.errors import ConfigError, PrecisionError
from halfstep.precision.casting.autocast import support
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.recipe import Recipe
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.optimizer import OptimizerConfig
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.memory import memory_bytes
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.optimizer import OWN, averages
from halfstep.trainer.step import Batch
from halfstep.trainer.tasks.task import Task
from halfstep.words import Told

_told = Told("halfstep.trainer")
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_LEANER = ("bf16-split", "bf16-split,moments=8bit")
"""Policies to offer where one does not fit, the nearest first."""


def estimate_count(
    count: int,
    policies: Sequence[PrecisionPolicy],
    layout: Layout,
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  (frozen)
) -> list[Memory]:
    """What training holds for that many parameters, under each policy, without a batch.

    All count as hidden matrices.
    """
    with torch.device("meta"):
        model = nn.Linear(count, 1, bias=False)
    ranks = layout.shard * layout.tensor
    # a recipe changes nothing that is kept between steps, and needs layers of a known shape
    stored = [dataclasses.replace(p, recipe=Recipe()) for p in policies]
    found = [
        estimate(model, policy, None, ranks=ranks, averages=averages(optimizer, model))
        for policy in stored
    ]
    found = [dataclasses.replace(m, policy=str(p)) for m, p in zip(found, policies, strict=True)]
    return [dataclasses.replace(memory, ranks=layout.size) for memory in found]


def estimate_config(
    spec: str,
    policies: Sequence[PrecisionPolicy],
    rows: int,
    layout: Layout,
    device: torch.device,
    optimizer: OptimizerConfig | None = None,
) -> list[Memory]:
    """What a step of a configuration's GPT holds on each rank, under each policy.

    Args:
        spec: As for :func:`halfstep.trainer.config.config.load_config`.
        policies: The policies.
        rows: Sequences of one micro-batch; 0: the configuration's.
        layout: How ranks share the work.
        device: What it is for.
        optimizer: None: the configuration's.

    Raises:
        ConfigError: For a task whose model is not described by its configuration, or that the
            layout does not fit.
    """
    config, model = described_model(
        spec, "halfstep.estimate(model, policy, batch) answers for any model, or give --params"
    )
    optimizer = optimizer or config.optimizer
    model.require_shares(layout.tensor)
    run = config.run
    rows = rows or max(1, run.batch_size // (run.grad_accum * layout.batch_ranks))
    tokens = torch.empty(rows, config.block_size, dtype=torch.int64, device="meta")
    of_rank = _OfRank(
        model, (tokens, tokens), layout, averages(optimizer, model), device, run.grad_accum,
    )  # fmt: skip
    return [of_rank.memory(policy) for policy in policies]


def described_model(spec: str, instead: str) -> tuple[TrainConfig, GPT]:
    """A configuration and its GPT without memory, where the configuration alone describes it.

    Args:
        spec: As for :func:`halfstep.trainer.config.config.load_config`.
        instead: What answers for another model, for the message.

    Raises:
        ConfigError: For a model that is loaded from a folder.
    """
    config = load_config(spec)
    if not isinstance(config, TrainConfig) or config.run.init_from:
        raise ConfigError(f"--config {spec} loads its model from a folder; {instead}")
    shape = config.model
    vocabulary = shape.vocab_size or _vocabulary(config.data.tokenizer)
    with torch.device("meta"):
        return config, GPT(dataclasses.replace(shape, vocab_size=vocabulary))


def require_memory(task: Task, device: torch.device, layout: Layout) -> Memory:
    """Estimate a run's step on each rank, and refuse the run where the device cannot hold it.

    What shapes cannot be sure of counts for the run: nothing that fits is refused. Nor are
    activations counted of a model that torch compiles, of one whose forward depends on values or
    splits sequences over ranks, or of the user's own module.

    Raises:
        ConfigError: With the parts, what the device has, and what would fit.
    """
    config: Any = task.config
    run, policy = config.run, config.precision
    plain = not run.compile and not (run.sequence_parallel and layout.tensor > 1)
    rows = task.batch_size(0) // (run.grad_accum * layout.batch_ranks)
    splits = task.plan(layout).tensor if layout.tensor > 1 else {}
    of_rank = _OfRank(
        task.model, task.shapes(rows) if plain else None, layout,
        0 if task.own_optimizer else averages(config.optimizer, task.model), device,
        run.grad_accum, splits,
    )  # fmt: skip
    found, have = of_rank.memory(policy), memory_bytes(device)
    if found.peak(run.grad_accum) <= have:
        return found
    least = of_rank.memory(policy, least=True)
    if least.peak(run.grad_accum) <= have:
        return found
    rows_text = f", with a micro-batch of {least.rows} rows" if least.rows else ""
    raise ConfigError(
        f"the run needs at least {size_text(least.peak(run.grad_accum))}, {device} has "
        f"{size_text(have)}: {least.parts_text()}{rows_text}. {_way_out(of_rank, task, have)}"
    )


@dataclass(frozen=True, slots=True)
class _OfRank:
    """A model and a micro-batch of it, as one rank of a layout has them."""

    model: nn.Module
    batch: Batch | None
    layout: Layout
    averages: float | Mapping[str, float]
    device: torch.device
    micro_batches: int = 1
    splits: Any = None
    """The model's plan of tensor parallelism; None: its own."""

    def memory(
        self, policy: PrecisionPolicy, *, least: bool = False, recompute: bool = False
    ) -> Memory:
        """What a step holds; the state alone where the forward cannot be run on shapes."""
        layout = self.layout
        options: Any = {"averages": self.averages, "least": least, "device": self.device}
        options |= {"ranks": layout.shard, "loss": _itself, "micro_batches": self.micro_batches}
        splits: Any = self.splits
        if splits is None:
            own: Any = self.model
            splits = own.tp_plan() if layout.tensor > 1 else {}
        found = None
        if self.batch is not None:
            twin = _twin(self.model, splits, layout.tensor)
            if recompute:
                _switch_on(twin)
            twin.forward = partial(_loss, twin)
            with contextlib.suppress(PrecisionError):
                found = estimate(twin, policy, (self.batch,), **options)
        if found is None:  # the user's own module is copied only where it must be
            state = _twin(self.model, splits, layout.tensor) if splits else self.model
            found = estimate(state, policy, None, **options)
        return dataclasses.replace(found, ranks=layout.size)


def _loss(model: Any, batch: Batch) -> Tensor:
    """The loss of a batch, a scalar; what a twin's forward is, once."""
    del model.forward
    total, count = model.loss_sum(batch)
    loss: Tensor = total / count
    return loss


def _itself(loss: Tensor) -> Tensor:
    return loss


def _twin(model: nn.Module, splits: Any, ranks: int) -> Any:
    """A copy of a model whose weights are a rank's part of them, and have no memory.

    Running the model itself on shapes could leave tensors without numbers in what it remembers.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        shape = list(parameter.shape)
        style = splits.get(owner, "").partition(":")[0]
        place = STYLES[style].placement(key) if style in STYLES else None
        if isinstance(place, Shard):
            shape[place.dim] = -(-shape[place.dim] // ranks)
        made = torch.empty(shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    twin = copy.deepcopy(model, memo)
    for name in splits:  # as tensor parallelism does, by which no block runs whole
        twin.get_submodule(name).register_forward_pre_hook(_nothing)
    return twin


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _switch_on(model: nn.Module) -> None:
    """Turn activation checkpointing on where a module has the switch."""
    for module in model.modules():
        if hasattr(module, "activation_checkpointing"):
            module.activation_checkpointing = True  # type: ignore[assignment]


def _way_out(of_rank: _OfRank, task: Task, have: int) -> str:
    """What would fit, with the option to type."""
    config = task.config.run
    size = config.batch_size
    for memory, option, ranks in _ways(of_rank, task):
        fitting = memory.largest_batch(have)
        if not fitting and (memory.rows or memory.peak() > have):
            continue
        if not memory.rows or fitting * config.grad_accum * ranks >= size:
            return f"It fits with {option}"
        accum = next(n for n in range(1, size + 1) if size % n == 0 and fitting * ranks * n >= size)
        smaller = f"{_typed(task, 'grad_accum', accum)}, or a smaller batch by "
        smaller += _typed(task, "batch_size", fitting * config.grad_accum * ranks)
        also = f"{option} and " if option else ""
        return f"Micro-batches of {fitting} rows fit: {also}{smaller}"
    return "No policy, checkpointing or number of ranks makes it fit: take a smaller model"


def _ways(of_rank: _OfRank, task: Task) -> Iterator[tuple[Memory, str, int]]:
    """What the run might be instead: its memory, the option to type, and ranks with own data."""
    config: BaseConfig = task.config
    now = of_rank.layout.batch_ranks
    of_rank = dataclasses.replace(of_rank, micro_batches=2)  # as a smaller micro-batch makes it
    policy = config.precision
    assert isinstance(policy, PrecisionPolicy)  # the session knows the device
    yield of_rank.memory(policy, least=True), "", now
    if of_rank.batch is not None and isinstance(config, TrainConfig):
        on = _typed(task, "model.activation_checkpointing", "true")
        yield of_rank.memory(policy, least=True, recompute=True), on, now
    ours = config.optimizer.name in OWN and not task.own_optimizer
    for name in _LEANER if ours else ():
        leaner = parse_policy(name, of_rank.device)
        if leaner != policy and support(leaner, of_rank.device).status == "native":
            yield of_rank.memory(leaner, least=True), _typed(task, "precision", name), now
    ranks = 2
    while of_rank.layout.size == 1 and ranks * config.run.grad_accum <= config.run.batch_size:
        shared = dataclasses.replace(of_rank, layout=Layout(shard=ranks))
        yield (
            shared.memory(policy, least=True),
            f"{_typed(task, 'parallel', f'shard={ranks}')} on {ranks} devices",
            ranks,
        )
        ranks *= 2


def _typed(task: Task, key: str, value: object) -> str:
    """A setting as a user types it: to a command, or to ``halfstep.Trainer``."""
    if not task.config.COMMAND:
        return f"{key}={value!r}"
    return f"--{key.replace('_', '-') if '.' not in key else key} {value}"


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
        raise ConfigError(_told("no_count", option=option, text=repr(text)))
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
