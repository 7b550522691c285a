"""Laws of rounding, for the named formats and for any small format that two widths describe."""

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from halfstep.formats import FloatFormat
from reference import floats


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
