"""The lab's experiment ``formats`` against tables of every number of a format."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.figures import made, require_figures
from reference import floats

TABLES = {
    "bf16": (8, 7, floats.BF16, math.inf),
    "fp16": (5, 10, floats.FP16, math.inf),
    "e4m3fn": (4, 3, floats.E4M3FN, math.nan),
    "e5m2": (5, 2, floats.E5M2, math.inf),
    "e2m1": (2, 1, floats.E2M1, 6.0),
}


@pytest.mark.parametrize(("value", "at"), [(0.1, 1.0), (70000.0, 1000.0), (3e-6, 0.3)])
def test_bits_ranges_and_number_lines_are_those_of_the_tables(value, at, tmp_path):
    one = made("formats", value=value, at=at)
    for name, (exponent_bits, mantissa_bits, table, beyond) in TABLES.items():
        form = one.data["formats"][name]
        assert (form["exponent_bits"], form["mantissa_bits"]) == (exponent_bits, mantissa_bits)
        assert len(form["bits"]) == 1 + exponent_bits + mantissa_bits
        (nearest,) = floats.nearest(np.array([value]), table, beyond)
        if math.isfinite(nearest):
            assert form["nearest"] == nearest
            pattern = int(form["bits"], 2)
            assert floats.decode(pattern, exponent_bits, mantissa_bits) == nearest
        else:
            assert form["nearest"] == str(nearest)
        assert (form["least"], form["largest"]) == (table[1], table[-1])
        inside = table[(at <= table) & (table <= at * one.data["span"])]
        assert form["numbers"] == inside.tolist()
        assert (form["gap"] is None) == (table[-1] < at)
    require_figures(one, tmp_path)


def test_the_verdict_tells_bf16_from_fp16():
    said = made("formats").verdict("en")
    for part in ("3.39e+38", "128 numbers", "65504", "1024", "0.10009766", "0.099975586"):
        assert part in said
    assert "fp16 inf" in made("formats", value=70000).verdict("en")
