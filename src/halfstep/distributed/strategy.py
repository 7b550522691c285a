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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.precision.agreement import ManyRanks
from halfstep.precision.border import as_device, require_model
from halfstep.precision.casting.cast import cast_parameters_
from halfstep.precision.checks import check_cast
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

    def __post_init__(self) -> None:
        """Raise ConfigError unless all blocks are modules."""
        several = self.blocks if isinstance(self.blocks, list | tuple) else (None,)
        if not all(isinstance(block, nn.Module) for block in several):
            raise ConfigError(
                f"ParallelPlan(blocks={self.blocks!r:.80}); allowed: a tuple of the model's own "
                "modules, in the order they run"
            )


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
        layout: str | Layout,
        policy: str | PrecisionPolicy,
        device: str | torch.device,
    ) -> None:
        """Make the device mesh; all ranks call it together.

        Args:
            layout: A layout of as many ranks as there are, or its spelling. That it honours the
                policy is checked by :func:`halfstep.distributed.select.choose_strategy`.
            policy: The run's policy, or its name.
            device: This rank's device, or its name.

        Raises:
            ConfigError: If ``layout`` is not a layout.
            PrecisionError: If ``policy`` is not a policy or ``device`` is not a device.
        """
        self.layout = layout = Layout.of(layout)
        self.device = device = as_device(device)
        self.policy = parse_policy(policy, device)
        self.mesh = _mesh(layout, device)
        many = layout.size > 1
        rank = dist.get_rank() if many else 0
        self.batch_rank = layout.batch_rank(rank)
        """Index of this rank's share of the batch, among ``layout.batch_ranks``."""
        self.ranks: Ranks = ManyRanks(device, loss_share=1 / layout.tensor) if many else OneRank()
        """The ranks that agree on each step; for :class:`~halfstep.precision.step.Precision`."""
        self._exact: dict[str, Tensor] = {}

    @torch.no_grad()
    def place_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Lay the model out; all ranks must have the same weights before.

        If the policy stores weights in 16 bits, they are cast here, before anything is sharded, and
        what the cast loses is kept for the masters.

        Raises:
            ConfigError: If the model cannot be laid out in this way.
            PrecisionError: If 16 bits cannot hold its weights.
        """
        low = self.policy.param_dtype != torch.float32
        if low:
            placed = place(self.policy, model)
            check_cast(placed)
        if self.policy.keeps_more_than_weights:
            self._exact = {n: p.detach().clone() for n, p in model.named_parameters()}
        if low:
            cast_parameters_(model, placed.dtypes())
        self.shard_(model, plan)
        named = dict(model.named_parameters())
        self._exact = {n: self._part(full, named[n]) for n, full in self._exact.items()}

    def shard_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Replace parameters by this rank's parts of them; nothing to do on one device."""

    def _part(self, full: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, split as the parameter is."""
        return full

    def attach_(self, precision: Precision) -> None:
        """Give the masters what the cast before the sharding lost, and watch the gradients."""
        if self._exact:
            precision.start_from_({n: self._exact[n] for n in precision.named_parameters()})
            self._exact = {}

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

    def sent_bytes(self) -> tuple[int, int]:
        """Count the bytes of gradients that this rank sends in a step, and those of fp32; or 0."""
        return 0, 0


def _mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """Make the mesh of the axes that have several ranks; None for one rank."""
    axes = {name: size for name, size in layout.axes.items() if size > 1}
    if not axes:
        return None
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
