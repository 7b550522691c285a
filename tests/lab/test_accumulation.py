"""Sums in 16 bits drift and stand still, in a sum, a product and over micro-batches."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lab.drawn import assert_drawn, made


@pytest.fixture(scope="module")
def small():
    return made("accumulation", length=512, micro_batches=8)


def nearest(value: Fraction, mantissa_bits: int) -> Fraction:
    """To the nearest number with so many bits after the leading one, ties to even."""
    if not value:
        return value
    exponent = 0
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while value < Fraction(2) ** exponent:
        exponent -= 1
    gap = Fraction(2) ** (exponent - mantissa_bits)
    return round(value / gap) * gap


@pytest.mark.parametrize(("name", "bits"), [("bf16", 7), ("fp16", 10)])
def test_the_sum_is_that_of_the_definition(small, name, bits):
    term, total, totals = nearest(Fraction(1e-3), bits), Fraction(0), [Fraction(0)]
    for _ in range(1000):
        total = nearest(total + term, bits)
        totals.append(total)
    assert small.data["sums"][name] == totals


def test_bf16_counts_double_and_then_nothing_and_fp32_keeps_all(small):
    bf16 = small.data["sums"]["bf16"]
    *_, double, nothing = small.data["gains"]
    assert double["gain"] == 2**-9
    assert bf16[double["first"]] == pytest.approx(0.25, abs=2**-9)
    assert nothing == {"first": nothing["first"], "last": 1000, "gain": 0.0}
    assert bf16[-1] == bf16[nothing["first"]] == 0.5
    # 1000 roundings of half a gap of at most 2^-24 each
    assert small.data["sums"]["fp32"][-1] == pytest.approx(1.0, abs=1000 * 2**-24)


@pytest.mark.parametrize(("operands", "unit"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_the_error_of_a_product_grows_with_its_length_unless_sums_are_fp32(small, operands, unit):
    narrow = small.data["products"][f"{operands} {operands}"]
    wide = small.data["products"][f"{operands} fp32"]
    assert narrow == sorted(narrow)
    assert narrow[-1] > 5 * narrow[0]
    assert max(wide) < unit  # one rounding of the result, to half a gap at the most
    assert max(wide) < 1.5 * min(wide)


def test_gradients_of_micro_batches_lose_in_bf16_and_not_in_fp32(small):
    bf16, fp32 = (small.data["gradients"][name] for name in ("bf16", "fp32"))
    assert bf16[0] == 0.0  # one micro-batch is no sum
    assert bf16[-1] > bf16[1] > 2**-10
    assert max(fp32) < 2**-22  # fp32's unit roundoff is 2^-24


def test_what_to_change_is_true_and_the_sentence_follows_the_numbers(small):
    assert "1000 times 0.001 is 0.5 in a bf16 sum and 1 in truth" in small.verdict("en")
    short = made("accumulation", term=0.0009765625, length=16, micro_batches=4)
    assert short.data["sums"]["bf16"] == [min(n / 1024, 0.25) for n in range(1001)]
    narrow, wide = (short.data["products"][f"bf16 {name}"][-1] for name in ("bf16", "fp32"))
    assert 1.5 < narrow / wide < 3
    few, more = (found.data["gradients"]["bf16"][-1] for found in (short, small))
    assert few < more
    assert ("sums of only 16 terms lose little" in short.verdict("en")) == (narrow < 2 * wide)


def test_it_is_drawn_in_both_languages(small, tmp_path, monkeypatch):
    assert_drawn(small, tmp_path, monkeypatch)
