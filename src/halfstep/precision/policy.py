"""The precision policy: which number format each part of training uses, as one frozen value.

A policy is written as a name (``bf16-mixed``), as a string of fields
(``params=bf16,compute=bf16,master=fp32``) or as a TOML file (a base policy and what differs). All
three give the same value, and ``str(policy)`` gives the canonical spelling back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from halfstep.errors import PrecisionError
from halfstep.precision.loss_scale import LOSS_SCALE_FIELDS, Kind, LossScaleConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``"bf16"`` for ``torch.bfloat16``."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Which format each part of training uses; a combination that cannot be run is refused."""

    param_dtype: torch.dtype = torch.float32
    """What the module stores between steps. (FSDP2 uses this word for ``compute_dtype``.)"""
    compute_dtype: torch.dtype = torch.float32
    """Operands of matrix products and attention, forward and backward. Where it differs from
    ``param_dtype``, operations are cast one by one (autocast)."""
    output_dtype: torch.dtype = torch.float32
    """Logits handed to the loss. Always fp32: the loss is an fp32 island."""
    grad_dtype: torch.dtype = torch.float32
    """The buffer in which gradients of several micro-batches are added up."""
    reduce_dtype: torch.dtype = torch.float32
    """Gradients on the wire between data-parallel ranks; unused on one device."""
    master_dtype: torch.dtype = torch.float32
    """What the optimizer updates. Equal to ``param_dtype`` means no second copy."""
    tf32: bool = False
    """Whether fp32 matrix products may round their operands to tf32 (10 mantissa bits)."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """How the loss is scaled."""

    def __post_init__(self) -> None:
        """Raise PrecisionError for a combination that no code path can honour."""
        for name in ("param", "compute", "output", "grad", "reduce", "master"):
            dtype = getattr(self, f"{name}_dtype")
            if dtype not in DTYPES.values():
                raise PrecisionError(f"{name}={dtype_name(dtype)}; allowed: {', '.join(DTYPES)}")
        p, c, m = self.param_dtype, self.compute_dtype, self.master_dtype
        low = p != torch.float32
        if low and c != p:
            raise PrecisionError(
                f"params={dtype_name(p)} with compute={dtype_name(c)}: 16-bit weights compute in "
                f"their own format; use compute={dtype_name(p)}, or params=fp32"
            )
        if m not in (torch.float32, p):
            raise PrecisionError(
                f"params={dtype_name(p)} with master={dtype_name(m)}: the master is fp32 or the "
                "weights themselves"
            )
        grad = p if m != torch.float32 else torch.float32
        if self.grad_dtype != grad:
            raise PrecisionError(
                f"grad={dtype_name(self.grad_dtype)} with master={dtype_name(m)}: gradients add up "
                f"in the format the optimizer updates; use grad={dtype_name(grad)}"
            )
        if self.output_dtype != torch.float32:
            raise PrecisionError(
                f"output={dtype_name(self.output_dtype)}: the loss is always computed in fp32; "
                "use output=fp32"
            )
        if self.tf32 and (low or c != torch.float32):
            raise PrecisionError(
                "compute=tf32 rounds the operands of fp32 matrix products; it needs params=fp32"
            )

    @property
    def name(self) -> str:
        """The preset's name, or the canonical field string where no preset is equal."""
        return next((name for name, policy in POLICIES.items() if policy == self), _spell(self))

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of 16-bit weights."""
        return self.param_dtype != self.master_dtype

    @property
    def is_pure(self) -> bool:
        """Whether weights are 16 bit with no fp32 copy, so that small updates round to nothing."""
        return self.master_dtype != torch.float32

    @property
    def casts_per_op(self) -> bool:
        """Whether fp32 weights are cast to the compute dtype operation by operation (autocast)."""
        return self.compute_dtype != self.param_dtype

    def __str__(self) -> str:
        return self.name


def _master(dtype: torch.dtype, kind: Kind) -> PrecisionPolicy:
    return PrecisionPolicy(
        param_dtype=dtype, compute_dtype=dtype, loss_scale=LossScaleConfig(kind=kind)
    )


def _pure(dtype: torch.dtype, kind: Kind) -> PrecisionPolicy:
    return PrecisionPolicy(
        param_dtype=dtype,
        compute_dtype=dtype,
        grad_dtype=dtype,
        reduce_dtype=dtype,
        master_dtype=dtype,
        loss_scale=LossScaleConfig(kind=kind),
    )


POLICIES: dict[str, PrecisionPolicy] = {
    "fp32": PrecisionPolicy(),
    "tf32": PrecisionPolicy(tf32=True),
    "bf16-mixed": PrecisionPolicy(compute_dtype=torch.bfloat16),
    "fp16-mixed": PrecisionPolicy(
        compute_dtype=torch.float16, loss_scale=LossScaleConfig(kind="dynamic")
    ),
    "bf16-master": _master(torch.bfloat16, "none"),
    "fp16-master": _master(torch.float16, "dynamic"),
    "bf16-pure": _pure(torch.bfloat16, "none"),
    "fp16-pure": _pure(torch.float16, "dynamic"),
}
ALIASES = {
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "bf16": "bf16-mixed",
    "amp_bf16": "bf16-mixed",
    "fp16": "fp16-mixed",
    "16-mixed": "fp16-mixed",
    "amp": "fp16-mixed",
    "amp_fp16": "fp16-mixed",
    "bf16-true": "bf16-pure",
    "16-true": "fp16-pure",
}
POLICY_FIELDS = {
    "params": "param_dtype",
    "compute": "compute_dtype",
    "output": "output_dtype",
    "grad": "grad_dtype",
    "reduce": "reduce_dtype",
    "master": "master_dtype",
}


def _spell(policy: PrecisionPolicy) -> str:
    parts = [f"{key}={dtype_name(getattr(policy, name))}" for key, name in POLICY_FIELDS.items()]
    if policy.tf32:
        parts[1] = "compute=tf32"
    default = LossScaleConfig(kind=policy.loss_scale.kind)
    parts.append(f"scale={policy.loss_scale.kind}")
    for key in LOSS_SCALE_FIELDS:
        value = getattr(policy.loss_scale, key)
        if value != getattr(default, key):
            parts.append(f"{key}={value!r}")
    return ",".join(parts)
