"""What a page shows of the numbers of each layer: what other formats would do, what really ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from halfstep.diagnostics.statistics.exponent_map import SHOWN
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
        if tensor.kind in SHOWN and tensor.nonzero
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
class LowBitTable:
    """What recipes below 16 bits would change of the products of a watched step.

    Attributes:
        heads: The recipe and the product of each column.
        median: Of each column over all layers, as text.
        layers: How many were measured.
        rows: The layers with the largest errors, worst first: name and texts.
    """

    heads: Sequence[tuple[str, str]]
    median: Sequence[str]
    layers: int
    rows: Sequence[tuple[str, Sequence[str]]]


def low_bit(step: StepNumerics, most: int = 12) -> LowBitTable | None:
    """The table of a step; None where the watch was asked for no recipe."""
    found = {(one.layer, one.recipe, one.product): one for one in step.products}
    recipes = dict.fromkeys(one.recipe for one in step.products)
    products = dict.fromkeys(one.product for one in step.products)  # fprop comes first in a step
    heads = [(recipe, product) for recipe in recipes for product in products]
    worst: dict[str, float] = {}
    for (layer, _, _), one in found.items():
        worst[layer] = max(worst.get(layer, 0.0), one.error)
    if not worst:
        return None
    middle = []
    for recipe, product in heads:
        some = [one for (_, r, p), one in found.items() if (r, p) == (recipe, product)]
        biases, spreads = [one.bias for one in some], [one.spread for one in some]
        middle.append(error_text(median(biases), median(spreads)) if some else "-")
    rows = []
    for layer in sorted(worst, key=worst.__getitem__, reverse=True)[:most]:
        those = [found.get((layer, *head)) for head in heads]
        rows.append((layer, [error_text(one.bias, one.spread) if one else "-" for one in those]))
    return LowBitTable(heads, middle, len(worst), rows)


def error_text(bias: float, spread: float) -> str:
    """A relative error in per cent, with its spread where it has some."""
    return f"{bias:.1%}" + (f" ± {spread:.1%}" if spread else "")


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
