"""Laws of rounding, for the named formats and for any small format that two widths describe."""

import numpy as np
import torch
from hypothesis import assume, given, settings, strategies as st

from halfstep.formats import FORMATS, FloatFormat
from reference import floats

forms = st.sampled_from(sorted(FORMATS))
numbers = st.floats(allow_nan=False)
# Near the ranges of the narrow formats too, where Hypothesis would seldom look.
near = st.builds(
    lambda m, e: float(np.ldexp(m, e)), st.floats(-2, 2, width=64), st.integers(-30, 18)
)
anything = numbers | near


TABLES = {
    "bf16": floats.BF16,
    "fp16": floats.FP16,
    "e4m3fn": floats.E4M3FN,
    "e5m2": floats.E5M2,
    "e2m1": floats.E2M1,
    "tf32": floats.table(8, 10),
}

OVERFLOW = {"e4m3fn": np.nan, "e2m1": 6.0}


@settings(max_examples=300)
@given(forms, st.lists(anything, min_size=1, max_size=8))
def test_the_named_formats_round_as_their_complete_tables_say(name, some):
    x = np.array([sign * value for value in some for sign in (1, -1)])
    if name == "fp32":
        with np.errstate(over="ignore"):
            expected = x.astype(np.float32).astype(np.float64)
    else:
        expected = floats.nearest(x, TABLES[name], OVERFLOW.get(name, np.inf))
    got = FORMATS[name].round_to(torch.from_numpy(x)).numpy()
    assert np.array_equal(got, expected, equal_nan=True)


@settings(max_examples=200)
@given(forms, anything)
def test_rounding_errs_by_at_most_half_an_ulp(name, x):
    form = FORMATS[name]
    assume(abs(x) <= form.max)
    # nearest: half the gap in which x lies, and no less than that is promised
    rounded = form.round_to(torch.tensor([x], dtype=torch.float64)).item()
    assert abs(rounded - x) <= form.ulp(x) / 2


@settings(max_examples=200)
@given(forms, anything, st.integers(0, 2**32))
def test_stochastic_rounding_gives_one_of_the_two_neighbours(name, x, seed):
    form = FORMATS[name]
    assume(abs(x) <= form.max)
    gap = form.ulp(x)
    down = np.floor(x / gap) * gap  # gaps are powers of two, so both are exact
    generator = torch.Generator().manual_seed(seed)
    values = torch.full((8,), x, dtype=torch.float64)
    got = form.round_to(values, "stochastic", generator).tolist()
    up = down + gap if down != x else x
    beyond = OVERFLOW.get(name, np.inf)
    neighbours = {v if abs(v) <= form.max else beyond * np.sign(v) for v in (down, up)}
    assert set(got) <= neighbours


@st.composite
def small_formats(draw):
    exponent, mantissa = draw(st.integers(2, 6)), draw(st.integers(1, 6))
    finite_only = draw(st.booleans())
    form = FloatFormat("any", exponent, mantissa, None, finite_only)
    return form, floats.table(exponent, mantissa, finite_only)


@settings(max_examples=150)
@given(small_formats(), st.data())
def test_any_small_format_rounds_as_its_own_complete_table_says(pair, data):
    form, values = pair
    overflow = float("nan") if form.finite_only else float("inf")
    assert (form.max, form.min_subnormal) == (values[-1], values[1])
    assert form.min_normal == values[2**form.mantissa_bits]
    borders = floats.midpoints(values)
    x = np.array(
        data.draw(
            st.lists(
                st.sampled_from(borders)
                | st.floats(-1.1 * borders[-1], 1.1 * borders[-1])
                | st.floats(allow_nan=False),
                min_size=1,
                max_size=30,
            )
        )
    )
    with np.errstate(over="ignore"):
        x = np.concatenate([x, np.nextafter(x, 0), -np.nextafter(x, np.inf)])
    expected = floats.nearest(x, values, overflow)
    got = form.round_to(torch.from_numpy(x)).numpy()
    assert np.array_equal(got, expected, equal_nan=True)
