"""Say what a precision policy means, part by part, and what it costs in bytes."""

from __future__ import annotations

import torch

from halfstep.formats import FORMATS
from halfstep.precision.autocast import support
from halfstep.precision.parse import parse_policy
from halfstep.precision.policy import PrecisionPolicy, dtype_name


def explain(policy: str | PrecisionPolicy, device: str | torch.device = "cpu") -> str:
    """The policy as a table of text: formats, loss scale, bytes, and how the device runs it.

    Args:
        policy: A policy, its name, field string or ``.toml`` file.
        device: Where it would run; nothing is allocated there.

    Example:
        >>> print(explain("bf16-master").splitlines()[6])
        master   fp32     what the optimizer updates
    """
    value = parse_policy(policy)
    where = torch.device(device)
    found = support(value, where)
    reason = found.reason + (f"; nearest: {found.nearest}" if found.nearest else "")
    rows = [("policy", "", str(value)), *explain_policy(value), (where.type, found.status, reason)]
    return "\n".join(f"{part:<8} {form:<8} {text}".rstrip() for part, form, text in rows)


def bytes_per_parameter(policy: PrecisionPolicy) -> dict[str, float]:
    """Bytes that training holds per trainable parameter between micro-batches, with AdamW.

    Returns:
        Component to bytes: weights, masters (0 where the weights are the masters), gradients and
        the two AdamW moments, which take the dtype of what the optimizer updates.
    """
    master = policy.master_dtype.itemsize
    return {
        "weights": policy.param_dtype.itemsize,
        "masters": master if policy.has_masters else 0,
        "gradients": policy.grad_dtype.itemsize,
        "moments": 2 * master,
    }


def explain_policy(policy: PrecisionPolicy) -> list[tuple[str, str, str]]:
    """What the policy means, as rows of (part, format, meaning), ready to print."""
    p, c = policy.param_dtype, policy.compute_dtype
    low = min(c.itemsize, p.itemsize) < 4
    matmul = f"operands {'rounded to tf32' if policy.tf32 else 'in ' + dtype_name(c)}"
    weights = (
        "16 bit, rounded from the masters after every step"
        if policy.has_masters
        else (
            "16 bit, rounded to nearest: small updates are lost"
            if policy.is_pure
            else "the optimizer's own copy"
        )
    )
    if policy.casts_per_op:
        weights += f"; cast to {dtype_name(c)} operation by operation"
    scale = policy.loss_scale
    scale_text = {
        "none": "the loss is not scaled",
        "static": f"{scale.init_scale:g} throughout",
        "dynamic": (
            f"starts at {scale.init_scale:g}; x{scale.growth_factor:g} after "
            f"{scale.growth_interval} good steps, x{scale.backoff_factor:g} and skip on overflow; "
            f"between {scale.min_scale:g} and {scale.max_scale:g}, hysteresis {scale.hysteresis}, "
            f"stops after {scale.max_consecutive_skips} skips in a row"
        ),
    }[scale.kind]
    cost = bytes_per_parameter(policy)
    extra = (
        f", and {c.itemsize} for the cast copies while a forward and backward run"
        if (policy.casts_per_op)
        else ""
    )
    total = " + ".join(f"{value:g} {key}" for key, value in cost.items() if value)
    return [
        ("params", dtype_name(p), weights),
        (
            "compute",
            "tf32" if policy.tf32 else dtype_name(c),
            f"matrix products: {matmul}" + (", fp32 accumulation" if low else ""),
        ),
        ("output", dtype_name(policy.output_dtype), "logits, softmax and loss are fp32 islands"),
        ("grad", dtype_name(policy.grad_dtype), "micro-batches add up in this format"),
        ("reduce", dtype_name(policy.reduce_dtype), "between data-parallel ranks"),
        ("master", dtype_name(policy.master_dtype), "what the optimizer updates"),
        ("scale", scale.kind, scale_text),
        ("bytes", f"{sum(cost.values()):g}", f"per parameter with AdamW: {total}{extra}"),
        (
            "range",
            _range(policy),
            "largest finite and smallest positive number of the compute format",
        ),
    ]


def _range(policy: PrecisionPolicy) -> str:
    form = FORMATS["tf32" if policy.tf32 else dtype_name(policy.compute_dtype)]
    return f"{form.max:.6g} / {form.min_subnormal:.3g}"
