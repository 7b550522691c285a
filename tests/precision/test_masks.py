"""The mask constant: what may be added, and what softmax makes of it."""

import pytest
import torch

from halfstep import PrecisionError, mask_value

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOW = (torch.float16, torch.bfloat16)


def all_finite(dtype):
    """Every finite number of a 16-bit format, from its bit patterns."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", LOW)
def test_added_twice_it_stays_finite_for_every_score_of_half_the_range(dtype):
    scores = all_finite(dtype)
    scores = scores[scores.double().abs() <= torch.finfo(dtype).max / 2]
    value = torch.tensor(mask_value(dtype), dtype=dtype)
    assert value.item() == mask_value(dtype)
    assert ((scores + value) + value).isfinite().all()
    assert (scores + (value + value)).isfinite().all()


@pytest.mark.parametrize("dtype", LOW)
def test_no_more_negative_power_of_two_would_do(dtype):
    value = torch.tensor(2 * mask_value(dtype), dtype=dtype)
    lowest = torch.tensor(-torch.finfo(dtype).max / 2, dtype=dtype)
    assert ((lowest + value) + value).isinf()


@pytest.mark.parametrize("dtype", FLOATS)
def test_its_softmax_is_exactly_0_next_to_an_ordinary_score(dtype):
    m = mask_value(dtype)
    for masked, seen in ((0.0, 0.0), (8000.0, -8000.0), (-8000.0, 8000.0), (30.0, 0.1)):
        scores = torch.tensor([masked, seen], dtype=dtype)
        for times in (1, 2):
            mask = torch.tensor([m, 0.0], dtype=dtype)
            row = scores
            for _ in range(times):
                row = row + mask
            assert row.softmax(-1).tolist() == [0.0, 1.0]


def test_values():
    assert mask_value(torch.float16) == -65504 / 4
    assert mask_value(torch.float32) == -(2 - 2.0**-23) * 2.0**127 / 4
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(PrecisionError, match="allowed: floating dtypes"):
            mask_value(dtype)
