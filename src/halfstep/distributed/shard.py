"""Fully sharded data parallel by FSDP2: every rank holds a part of every parameter.

A block's weights are gathered before it runs and dropped after; gradients are summed and scattered.
FSDP2 would average gradients; here they are sums, as on one device with the same micro-batches.
fp32 parameters are gathered in fp32, and autocast works as on one device, bit for bit;
``casts=module`` gathers them in the compute dtype, which sends half the bytes but is less precise.
16-bit parameters, which only some policies have, are gathered as they are.

**Source:** Rajbhandari et al. 2020, "ZeRO", stage 3; Zhao et al. 2023, "PyTorch FSDP".
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from halfstep.distributed.plan import ParallelPlan
from halfstep.distributed.strategy import Strategy
from halfstep.distributed.traffic import Traffic, data_parallel, fully_sharded
from halfstep.precision.masters.local_part import part_like


class FullySharded(Strategy):
    """Splits parameters and batch over the ``shard`` axis; ``data`` adds copies of that (HSDP)."""

    _in_blocks = (0, 0)
    """Elements of the blocks' parameters, and of those of them that are trained."""
    _outside = (0, 0)

    _part = staticmethod(part_like)

    def shard_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Shard each of the plan's blocks, then the parameters outside of them as one unit."""
        assert self.mesh is not None
        policy = self.policy
        blocks = {p for block in plan.blocks for p in block.parameters()}
        self._in_blocks = _count(blocks)
        self._outside = _count(set(model.parameters()) - blocks)
        by_module = policy.casts == "module"
        casts = MixedPrecisionPolicy(
            param_dtype=policy.compute_dtype if by_module else None,
            reduce_dtype=policy.reduce_dtype,
            cast_forward_inputs=by_module,
        )
        for block in plan.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=casts)
        fully_shard(model, mesh=self.mesh, mp_policy=casts)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        for method in plan.methods:
            register_fsdp_forward_method(model, method)

    def traffic(self, micro_batches: int) -> tuple[Traffic, Traffic]:
        """Compute the bytes sent by formula; parameters outside of blocks are gathered once."""
        by_module = self.policy.casts == "module"
        gathered = self.policy.compute_dtype if by_module else self.policy.param_dtype
        sent = self._bytes(micro_batches, gathered.itemsize, self.policy.reduce_dtype.itemsize)
        return sent, self._bytes(micro_batches, 4, 4)

    def _bytes(self, micro_batches: int, gather_bytes: int, reduce_bytes: int) -> Traffic:
        shard, data = self.layout.shard, self.layout.data
        total = Traffic()
        for (numbers, trained), again in ((self._in_blocks, True), (self._outside, False)):
            gathered, summed = (
                fully_sharded(
                    size,
                    shard,
                    gather_bytes=gather_bytes,
                    reduce_bytes=reduce_bytes,
                    micro_batches=micro_batches,
                    reshard_after_forward=again,
                )
                for size in (numbers, trained)
            )
            copies = data_parallel(trained // shard, data, reduce_bytes=reduce_bytes)
            gradients = summed.gradients + micro_batches * copies.gradients
            total += Traffic(parameters=gathered.parameters, gradients=gradients)
        return total


def _count(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Count the elements of parameters, and of those that are trained."""
    sizes = [(p.numel(), p.numel() if p.requires_grad else 0) for p in parameters]
    return sum(size for size, _ in sizes), sum(trained for _, trained in sizes)
