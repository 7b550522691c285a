"""The precision policy: which number format each part of training uses, as one frozen value.

A policy is written as a name (``bf16-mixed``) or as a string of fields
(``params=bf16,compute=bf16,master=fp32``). Both give the same value, and ``str(policy)`` gives its
canonical spelling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from halfstep.errors import PrecisionError
from halfstep.precision.masters.rounding import ROUNDING, Update
from halfstep.precision.policy.recipe import Recipe, Scheme, is_recipe, parse_recipe
from halfstep.precision.scaling.loss_scale import LOSS_SCALE_FIELDS, LossScaleConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOW = (torch.bfloat16, torch.float16)
"""The 16-bit dtypes."""
Casts = Literal["op", "module"]
Moments = Literal["master", "fp32", "bf16", "8bit"]
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``"bf16"`` for ``torch.bfloat16``."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Which format each part of training uses; a combination that cannot be run is refused."""

    param_dtype: torch.dtype = torch.float32
    """The dtype of weights between steps. (FSDP2 uses this name for ``compute_dtype``.)"""
    compute_dtype: torch.dtype = torch.float32
    """The dtype of operands of matrix products and attention, forward and backward. Where it
    differs from ``param_dtype``, operands are cast operation by operation (autocast)."""
    output_dtype: torch.dtype = torch.float32
    """The dtype of logits passed to the loss. Always fp32, since the loss is computed in fp32."""
    grad_dtype: torch.dtype = torch.float32
    """The dtype in which gradients of several micro-batches are accumulated."""
    reduce_dtype: torch.dtype = torch.float32
    """The dtype of gradients sent between data-parallel ranks; unused on one device."""
    master_dtype: torch.dtype = torch.float32
    """The dtype that the optimizer updates. Equal to ``param_dtype`` means no second copy."""
    update: Update = "nearest"
    """How an update reaches a 16-bit weight without a second fp32 copy: an entry of ``ROUNDING`` in
    ``rounding.py``. ``"nearest"`` rounds the weight from an fp32 copy if ``master_dtype`` is fp32;
    otherwise small updates are lost."""
    moments: Moments = "master"
    """The format of the optimizer's moments: ``"master"`` (``master_dtype``), ``"fp32"``,
    ``"bf16"`` or ``"8bit"``."""
    casts: Casts = "op"
    """Where fp32 weights are cast for computing: ``"op"``, at every operation (autocast), or
    ``"module"``, when FSDP2 gathers them: cheaper, but residual streams are 16-bit too."""
    tf32: bool = False
    """Whether fp32 matrix products may round their operands to tf32 (10 mantissa bits)."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """How the loss is scaled."""
    rules: tuple[tuple[str, str], ...] = ()
    """Modules with another format, as pairs of a glob over module names (or ``type:`` and a glob
    over class names) and ``"fp32"``, the compute format or a recipe. See ``rules.py``."""
    recipe: Recipe = field(default_factory=Recipe)
    """The formats below 16 bits of linear layers' products. See ``recipe.py``."""
    simulate: bool = False
    """Whether a recipe may be simulated by bf16 products where the device lacks its formats."""

    def __post_init__(self) -> None:
        self._check_values()
        p, c, m = map(dtype_name, (self.param_dtype, self.compute_dtype, self.master_dtype))
        if self.moments == m:
            object.__setattr__(self, "moments", "master")
        object.__setattr__(self, "rules", tuple((str(glob), str(f)) for glob, f in self.rules))
        low, grad = p != "fp32", p if self.is_pure else "fp32"
        kept = dtype_name(ROUNDING[self.update].master_dtype)
        checks = (
            (
                low and c != p,
                f"params={p} with compute={c}: 16-bit weights compute in their own format; use "
                f"compute={p}, or params=fp32",
            ),
            (
                m not in ("fp32", p),
                f"params={p} with master={m}: the master is fp32 or the weights themselves",
            ),
            (
                self.update != "nearest" and (p != "bf16" or m != kept),
                f"update={self.update} with params={p}, master={m}: use params=bf16,master={kept},"
                f"update={self.update}; for fp16 weights use fp16-master",
            ),
            (
                self.casts == "module" and (low or c != "bf16" or bool(self.rules)),
                f"casts=module with params={p}, compute={c}{' and rules' if self.rules else ''}: "
                "allowed: params=fp32,compute=bf16 without rules, as bf16-module",
            ),
            (
                dtype_name(self.grad_dtype) != grad,
                f"grad={dtype_name(self.grad_dtype)} with master={m}: gradients add up in the "
                f"format the optimizer updates; use grad={grad}",
            ),
            (
                self.output_dtype != torch.float32,
                f"output={dtype_name(self.output_dtype)}: the loss is always computed in fp32",
            ),
            (
                self.tf32 and (low or c != "fp32"),
                "compute=tf32 rounds the operands of fp32 matrix products; it needs params=fp32",
            ),
        )
        for wrong, why in checks:
            if wrong:
                raise PrecisionError(why)
        self._check_rules(c)

    def _check_rules(self, compute: str) -> None:
        """Refuse a rule that cannot be honoured, or that a field string cannot express."""
        if self.rules and self.tf32:
            raise PrecisionError(
                f"rule {self.rules[0][0]!r} with compute=tf32: torch rounds to tf32 for the whole "
                "process, not by module; use compute=bf16 with rules, or fp32 throughout"
            )
        for pattern, form in self.rules:
            if form not in ("fp32", compute) and not (compute == "bf16" and is_recipe(form)):
                allowed = ", ".join(dict.fromkeys(("fp32", compute)))
                more = ", or a recipe such as mxfp8" if compute == "bf16" else ""
                raise PrecisionError(f"rule {pattern!r} -> {form}; allowed: {allowed}{more}")
            glob = pattern.removeprefix("type:")
            if not glob or re.search(r"[|,=:\"'\s]", glob):
                raise PrecisionError(
                    f"rule {pattern!r}; allowed: a glob over module names such as '*.norm*', or "
                    "'type:' and a glob over class names, without any of | , = : and blanks"
                )
        if self.recipes() and (compute != "bf16" or self.casts == "module"):
            raise PrecisionError(
                f"recipe={self.recipes()[0]} with compute={compute}, casts={self.casts}: formats "
                "below 16 bits stand on bf16 products; use compute=bf16, as bf16-mixed or "
                "bf16-split"
            )

    def _check_values(self) -> None:
        """Refuse values that are invalid for their field, whatever the other fields are."""
        for field_ in POLICY_FIELDS.values():
            dtype = getattr(self, field_)
            if dtype not in DTYPES.values():
                named = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
                raise PrecisionError(
                    f"{field_.removesuffix('_dtype')}={named}; allowed: {', '.join(DTYPES)}, here "
                    "as a torch.dtype"
                )
        if not isinstance(self.loss_scale, LossScaleConfig):
            raise PrecisionError(
                f"loss_scale={self.loss_scale!r}; allowed: a halfstep.LossScaleConfig"
            )
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise PrecisionError(f"{key}={getattr(self, key)}; allowed: {', '.join(allowed)}")

    def recipes(self) -> list[Recipe]:
        """Every recipe below 16 bits that the policy or a rule names."""
        named = [parse_recipe(form) for _, form in self.rules if is_recipe(form)]
        return [recipe for recipe in (self.recipe, *named) if recipe.schemes()]

    def schemes(self) -> list[Scheme]:
        """Every scheme of its recipes, once."""
        return list(dict.fromkeys(s for recipe in self.recipes() for s in recipe.schemes()))

    @property
    def name(self) -> str:
        """The preset's name with what may change of it; else all fields."""
        named = {n: p for n, p in RECIPES.items() if p.recipe == self.recipe} | POLICIES
        for name, preset in named.items():
            if all(getattr(self, f) == getattr(preset, f) for f in _FIXED):
                return ",".join([name, *_changed(self, preset)])
        return _spell(self)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of 16-bit weights."""
        return self.param_dtype != self.master_dtype and self.update == "nearest"

    @property
    def keeps_more_than_weights(self) -> bool:
        """Whether the trained values are finer than the model's weights (masters, remainders)."""
        return self.has_masters or ROUNDING[self.update].remainder_dtype is not None

    @property
    def needs_own_optimizer(self) -> bool:
        """Whether only halfstep's optimizers can store weights and moments as this policy says."""
        return self.update != "nearest" or self.moments != "master"

    @property
    def moment_format(self) -> str:
        """The name of the moments' format, with ``"master"`` resolved."""
        return dtype_name(self.master_dtype) if self.moments == "master" else self.moments

    @property
    def is_pure(self) -> bool:
        """Whether 16-bit weights have no fp32 copy, so that small updates round to nothing."""
        return self.master_dtype != torch.float32 and self.update == "nearest"

    @property
    def casts_per_op(self) -> bool:
        """Whether fp32 weights are cast to the compute dtype operation by operation (autocast)."""
        return self.compute_dtype != self.param_dtype and self.casts == "op"

    def __str__(self) -> str:
        return self.name


