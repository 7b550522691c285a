"""Decides which layouts can honour which policies, and makes the strategy of a layout."""

from __future__ import annotations

import torch

# The package loads strategies on first use, as importing DTensor takes half as long as torch.
import halfstep.distributed as strategies
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import Strategy
from halfstep.errors import ConfigError, PrecisionError
from halfstep.precision.border import as_device
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy


def refusal(policy: str | PrecisionPolicy, layout: str | Layout) -> str:
    """Say why ``layout`` does not honour ``policy`` and what to use instead; empty if it does."""
    policy, layout = parse_policy(policy), Layout.of(layout)
    low = policy.param_dtype != torch.float32
    if layout.shard > 1 and layout.tensor > 1:
        copies = Layout(data=layout.data * layout.shard, tensor=layout.tensor)
        ways = (copies, Layout(shard=layout.size), Layout(data=layout.size))
        nearest = next(way for way in ways if not refusal(policy, way))
        return (
            "parameters cannot be sharded over shard and over tensor at once yet; "
            f"use parallel={nearest}"
        )
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
    if layout.shard > 1 and low and any(form == "fp32" for _, form in policy.rules):
        return (
            "rules keep some parameters in fp32 beside 16-bit ones, and FSDP2 gathers a "
            f"block's parameters in one format; use parallel=data={layout.size}, or a *-mixed "
            "policy with the same rules"
        )
    return ""


def choose_strategy(
    layout: str | Layout,
    policy: str | PrecisionPolicy,
    device: str | torch.device,
    *,
    compiled: bool = False,
) -> Strategy:
    """Make the strategy of a layout; all ``layout.size`` ranks of the process group call it.

    Args:
        layout: A layout, or its spelling ``"data=2,tensor=2"``; :meth:`Layout.choose` checks it
            against the number of ranks.
        policy: The run's policy, or its name.
        device: This rank's device, or its name.
        compiled: Whether the model runs through ``torch.compile``.

    Raises:
        PrecisionError: If the layout does not honour the policy, naming the nearest that does.
        ConfigError: For an option that the layout does not support.
    """
    layout, device = Layout.of(layout), as_device(device)
    policy = parse_policy(policy, device)
    refused = refusal(policy, layout)
    if refused:
        raise PrecisionError(
            f"precision {policy} cannot be honoured under parallel={layout}: {refused}"
        )
    if compiled and (layout.shard > 1 or layout.tensor > 1):
        raise ConfigError(
            f"compile with parallel={layout} is not supported: the hooks that gather parameters "
            "and sum activations would be traced into the graph; leave --compile out, or use "
            f"parallel=data={layout.size}"
        )
    if layout.shard > 1:
        return strategies.FullySharded(layout, policy, device)
    if layout.tensor > 1:
        return strategies.TensorParallel(layout, policy, device)
    if layout.data > 1:
        return strategies.DataParallel(layout, policy, device)
    return Strategy(layout, policy, device)
