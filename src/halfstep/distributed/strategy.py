"""The base class of strategies, which lay a model out over the ranks of a run.

A training loop reads the same with any of them::

    strategy.place_(model, plan)           before the optimizer is made
    precision = Precision(policy, model, optimizer, ranks=strategy.ranks)
    strategy.attach_(precision)
    n = strategy.sum([targets])            over the whole batch, before any backward
    for batch in this rank's micro-batches:
        with strategy.micro_batch(last):
            loss = loss_sum(batch) / n
            precision.backward(loss)
    strategy.finish()                      gradients are sums over ranks now
    precision.step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# The package loads strategies on first use, as importing DTensor takes half as long as torch.
import halfstep.distributed as strategies
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError, PrecisionError
from halfstep.precision.agreement import ManyRanks
from halfstep.precision.border import as_device, require_model
from halfstep.precision.casting.cast import cast_parameters_
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.scaling.gradients import OneRank, Ranks
from halfstep.precision.step import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How a model may be split."""

    blocks: tuple[nn.Module, ...]
    """Modules to shard, each gathered as one unit, in the order in which they run."""
    tensor: Mapping[str, str] = field(default_factory=dict)
    """Module name to style of tensor parallelism (``tensor_parallel.parallelize_``); empty: the
    model does not support it."""
    methods: tuple[str, ...] = ()
    """Methods besides ``forward`` that run the model, such as ``loss_sum``."""


def plan_of(model: nn.Module) -> ParallelPlan:
    """Return the plan that a model provides, or the one derived from a Hugging Face model.

    A user's own model needs ``blocks()``, a list of modules, and for tensor parallelism
    ``tp_plan()``, a mapping from module name to style. The blocks of a Hugging Face model are the
    modules whose class is named in ``_no_split_modules``.

    Raises:
        ConfigError: If the model is neither of these.
        PrecisionError: If ``model`` is not a module.
    """
    require_model(model, "plan_of(model)")
    own: Any = model
    if callable(getattr(own, "blocks", None)):
        tensor = own.tp_plan() if callable(getattr(own, "tp_plan", None)) else {}
        methods = tuple(n for n in ("loss_sum", "logits") if callable(getattr(own, n, None)))
        return ParallelPlan(blocks=tuple(own.blocks()), tensor=tensor, methods=methods)
    names = set(getattr(own, "_no_split_modules", None) or ())
    blocks = tuple(m for m in model.modules() if type(m).__name__ in names)
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__} does not say what to shard: it has neither blocks() nor, as "
            "Hugging Face models, _no_split_modules; give parallelism "
            "ParallelPlan(blocks=(its layers...,))"
        )
    return ParallelPlan(blocks=blocks)


class Strategy:
    """Lays a model out over the ranks of a run; this base class is for one device.

    Other layouts are subclasses; :func:`halfstep.distributed.choose_strategy` makes the right one.
    All ranks call its methods together.
    """

    def __init__(
        self,
        layout: Layout,
        policy: PrecisionPolicy,
        device: torch.device,
    ) -> None:
        """Make the device mesh; all ranks call it together."""
        self.layout, self.policy, self.device = layout, policy, device
        many = layout.size > 1
        # beside tensor, copies are FSDP2's too, over as many shards as there are: one, say
        copies = layout.data > 1 and layout.tensor > 1
        axes = {n: k for n, k in layout.axes.items() if k > 1 or (n == "shard" and copies)}
        self.mesh = (
            init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
            if many
            else None
        )
        rank = dist.get_rank() if many else 0
        self.batch_rank = layout.batch_rank(rank)
        """Index of this rank's share of the batch, among ``layout.batch_ranks``."""
        self.ranks: Ranks = ManyRanks(device, loss_share=1 / layout.tensor) if many else OneRank()
        """The ranks that agree on each step; for :class:`~halfstep.precision.step.Precision`."""

    def place_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Lay the model out, by parts of its parameters; all ranks have the same weights before.

        Raises:
            ConfigError: If the model cannot be laid out in this way.
        """
        if self.policy.update == "stochastic":  # a part would draw other bits than the whole
            cast_parameters_(model, place(self.policy, model).dtypes())
        self.shard_(model, plan)

    def shard_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Replace parameters by this rank's parts of them; nothing to do on one device."""

    def attach_(self, precision: Precision) -> None:
        """Watch the gradients of a Precision that was made of the model."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward.

        Args:
            last: Whether it is this rank's last micro-batch of the step.
        """
        return nullcontext()

    def finish(self) -> None:
        """Complete the gradients as sums over all ranks with different data."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over the ranks with different data in fp64; equal on every rank."""
        if self.layout.size == 1:
            return list(values)
        # through host memory if the group has a CPU backend, so as not to wait for the GPU
        host = "cpu" in dist.get_backend_config()
        table = torch.tensor(values, dtype=torch.float64, device="cpu" if host else self.device)
        dist.all_reduce(table)
        sums: list[float] = (table / self.layout.tensor).tolist()
        return sums


# Which layouts can honour which policies, and the strategy of a layout.


def refusal(policy: PrecisionPolicy, layout: Layout) -> str:
    """Say why ``layout`` does not honour ``policy`` and what to use instead; empty if it does."""
    if policy.casts == "module" and layout.shard == 1:
        return (
            "casts=module is FSDP2's way to gather weights, and no axis shards them; "
            "use parallel=shard=N, or precision=bf16-mixed"
        )
    if layout.tensor > 1 and policy.recipes():
        return (
            f"{policy.recipes()[0]} scales blocks of a layer's operands, and tensor ranks hold "
            f"parts of them, whose scales nobody agrees on yet; use parallel=data={layout.size} "
            f"or shard={layout.size}"
        )
    return ""


def choose_strategy(
    layout: str | Layout,
    policy: str | PrecisionPolicy,
    device: str | torch.device,
) -> Strategy:
    """Make the strategy of a layout; all ``layout.size`` ranks of the process group call it.

    Args:
        layout: A layout, or its spelling ``"data=2,tensor=2"``; :meth:`Layout.choose` checks it
            against the number of ranks.
        policy: The run's policy, or its name.
        device: This rank's device, or its name.

    Raises:
        PrecisionError: If the layout does not honour the policy, naming the nearest that does.
    """
    layout, device = Layout.of(layout), as_device(device)
    policy = parse_policy(policy, device)
    refused = refusal(policy, layout)
    if refused:
        raise PrecisionError(
            f"precision {policy} cannot be honoured under parallel={layout}: {refused}"
        )
    if layout.tensor > 1:
        return strategies.TensorParallel(layout, policy, device)
    if layout.shard > 1:
        return strategies.FullySharded(layout, policy, device)
    if layout.data > 1:
        return strategies.DataParallel(layout, policy, device)
    return Strategy(layout, policy, device)