_TYPES = get_type_hints(PrecisionPolicy)
_FIXED = {*_TYPES} - {"reduce_dtype", "moments", "loss_scale", "rules", "recipe", "simulate"}
"""The fields in which a policy with a preset's name does not differ from it."""
POLICY_FIELDS = {
    "params" if name == "param_dtype" else name.removesuffix("_dtype"): name
    for name, kind in _TYPES.items()
    if kind is torch.dtype
}
"""Maps a field string's key to the field's name, for fields that hold a dtype."""
CHOICES = {name: get_args(kind) for name, kind in _TYPES.items() if get_origin(kind) is Literal}
"""Maps a field's name, which is also its key, to its allowed values, for ``Literal`` fields."""


def _low(
    dtype: torch.dtype, master: torch.dtype = torch.float32, update: Update = "nearest"
) -> PrecisionPolicy:
    """A policy with 16-bit weights, whose masters or rounding mode preserve small updates."""
    added = master if update == "nearest" else torch.float32
    return PrecisionPolicy(
        param_dtype=dtype,
        compute_dtype=dtype,
        grad_dtype=added,
        reduce_dtype=added,
        master_dtype=master,
        update=update,
        loss_scale=_SCALED if dtype == torch.float16 else LossScaleConfig(),
    )


_SCALED = LossScaleConfig(kind="dynamic")


