"""Finds buffers that 16 bits have broken.

``model.to(torch.bfloat16)`` casts buffers too. But bf16 distinguishes only 769 of the positions 0
to 4095, a rotary angle computed from a rounded frequency is wrong by many radians at far positions,
and a running mean loses the small updates that it accumulates.
"""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.precision.border import require_model
from halfstep.precision.policy.policy import LOW, dtype_name
from halfstep.precision.scaling.gradients import in_fp64

Kind = Literal["rope", "positions", "running statistics", "mask", "other"]
_SENSITIVE: tuple[Kind, ...] = ("rope", "positions", "running statistics")
_POSITIONS = 4096
"""The number of positions over which the damage to a rotary table is measured."""

_NAMES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "running statistics",
        re.compile(
            r"running_(mean|var|std)|num_batches_tracked|e_score_correction_bias"
            r"|(router|expert|gate)_?bias"
        ),
    ),
    ("rope", re.compile(r"inv_freq|freqs(_cis)?$|rope|rotary|(^|_)(cos|sin)($|_)")),
    ("positions", re.compile(r"position|(^|_)pos($|_ids?)")),
    ("mask", re.compile(r"mask|causal|tril")),
)


def kind_of_buffer(name: str, tensor: Tensor, module: nn.Module) -> Kind:
    """Guess what a buffer is for, from its name, its owner and its values.

    Args:
        name: The buffer's name, qualified or not.
        tensor: The buffer.
        module: The module that owns it.

    Returns:
        ``"rope"``: frequencies, or cosine and sine tables, of rotary embeddings. ``"positions"``:
        position ids and tables of integers. ``"running statistics"``: those of norm layers, and
        the biases that balance a router's experts. ``"mask"``: booleans, or 0 and one large
        negative number, or a triangle of ones. ``"other"``: anything else.
    """
    own = name.rpartition(".")[2].lower()
    for kind, pattern in _NAMES:
        whole = kind != "positions" or not tensor.is_floating_point() or tensor.is_meta
        if pattern.search(own) and (whole or _is_whole(in_fp64(tensor.detach()))):
            return kind
    if tensor.dtype == torch.bool:
        return "mask"
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() < 2:
        return "other"
    if re.search(r"rope|rotary", type(module).__name__.lower()):
        return "rope"
    values = in_fp64(tensor.detach())
    if _is_mask(values):
        return "mask"
    if _is_whole(values):
        return "positions" if _distinct(values) > 2 else "other"
    return "rope" if _is_geometric(values) or _is_wave(values) else "other"


def check_buffers(model: nn.Module) -> None:
    """Refuse a model whose sensitive buffers are already in 16 bits, since what they lost is gone.

    Raises:
        PrecisionError: Naming the buffer, the damage and what to do.
    """
    require_model(model, "check_buffers(model)")
    for name, buffer in model.named_buffers():
        if buffer.dtype not in LOW:
            continue
        kind = kind_of_buffer(name, buffer, model.get_submodule(name.rpartition(".")[0]))
        damage = _damage_done(kind, buffer) if kind in _SENSITIVE else ""
        if damage:
            raise PrecisionError(
                f"buffer {name} ({kind}) is {dtype_name(buffer.dtype)} already, by model.to() or "
                f"as it was loaded: {damage}. Make or load the model in fp32 and let the policy "
                "cast it, which leaves buffers alone"
            )


def _damage_done(kind: Kind, buffer: Tensor) -> str:
    """What 16 bits have done to a buffer, as text; empty if they hold all its integers exactly."""
    if buffer.is_meta:
        return "its values will be rounded"
    eps = torch.finfo(buffer.dtype).eps
    if kind == "positions":
        values, whole = in_fp64(buffer), 2 / eps
        distinct = _distinct(values)
        top = float(values.abs().max()) if values.numel() else 0.0
        fits = _is_whole(values) and (top < whole or (top == whole and distinct == values.numel()))
        return "" if fits else f"{distinct} of {values.numel()} positions distinct"
    if kind == "running statistics":
        return f"updates of less than {eps / 4:g} of a value round to nothing"
    if buffer.dim() == 1:
        inexact = torch.where(buffer == 1, 0.0, in_fp64(buffer))  # the first frequency, 1, is exact
        half_ulp = in_fp64(torch.frexp(inexact).exponent).sub(1).exp2() * eps / 2
        worst = float(torch.where(inexact != 0, half_ulp, 0.0).max()) * _POSITIONS
        return f"at position {_POSITIONS} an angle may be off by {worst:.2g} rad"
    rows = buffer.reshape(-1, buffer.shape[-1])
    distinct = torch.unique(rows.float(), dim=0).shape[0]
    return f"{distinct} of {rows.shape[0]} positions distinct, each number off by up to {eps / 4:g}"


def _distinct(values: Tensor) -> int:
    return int(torch.unique(values).numel())


def _is_whole(values: Tensor) -> bool:
    return bool((values == values.round()).all())


def _is_mask(values: Tensor) -> bool:
    """Whether it holds 0 and one large negative number (-1e4 or below), or a triangle of ones."""
    if float(values.max()) == 0 and float(values.min()) <= -1e4:
        return _distinct(values) == 2
    if values.dim() < 2 or values.shape[-1] < 2 or values.shape[-1] != values.shape[-2]:
        return False
    return bool((values == torch.ones_like(values).tril()).all())


def _is_geometric(values: Tensor) -> bool:
    """Whether it is 1, r, r^2, ... with r < 1, as rotary frequencies (Su et al. 2021, eq. 15)."""
    if values.dim() != 1 or values.numel() < 3 or float(values[0]) != 1 or float(values.min()) <= 0:
        return False
    ratios = values[1:] / values[:-1]
    # values may already have been rounded to bf16, which has 8 significant bits
    return float(ratios[0]) < 1 and bool(((ratios / ratios[0] - 1).abs() < 2.0**-7).all())


def _is_wave(values: Tensor) -> bool:
    """Whether columns are cos(p w) or sin(p w), where x[p+1] = 2 cos(w) x[p] - x[p-1]."""
    table = values.reshape(-1, values.shape[-1])
    if values.dim() < 2 or table.shape[0] < 4 or float(table.abs().max()) > 1:
        return False
    first = table[0]
    if not bool(((first == 0) | (first == 1)).all()):
        return False
    cosine = torch.where(first == 1, table[1], (1 - table[1].square()).sqrt())
    rest = table[2:] - (2 * cosine * table[1:-1] - table[:-2])
    # the rounding error of three values of at least 8 bits, one of them times 2 cos(w)
    return bool((rest.abs() < 2.0**-6).all())
