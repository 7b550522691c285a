"""Mask constants: what may be added, what softmax makes of it, and what is refused."""

import math
import re

import pytest
import torch

from halfstep import PrecisionError, check_mask, mask_value

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


@pytest.mark.parametrize("dtype", FLOATS)
def test_it_passes_the_check_alone_and_doubled(dtype):
    mask = torch.zeros(4, 4, dtype=dtype).masked_fill(
        torch.ones(4, 4).triu(1) > 0, mask_value(dtype)
    )
    check_mask(mask)
    check_mask(mask + mask)
    check_mask(mask_value(dtype), dtype=dtype)


def test_values():
    assert mask_value(torch.float16) == -65504 / 4
    assert mask_value(torch.float32) == -(2 - 2.0**-23) * 2.0**127 / 4
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(PrecisionError, match="allowed: floating dtypes"):
            mask_value(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finfo_min_doubled_is_flagged(dtype):
    # users.md, acceptance test L
    lowest = torch.finfo(dtype).min
    mask = torch.tensor([[0.0, lowest], [0.0, 0.0]], dtype=dtype)
    assert (mask + mask)[0, 1] == -math.inf
    with pytest.raises(PrecisionError, match=r"finfo\.min doubled.*mask_value\(torch\."):
        check_mask(mask)
    with pytest.raises(PrecisionError, match="finfo.min doubled"):  # noqa: RUF043
        check_mask(lowest, dtype=dtype)
    # the bound is where doubling overflows, not finfo.min itself
    half = torch.tensor(lowest, dtype=dtype) / 2
    check_mask(torch.stack([half, torch.zeros_like(half)]))
    beyond = torch.nextafter(half.double(), torch.tensor(-math.inf, dtype=torch.float64)).item()
    if dtype != torch.float64:
        with pytest.raises(PrecisionError, match="finfo.min doubled"):  # noqa: RUF043
            check_mask(beyond, dtype=dtype)


def test_a_constant_beyond_the_scores_format():
    message = r"holds -1e\+09, which does not fit fp16 \(lowest -65504\); use .* = -16376"
    with pytest.raises(PrecisionError, match=message):
        check_mask(torch.tensor([0.0, -1e9]), dtype=torch.float16)
    with pytest.raises(PrecisionError, match=message):
        check_mask(-1e9, dtype=torch.float16)
    check_mask(torch.tensor([0.0, -1e9]))
    check_mask(-1e9, dtype=torch.bfloat16)
    check_mask(-1e9)
    with pytest.raises(PrecisionError, match=r"1e\+10"):
        check_mask(1e10, dtype=torch.float16)


def test_nan():
    mask = torch.tensor([[0.0, math.nan], [math.nan, 0.0]])
    with pytest.raises(PrecisionError, match="my mask holds 2 NaN"):
        check_mask(mask, what="my mask")


@pytest.mark.parametrize("constant", [-math.inf, -1e4, mask_value(torch.float32), -1e9])
def test_fully_masked_rows_are_named(constant):
    mask = torch.zeros(2, 3, 5)
    mask[0, 1] = constant
    mask[1, 2] = constant
    mask[1, 1, 1:] = constant
    with pytest.raises(PrecisionError, match=re.escape("in row (0, 1), (1, 2) of 6: softmax")):
        check_mask(mask)
    with pytest.raises(PrecisionError, match="in row 1 of 3"):
        check_mask(mask[0])
    with pytest.raises(PrecisionError, match="in its only row of 1"):
        check_mask(mask[0, 1])
    check_mask(mask[1, :2])
    with pytest.raises(PrecisionError, match="in row 0, 1, 2 and 14 more of 17"):
        check_mask(torch.full((17, 4), constant))


def test_booleans_are_as_in_scaled_dot_product_attention():
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    check_mask(mask)
    mask[1] = False
    with pytest.raises(PrecisionError, match="in row 1 of 3"):
        check_mask(mask)
    # the row that is refused is the row that has nothing to attend to
    q = torch.randn(1, 3, 4)
    weights = (q @ q.mT).masked_fill(~mask, -math.inf).softmax(-1)
    assert weights.isnan().any(-1).tolist() == [[False, True, False]]


def test_what_is_no_mask():
    for mask in (torch.ones(2, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.uint8)):
        with pytest.raises(PrecisionError, match=r"its 1 and 0 mask nothing; use mask\.bool"):
            check_mask(mask)
    with pytest.raises(PrecisionError, match="int64; allowed: floating dtypes"):
        check_mask(torch.zeros(2, 2), dtype=torch.int64)


def test_harmless_masks():
    check_mask(torch.zeros(3, 3))
    check_mask(torch.zeros(0, 3))
    check_mask(torch.zeros(3, 0))
    check_mask(torch.tensor(0.0))
    check_mask(torch.tensor([[0.0, -math.inf]]))
    slopes = torch.arange(4.0)  # ALiBi: large, but relative
    check_mask(-(slopes[:, None] - slopes[None]).abs() * 1000)
    mask = torch.zeros(2, 2, requires_grad=True)
    check_mask(mask)
