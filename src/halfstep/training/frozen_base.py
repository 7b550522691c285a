"""In which dtype a model's weights are held while it is tuned under a policy."""

from __future__ import annotations

import torch

from halfstep.errors import PrecisionError
from halfstep.models.pretrained_lm import PretrainedLM
from halfstep.precision.cast import add_regions_, cast_to_policy_
from halfstep.precision.policy import PrecisionPolicy, dtype_name


def hold_weights_(model: PretrainedLM, policy: PrecisionPolicy) -> str:
    """Trained weights become fp32; a frozen base stays as stored if the policy computes in that.

    Otherwise, an fp16 base under ``bf16-mixed`` say, operations would meet two 16-bit formats, or
    compute in another than the policy's; such a base is held in fp32, which is exact.

    Args:
        model: As it was opened, with adapters or without; changed in place.
        policy: The run's.

    Returns:
        What a user should know of it; empty for nothing.

    Raises:
        PrecisionError: The policy keeps weights in a 16-bit format that is not the base's own, so
            that it would round a base which shall stay as it is.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    stored = model.stored_dtype
    if not frozen:
        model.float()
        return ""
    if policy.param_dtype != torch.float32:
        if policy.param_dtype != stored:
            compute = dtype_name(policy.compute_dtype)
            raise PrecisionError(
                f"precision {policy} keeps all weights in {dtype_name(policy.param_dtype)}, and "
                f"would round the frozen base, which is stored in {dtype_name(stored)}; use "
                f"{compute}-mixed, or --lora-r 0 to train all weights"
            )
        return ""
    if stored == torch.float32 or (stored == policy.compute_dtype and not policy.rules):
        return ""
    more = sum(p.numel() * (4 - p.element_size()) for p in frozen)
    model.float()
    form = dtype_name(stored) if stored.itemsize == 2 else "fp64"
    return (
        f"the frozen base is stored in {form} and held in fp32, as precision {policy} does not "
        f"compute in {form} throughout: {max(more, 0) / 1e6:,.0f} MB more"
        + (f"; {form}-mixed keeps it as it is" if form != "fp64" and not policy.rules else "")
    )


def cast_for_use_(model: PretrainedLM, policy: PrecisionPolicy) -> None:
    """Hold and compute as in training, without an optimizer.

    Raises:
        PrecisionError: As :func:`hold_weights_`.
    """
    hold_weights_(model, policy)
    if policy.param_dtype == torch.float32 and policy.casts == "op":
        add_regions_(model, policy)  # a frozen base stays in 16 bits
    else:
        cast_to_policy_(model, policy)
