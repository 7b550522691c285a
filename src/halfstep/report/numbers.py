"""What a page shows of the numbers of each layer: what other formats would do, what really ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.diagnostics.statistics.numerics import StepNumerics
from halfstep.diagnostics.statistics.values import Kind, TensorStatistics
from halfstep.diagnostics.statistics.what_if import what_if, window
from halfstep.diagnostics.trace.ran import is_product

FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2")
MOST_OPERATIONS = 40
"""Rows of the table of what ran."""


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """What each of :data:`FORMATS` would make of a tensor: shares flushed and overflowed."""

    kind: Kind
    name: str
    largest: float
    shares: Sequence[tuple[float, float]]
    scales: str
    """The loss scales that fit it in fp16, ``"none"``, or empty where a scale does not act."""


def what_ifs(step: StepNumerics, most: int = 12) -> list[WhatIfRow]:
    """The tensors that these formats would treat worst without a scale, worst first."""
    rows = [
        WhatIfRow(tensor.kind, tensor.name, tensor.absmax, [*_shares(tensor)], _scales(tensor))
        for tensor in step.tensors
        if tensor.kind != "weight" and tensor.nonzero
    ]
    return sorted(rows, key=lambda row: (-row.shares[0][1], -row.shares[0][0]))[:most]


def _shares(tensor: TensorStatistics) -> Iterator[tuple[float, float]]:
    for name in FORMATS:
        found = what_if(tensor, name)
        yield found.flushed, found.overflowed


def _scales(tensor: TensorStatistics) -> str:
    fit = window(tensor) if tensor.kind in ("activation_gradient", "gradient") else None
    if fit is None:
        return ""
    return f"2^{fit.low} … 2^{fit.high}" if fit.fits else "none"


@dataclass(frozen=True, slots=True)
class RanRow:
    """An operation in one combination of formats, over all modules that ran it."""

    direction: str
    op: str
    inputs: str
    outputs: str
    calls: int
    modules: int


def what_ran(trace: Mapping[str, Any], most: int | None = MOST_OPERATIONS) -> list[RanRow]:
    """Operations of a saved trace by direction, name and formats; what is malformed is left out."""
    found: dict[tuple[str, str, str, str], tuple[int, set[str]]] = {}
    given = trace.get("operations")
    for row in given if isinstance(given, list) else []:
        if not isinstance(row, dict) or not isinstance(row.get("calls"), int):
            continue
        forms = [", ".join(_texts(row.get(key))) for key in ("inputs", "outputs")]
        key = (str(row.get("direction")), str(row.get("op")), forms[0], forms[1])
        calls, modules = found.get(key, (0, set()))
        found[key] = calls + row["calls"], modules | {str(row.get("module"))}
    rows = [RanRow(*key, calls, len(modules)) for key, (calls, modules) in found.items()]
    order = ("forward", "backward", "update")
    rows.sort(key=lambda r: order.index(r.direction) if r.direction in order else len(order))
    return rows[:most]


def what_is_stored(trace: Mapping[str, Any]) -> list[tuple[str, str, int, int]]:
    """Kind, dtype, tensors and bytes of what a saved trace says that training keeps."""
    given = trace.get("stored")
    return [
        (str(row.get("kind")), str(row.get("dtype")), row["tensors"], row["bytes"])
        for row in (given if isinstance(given, list) else [])
        if isinstance(row, dict)
        and isinstance(row.get("tensors"), int)
        and isinstance(row.get("bytes"), int)
    ]


def product_bars(trace: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Calls of products by pass and by the dtype of their first operand, for a figure."""
    found: dict[str, dict[str, float]] = {}
    for row in what_ran(trace, most=None):
        if is_product(row.op):
            form = row.inputs.split(", ")[0].split(" ")[-1]
            calls = found.setdefault(row.direction, {})
            calls[form] = calls.get(form, 0) + row.calls
    return found


def stored_bars(trace: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Megabytes stored by kind and dtype, for a figure."""
    found: dict[str, dict[str, float]] = {}
    for kind, dtype, _, size in what_is_stored(trace):
        found.setdefault(kind, {})[dtype] = size / 1e6
    return found


def different(trace: Mapping[str, Any]) -> list[str]:
    """Where what ran differs from the policy, as the trace says it."""
    return _texts(trace.get("differences"))


def _texts(value: Any) -> list[str]:
    """Texts of a list, a run of equal ones once with its length: ``3 bf16``."""
    texts = [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
    runs: list[tuple[str, int]] = []
    for text in texts:
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return [text if n == 1 else f"{n} {text}" for text, n in runs]
