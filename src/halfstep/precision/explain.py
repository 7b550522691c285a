"""Explains a precision policy as text: what each part means, and its cost in bytes."""

from __future__ import annotations

import torch

from halfstep.precision.border import as_device
from halfstep.precision.casting.autocast import support
from halfstep.precision.masters.rounding import ROUNDING
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.scaling.loss_scale import LOSS_SCALE_FIELDS

_RECIPE = "linear layers' fprop, dgrad and wgrad"
_CASTS = {
    "op": "operation by operation",
    "module": "where FSDP2 gathers them: in sharded runs only",
}


def explain(policy: str | PrecisionPolicy, device: str | torch.device = "cpu") -> str:
    """The policy as a table of text: formats, loss scale, bytes, and how the device runs it.

    Args:
        policy: A policy, its name or field string.
        device: The device it would run on; nothing is allocated there.

    Example:
        >>> print(explain("bf16-master").splitlines()[6])
        master   fp32     what the optimizer updates
    """
    where = as_device(device)
    value = parse_policy(policy, where)
    found = support(value, where)
    reason = found.reason
    reason += f"; nearest: {found.nearest}" if found.nearest else ""
    rows = [("policy", "", str(value)), *explain_policy(value)]
    rows.append((where.type, found.status, reason))
    return "\n".join(f"{part:<8} {form:<8} {text}".rstrip() for part, form, text in rows)


def bytes_per_parameter(policy: PrecisionPolicy) -> dict[str, float]:
    """Bytes that training holds per trainable parameter between micro-batches, with AdamW.

    The keys are weights, masters (0 where the weights are the masters), remainder (the bits that a
    16-bit weight lacks), gradients (of one micro-batch) and moments (both, with block scales).
    """
    moments = {"fp32": 4, "bf16": 2, "fp16": 2, "8bit": 1 + 1 / 128}[policy.moment_format]
    return {
        "weights": policy.param_dtype.itemsize,
        "masters": 4 if policy.has_masters else 0,
        "remainder": ROUNDING[policy.update].bytes,
        "gradients": policy.grad_dtype.itemsize if policy.update == "nearest" else 2,
        "moments": 2 * moments,
    }


def explain_policy(policy: PrecisionPolicy) -> list[tuple[str, str, str]]:
    """What the policy means, as rows of (part, format, meaning), ready to print."""
    p, c, scale = policy.param_dtype, policy.compute_dtype, policy.loss_scale
    weights, form = ROUNDING[policy.update].weight, "tf32" if policy.tf32 else dtype_name(c)
    if policy.has_masters:
        weights = "16 bit, rounded from the masters after every step"
    elif p == torch.float32:
        weights = "the optimizer's own copy"
    if c != p:
        weights += f"; cast to {form} {_CASTS[policy.casts]}"
    products = f"matrix products: operands {'rounded to' if policy.tf32 else 'in'} {form}"
    products += ", fp32 accumulation" if min(c.itemsize, p.itemsize) < 4 else ""
    added = "gradients of micro-batches add up in this format"
    added += "" if policy.update == "nearest" else "; those of a single one stay in 16 bits"
    cost = bytes_per_parameter(policy)
    parts = " + ".join(f"{size:.4g} {key}" for key, size in cost.items() if size)
    numbers = ", ".join(f"{name} {getattr(scale, name):g}" for name in LOSS_SCALE_FIELDS)
    return [
        ("params", dtype_name(p), weights),
        ("compute", form, products),
        ("output", dtype_name(policy.output_dtype), _islands(policy)),
        ("grad", dtype_name(policy.grad_dtype), added),
        ("reduce", dtype_name(policy.reduce_dtype), "between data-parallel ranks"),
        ("master", dtype_name(policy.master_dtype), ROUNDING[policy.update].master),
        ("moments", policy.moment_format, "the optimizer's running averages"),
        ("scale", scale.kind, "the loss is not scaled" if scale.kind == "none" else numbers),
        ("bytes", f"{sum(cost.values()):.4g}", f"per parameter with AdamW: {parts}"),
        *([("recipe", f"{policy.recipe}", _RECIPE)] if policy.recipe else []),
        *([("simulate", "yes", "where the device has no such products")] * policy.simulate),
        *(("rule", f, f"modules {glob}") for glob, f in policy.rules),
    ]


def _islands(policy: PrecisionPolicy) -> str:
    """The operations that run in fp32 although matrix products do not."""
    if policy.casts_per_op:
        return "of the model; softmax, norms, sums, powers and losses are fp32, as CUDA's autocast"
    if policy.compute_dtype == torch.float32:
        return "of the model; everything else is fp32 too"
    return "of the model; the loss is fp32, softmax and norms take and give 16 bits"
