"""How a model is laid out over the ranks of a run; this is one device, the others are its heirs.

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

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halfstep.distributed.layout import Layout
from halfstep.distributed.plan import ParallelPlan
from halfstep.distributed.traffic import Traffic
from halfstep.precision.agreement import ManyRanks
from halfstep.precision.border import as_device
from halfstep.precision.casting.cast import cast_parameters_
from halfstep.precision.checks import check_cast
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.scaling.gradients import OneRank, Ranks
from halfstep.precision.step import Precision


class Strategy:
    """How a model lies over the ranks of a run; this one is of one device, and splits nothing.

    The other layouts are its heirs; :func:`halfstep.distributed.choose_strategy` gives the right
    one. Its methods are called by all ranks together.
    """

    def __init__(
        self,
        layout: str | Layout,
        policy: str | PrecisionPolicy,
        device: str | torch.device,
    ) -> None:
        """Make the mesh; all ranks together.

        Args:
            layout: Or its spelling. Of as many ranks as there are; whether it honours the policy is
                checked by :func:`halfstep.distributed.select.choose_strategy`.
            policy: The run's, or its name.
            device: This rank's, or its name.

        Raises:
            ConfigError: For what is no layout.
            PrecisionError: For what is no policy or no device.
        """
        self.layout = layout = Layout.of(layout)
        self.policy = parse_policy(policy)
        self.device = device = as_device(device)
        self.mesh = _mesh(layout, device)
        many = layout.size > 1
        rank = dist.get_rank() if many else 0
        self.batch_rank = layout.batch_rank(rank)
        """Which share of the batch this rank takes, of ``layout.batch_ranks``."""
        self.ranks: Ranks = ManyRanks(device, loss_share=1 / layout.tensor) if many else OneRank()
        """Who agrees on each step; for :class:`~halfstep.precision.step.Precision`."""
        self._exact: dict[str, Tensor] = {}

    @torch.no_grad()
    def place_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Lay the model out. All ranks have the same weights before it.

        Where weights are stored in 16 bits, they are cast here, before anything is sharded, and
        what the cast loses is kept for the masters.

        Raises:
            ConfigError: If the model cannot be laid out so.
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
        """Turn parameters into this rank's parts of them."""

    def _part(self, full: Tensor, parameter: Tensor) -> Tensor:
        """This rank's part of a whole tensor, placed as a parameter is."""
        return full

    def attach_(self, precision: Precision) -> None:
        """Give the masters what the cast before the sharding lost, and watch the gradients."""
        if self._exact:
            precision.start_from_({n: self._exact[n] for n in precision.named_parameters()})
            self._exact = {}

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch's forward and backward.

        Args:
            last: Whether it is the step's last on this rank.
        """
        return nullcontext()

    def finish(self) -> None:
        """Make the gradients the sums over all ranks with different data."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over the ranks with different data, in fp64; the same on every rank."""
        if self.layout.size == 1:
            return list(values)
        # through the host where its group serves it, so that no GPU is waited for
        host = "cpu" in dist.get_backend_config()
        table = torch.tensor(values, dtype=torch.float64, device="cpu" if host else self.device)
        dist.all_reduce(table)
        sums: list[float] = (table / self.layout.tensor).tolist()
        return sums

    def traffic(self, micro_batches: int) -> tuple[Traffic, Traffic]:
        """What this rank sends for gradients and parameters in a step; and were all of it fp32."""
        return Traffic(), Traffic()


def _mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """The mesh of the axes that have several ranks; None for one rank."""
    axes = {name: size for name, size in layout.axes.items() if size > 1}
    if not axes:
        return None
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
