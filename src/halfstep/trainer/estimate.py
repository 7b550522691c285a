"""Estimates the memory of training, of a number of parameters alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch
from torch import nn

from halfstep.diagnostics.estimate import estimate_state
from halfstep.diagnostics.memory import Memory
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.recipe import Recipe

_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}
"""Letter of a unit to its power of 1000."""


def estimate_count(
    count: int,
    policies: Sequence[PrecisionPolicy],
    layout: Layout,
) -> list[Memory]:
    """Count what training keeps for that many parameters, under each policy, without a batch.

    All count as hidden matrices, of shapes that are not known.
    """
    with torch.device("meta"):
        model = nn.Linear(count, 1, bias=False)
    ranks, found = layout.shard * layout.tensor, []
    for policy in policies:
        # a recipe changes nothing that is kept between steps, and needs layers of a known shape
        stored = dataclasses.replace(policy, recipe=Recipe())
        parts = dict(estimate_state(model, stored, ranks).bytes)
        low = policy.compute_dtype
        if low != policy.param_dtype and policy.casts != "module":  # whole where sharded
            parts["cast copies"] = {dtype_name(low): round(count * low.itemsize / layout.tensor)}
        found.append(Memory(str(policy), False, parts, layout.size))
    return found


def read_count(text: str, option: str) -> int:
    """Read a number with a unit: ``1.3B``, ``124M``, ``24GiB``; one of a million needs none.

    Raises:
        ConfigError: Naming the option.
    """
    found = re.fullmatch(r"([\d._]+(?:e\+?\d+)?)\s*([kmgbt]?)(i?)b?", text.strip().lower())
    try:
        number, unit, binary = found.groups() if found else ("", "", "")
        count = float(number) * (1024.0 if binary else 1000.0) ** _POWERS[unit]
    except ValueError:
        count = 0.0
    if not (1 if unit else 10**6) <= count < 2**60:
        example = "24GB" if option == "--memory" else "1.3B"
        raise ConfigError(f"{option} {text!r}; allowed: a number with its unit, such as {example}")
    return round(count)
