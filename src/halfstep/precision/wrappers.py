"""What torch's own wrappers around a model do to its weights and gradients, held to the policy.

A wrapper has formats of its own: FSDP2 gathers weights in its ``param_dtype`` and sums gradients in
its ``reduce_dtype``, whatever the policy says; DDP sums ``parameter.grad``, which masters and
buffers have taken away by then. None of them tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import PrecisionError
from halfstep.precision.local import fsdp_modules, is_sharded
from halfstep.precision.policy import PrecisionPolicy, dtype_name


def check_wrappers(policy: PrecisionPolicy, model: nn.Module) -> None:
    """Refuse a model that is wrapped to compute or to sum otherwise than the policy says.

    Raises:
        PrecisionError: Naming the wrapper, what it does, and what to do.
    """
    moves_on = policy.has_masters or policy.update != "nearest"  # gradients, as they are finished
    for name, module in model.named_modules():
        what = name or "the model"
        if hasattr(module, "_fsdp_wrapped_module"):
            raise PrecisionError(
                f"{what} is a FullyShardedDataParallel (FSDP1), whose flat parameters do not say "
                "which part a rank holds, so that norms cannot be told; use "
                "torch.distributed.fsdp.fully_shard"
            )
        if isinstance(module, DistributedDataParallel) and moves_on:
            raise PrecisionError(
                f"{what} is a DistributedDataParallel, which sums parameter.grad: under policy "
                f"{policy} gradients have moved on by then, and every rank would train by "
                "its own; use halfstep.distributed (parallel=data=N), or bf16-mixed"
            )
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    if policy.loss_scale.calibrate and sharded:
        raise PrecisionError(
            "init_scale=auto tries scales on each rank by itself, and ranks that share the "
            "parameters of one model would add gradients of different scales; use init_scale=65536"
        )
    found = dict(fsdp_modules(model))
    for name, state in found.items():
        _check_casts(policy, name or "the model", getattr(state, "_mp_policy", None))
    if policy.casts == "module":
        outside = [n for n, p in model.named_parameters() if not is_sharded(p)]
        if not found or outside:
            raise PrecisionError(
                f"policy {policy} computes in {dtype_name(policy.compute_dtype)} where FSDP2 "
                f"gathers weights, and {outside[0] if outside else 'this model'} is not sharded "
                "by it: use torch.distributed.fsdp.fully_shard, or halfstep.distributed "
                "(parallel=shard=N), or policy bf16-mixed"
            )


def _check_casts(policy: PrecisionPolicy, what: str, casts: Any) -> None:
    """Hold one module's ``MixedPrecisionPolicy`` to the policy."""
    gathered = getattr(casts, "param_dtype", None) or policy.param_dtype
    summed = getattr(casts, "reduce_dtype", None) or gathered
    output = getattr(casts, "output_dtype", None) or torch.float32
    wanted = policy.compute_dtype if policy.casts == "module" else policy.param_dtype
    if gathered != wanted:
        nearest = "bf16-module" if gathered == torch.bfloat16 else "bf16-mixed"
        raise PrecisionError(
            f"{what} is sharded by fully_shard with MixedPrecisionPolicy(param_dtype="
            f"{dtype_name(gathered)}), so it computes with weights in that format, and policy "
            f"{policy} asks for {dtype_name(wanted)} there; use "
            f"param_dtype={_written(policy, wanted)}, or policy {nearest}"
        )
    if summed != policy.reduce_dtype:
        raise PrecisionError(
            f"{what} is sharded by fully_shard with MixedPrecisionPolicy that sums gradients in "
            f"{dtype_name(summed)}, and policy {policy} in {dtype_name(policy.reduce_dtype)}; use "
            f"reduce_dtype={policy.reduce_dtype}, or the policy with reduce={dtype_name(summed)}"
        )
    if output not in (torch.float32, wanted):
        raise PrecisionError(
            f"{what} is sharded by fully_shard with MixedPrecisionPolicy(output_dtype="
            f"{dtype_name(output)}), and policy {policy} hands out fp32; leave output_dtype out"
        )


def _written(policy: PrecisionPolicy, wanted: torch.dtype) -> str:
    """``param_dtype`` as it is written: None means as stored."""
    return str(wanted) if policy.casts == "module" else "None"
