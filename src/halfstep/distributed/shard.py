"""Fully sharded data parallel by FSDP2: every rank holds a part of every parameter.

A block's weights are gathered before it runs and dropped after; gradients are summed and scattered.
FSDP2 would average gradients; here they are sums, as on one device with the same micro-batches.
fp32 parameters are gathered in fp32, and autocast works as on one device, bit for bit;
``casts=module`` gathers them in the compute dtype, which sends half the bytes but is less precise.
16-bit parameters, which only some policies have, are gathered as they are.

**Source:** Rajbhandari et al. 2020, "ZeRO", stage 3; Zhao et al. 2023, "PyTorch FSDP".
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from halfstep.distributed.strategy import ParallelPlan, Strategy
from halfstep.precision.policy.rules import has_forward, place


class FullySharded(Strategy):
    """Splits parameters and batch over the ``shard`` axis; ``data`` adds copies of that (HSDP)."""

    def shard_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Shard each of the plan's blocks, then the parameters outside of them as one unit."""
        assert self.mesh is not None
        policy = self.policy
        by_module = policy.casts == "module"
        casts = MixedPrecisionPolicy(
            param_dtype=policy.compute_dtype if by_module else None,
            reduce_dtype=policy.reduce_dtype,
            cast_forward_inputs=by_module,
        )
        mesh = self.mesh["data", "shard"] if self.layout.data > 1 else self.mesh["shard"]
        units, kept = {*plan.blocks, model}, set[nn.Module]()
        if policy.param_dtype != torch.float32 and policy.rules:  # a unit is gathered in one format
            placed = place(policy, model).modules
            kept = {p.module for p in placed if p.fp32 != p.around_fp32 and has_forward(p.module)}
        for module in reversed([*model.modules()]):  # inner ones first
            if module in units | kept:
                # what only a rule divides stays gathered, for a head that shares its weight
                again = None if module in units else False
                fully_shard(module, mesh=mesh, mp_policy=casts, reshard_after_forward=again)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        for method in plan.methods:
            register_fsdp_forward_method(model, method)
