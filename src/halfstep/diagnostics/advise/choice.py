"""Chooses the cheapest formats of a model's layers whose errors stay below a limit together.

Errors of products add up, as those of independent roundings do, and so do times: a knapsack with
several choices for each item. It is solved exactly, by keeping of all partial choices those that no
other beats in both time and error.

The time of a product is its floating-point operations over the rate of its format. Rates of the
table are peaks, relative to bf16: converting operands is not counted, and neither is anything that
is no linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfstep.diagnostics.advise.layers import Formats
from halfstep.diagnostics.advise.sensitivity import Sensitivity
from halfstep.errors import PrecisionError

Choice = dict[tuple[str, str], str]
"""From a layer's name and a product's to its format."""
_HOPPER = {"fp32": 0.068, "bf16": 1.0, "fp16": 1.0, "fp8": 2.0, "fp8-block": 2.0}
_MX = {"mxfp8": 2.0, "mxfp8-e5m2": 2.0}
_NVFP4 = dict.fromkeys(("nvfp4", "nvfp4-nearest", "nvfp4-unmixed"), 4.0)
RATES: Mapping[str, Mapping[str, float]] = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": {**_HOPPER, "fp32": 0.033, **_MX, **_NVFP4},
}
"""Peak rates of dense products by device and format, relative to bf16.

**Source:** NVIDIA's specifications, halved where they count sparse products:
https://www.nvidia.com/en-us/data-center/h100/ and /h200/ (SXM: 989 TFLOP/s in bf16, 1,979 in fp8,
67 in fp32), https://www.nvidia.com/en-us/data-center/hgx/ (B200: 2,250 in bf16, 4,500 in fp8, 9,000
in fp4, 75 in fp32). That MXFP8 runs at the rate of fp8 and NVFP4 at twice that one:
https://github.com/NVIDIA/cutlass/blob/main/media/docs/cpp/blackwell_functionality.md. No source
counts the promotion of partial sums of ``fp8-block``, which is taken as free.
"""
_KEPT_STATES = 4096
"""How many partial choices are kept; beyond, errors are rounded up to that share of the limit."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run an item: its format, time (operations over their rate) and error."""

    format: str
    time: float
    error: float


_State = tuple[float, float, int, Option | None]
"""Time and error so far, which state before it grew from, and by which option."""


def rates_of(rates: str | Mapping[str, float], formats: Sequence[str]) -> dict[str, float]:
    """The rates of some formats, in a unit of their own.

    Args:
        rates: A device of the table, or measured rates by format.
        formats: Whose rates.

    Raises:
        PrecisionError: If the device is not in the table, or a format has no rate above 0.
    """
    if isinstance(rates, str) and rates not in RATES:
        raise PrecisionError(
            f"rates {rates!r}; allowed: {', '.join(RATES)}, or measured ones, such as "
            '{"bf16": 700, "mxfp8": 1200}'
        )
    known = RATES[rates] if isinstance(rates, str) else rates
    lacking = [form for form in formats if form not in known]
    if lacking:
        where = f"{rates} does not multiply them" if isinstance(rates, str) else "none is given"
        raise PrecisionError(
            f"formats {', '.join(lacking)} have no rate: {where}; allowed: {', '.join(known)}"
        )
    for form in formats:
        if not (isinstance(known[form], (int, float)) and 0 < known[form] < math.inf):
            raise PrecisionError(f"rate {known[form]!r} of {form}; allowed: a number above 0")
    return {form: float(known[form]) for form in formats}


def cheapest(items: Sequence[Sequence[Option]], limit: float) -> list[Option] | None:
    """The choice of one option for each item that takes least time with errors up to a limit.

    Args:
        items: For each item, what may be chosen.
        limit: What the chosen errors may add up to; infinity: anything finite.

    Returns:
        One option for each item, or None where no choice stays below the limit. Of equal times, the
        one with less error.
    """
    states: list[_State] = [(0.0, 0.0, -1, None)]
    columns = [states]
    unit = limit / _KEPT_STATES if 0 < limit < math.inf else 0.0
    for options in items:
        grown: list[_State] = [
            (time + option.time, error + option.error, number, option)
            for number, (time, error, _, _) in enumerate(states)
            for option in options
            if option.error < math.inf and error + option.error <= limit
        ]
        states = _unbeaten(grown)
        if unit and len(states) > _KEPT_STATES:
            states = _unbeaten([(t, math.ceil(e / unit) * unit, n, o) for t, e, n, o in states])
        if not states:
            return None
        columns.append(states)
    at, chosen = 0, []  # the first state takes least time
    for column in reversed(columns[1:]):
        _, _, before, option = column[at]
        assert option is not None
        chosen.append(option)
        at = before
    return chosen[::-1]


def _unbeaten(states: list[_State]) -> list[_State]:
    """The states that no other beats in time and error, the quickest first."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


class Chooser:
    """The knapsack of a model's layers; fp16 and fp32 are chosen for whole layers.

    Args:
        found: The error of each layer, product and format.
        rates: By format, the reference first.
    """

    def __init__(self, found: Sequence[Sensitivity], rates: Mapping[str, float]) -> None:
        self._rows: dict[tuple[str, str], dict[str, Sensitivity]] = {}
        for row in found:
            self._rows.setdefault((row.layer, row.product), {})[row.format] = row
        self.rates, self.reference = rates, next(iter(rates))
        self._items: dict[str, list[tuple[str, str]]] = {}
        for key in self._rows:
            together = key[0] if self.reference == "fp32" else "/".join(key)
            self._items.setdefault(together, []).append(key)

    def choose(self, limit: float) -> Choice:
        """The cheapest formats up to an error; the reference where nothing else is below it."""
        options = [
            [
                Option(
                    form,
                    sum(self._rows[key][form].flops for key in keys) / rate,
                    sum(self._rows[key][form].error for key in keys),
                )
                for form, rate in self.rates.items()
                if all(form in self._rows[key] for key in keys)
            ]
            for keys in self._items.values()
        ]
        picked = cheapest(options, limit)
        assert picked is not None  # the reference has no error
        pairs = zip(self._items.values(), picked, strict=True)
        return {key: option.format for keys, option in pairs for key in keys}

    def error(self, choice: Formats) -> float:
        """What the gradient errors of a choice add up to."""
        return sum(self._rows[key][form].error for key, form in choice.items())

    def by_error(self, choice: Formats) -> list[str]:
        """The layers, beginning with the one that makes least error."""
        errors: dict[str, float] = {}
        for (layer, product), form in choice.items():
            error = self._rows[layer, product][form].error
            errors[layer] = errors.get(layer, 0.0) + error
        return sorted(errors, key=errors.__getitem__)

    def saved(self, choice: Formats) -> float:
        """The share of the reference's time that is saved."""
        flops = {key: rows[self.reference].flops for key, rows in self._rows.items()}
        took = sum(flops[key] / self.rates[form] for key, form in choice.items())
        return 1 - took * self.rates[self.reference] / sum(flops.values())
