"""Checkpoints of version 0.2: one manifest for all ranks, and 8-bit moments as their codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.optim.state import in_dtype, tops_of

FORMAT = 2


def as_index(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Spell a manifest as the index of one rank that wrote everything."""
    files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    weights, optimizer = (
        {name: _spelled(entry) for name, entry in manifest[section].items()}
        for section in ("weights", "optimizer")
    )
    return {"files": files, "weights": weights, "optimizer": optimizer}


def _spelled(entry: Mapping[str, Any]) -> dict[str, Any]:
    parts = [
        [e["file"], e["offset"], e["shape"], *([e["order"]] if "order" in e else [])]
        for e in entry["pieces"]
    ]
    coded = any("order" in e for e in entry["pieces"])
    return {"shape": entry["shape"], "dtype": "F32" if coded else entry["dtype"], "parts": parts}


def decoded(tensors: Mapping[str, Tensor], name: str, order: tuple[int, ...]) -> Tensor:
    """The fp32 values of a part of an 8-bit moment, whose codes are stored in memory order."""
    key = name.rpartition("/")[2]
    codes = tensors[name].permute([order.index(dim) for dim in range(len(order))])
    return in_dtype({key: codes, tops_of(key): tensors[tops_of(name)]}, torch.float32)[key]