POLICIES: dict[str, PrecisionPolicy] = {
    "fp32": PrecisionPolicy(),
    "tf32": PrecisionPolicy(tf32=True),
    "bf16-mixed": PrecisionPolicy(compute_dtype=torch.bfloat16),
    "bf16-module": PrecisionPolicy(compute_dtype=torch.bfloat16, casts="module"),
    "fp16-mixed": PrecisionPolicy(compute_dtype=torch.float16, loss_scale=_SCALED),
    "bf16-master": _low(torch.bfloat16),
    "fp16-master": _low(torch.float16),
    **{
        m.policy: _low(torch.bfloat16, m.master_dtype, m.name)
        for m in ROUNDING.values()
        if m.policy
    },
    "bf16-pure": _low(torch.bfloat16, torch.bfloat16),
    "fp16-pure": _low(torch.float16, torch.float16),
}
RECIPES: dict[str, PrecisionPolicy] = {
    name: PrecisionPolicy(compute_dtype=torch.bfloat16, recipe=parse_recipe(name))
    for name in ("fp8", "fp8-block", "mxfp8", "nvfp4")
}
"""The policies below 16 bits: ``bf16-mixed`` with a recipe for linear layers."""
ALIASES = {
    "no": "fp32",
    **dict.fromkeys(("bf16", "bfloat16"), "bf16-mixed"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16-mixed"),
}
"""Other names of policies, as people type them."""


def _spell(policy: PrecisionPolicy) -> str:
    """A policy as a field string, with every dtype, and other fields if they are not default."""
    return ",".join(_changed(policy, PrecisionPolicy(), (*POLICY_FIELDS, "scale")))


def _changed(
    policy: PrecisionPolicy, preset: PrecisionPolicy, always: tuple[str, ...] = ()
) -> list[str]:
    """The fields in which a policy differs from another one, as a field string has them."""
    own, known = _texts(policy), _texts(preset)
    return [f"{key}={own[key]}" for key in own if key in always or own[key] != known.get(key)]


def _texts(policy: PrecisionPolicy) -> dict[str, str]:
    """Every field of a policy, by its key in a field string."""
    dtypes = {key: dtype_name(getattr(policy, name)) for key, name in POLICY_FIELDS.items()}
    dtypes |= {"compute": "tf32"} if policy.tf32 else {}
    scale = {key: getattr(policy.loss_scale, key) for key in LOSS_SCALE_FIELDS}
    keys, globs = {form for _, form in policy.rules}, [glob for glob, _ in policy.rules]
    rules = {"rules": "|".join(":".join(rule) for rule in policy.rules)} if keys else {}
    if keys in ({"fp32"}, {"bf16"}):
        rules = {f"keep_{keys.pop()}": "|".join(globs)}
    return {
        **dtypes,
        **{key: getattr(policy, key) for key in CHOICES},
        "scale": policy.loss_scale.kind,
        **{key: repr(value).removesuffix(".0") for key, value in scale.items()},
        "recipe": str(policy.recipe),
        "simulate": "yes" if policy.simulate else "no",
        **rules,
    }
