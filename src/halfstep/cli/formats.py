"""The command ``halfstep formats``: the range of each format, and what each makes of a number."""

from __future__ import annotations

import math
from decimal import Decimal

import torch

from halfstep.cli.commands import Formats
from halfstep.errors import ConfigError
from halfstep.formats import BLOCK_FORMATS, FORMATS, FloatFormat, block_format
from halfstep.shown import aligned


def run(arguments: Formats) -> int:
    """Print every format's range and precision, or what formats make of numbers."""
    values = [read_value(text) for text in arguments.values]
    if arguments.block:
        form = block_format(arguments.block)
        if not values:
            raise ConfigError(
                f"give VALUEs to put in a block: halfstep formats 0.1 -3 --block {form.name}"
            )
        print(form.explain(values))
    elif len(values) > 1:
        raise ConfigError("formats takes one VALUE, and several with --block, such as nvfp4")
    elif values:
        print(_roundings(arguments.values[0], values[0]))
    else:
        print(f"{_ranges()}\n\n{_blocks()}")
    return 0


def read_value(text: str) -> float:
    """Return the fp64 number nearest to a decimal or hexadecimal spelling.

    Raises:
        ConfigError: If it is not a number, or overflows or underflows fp64.
    """
    hexadecimal = "0x" in text.lower()
    try:
        value = float.fromhex(text) if hexadecimal else float(text)
    except OverflowError:
        value = math.inf
    except ValueError:
        raise ConfigError(
            f"VALUE {text!r} is not a number; allowed: decimal (0.1, -1e-8), hexadecimal "
            "(0x1.8p-3), inf, nan"
        ) from None
    digits = text.lower().replace("0x", "").partition("p" if hexadecimal else "e")[0]
    zeroed = value == 0.0 and bool(digits.strip("+-0._ \t\n"))
    if zeroed or (math.isinf(value) and "inf" not in text.lower()):
        raise ConfigError(
            f"VALUE {text!r} is {value:g} in fp64, from which the formats round; allowed: 0 and "
            "magnitudes from 2^-1074 (4.9e-324) to 1.797e308"
        )
    return value


def rounded(form: FloatFormat, value: float) -> tuple[float, float, float, str]:
    """Round an fp64 number once; return the result, its error and relative error, and a verdict."""
    number = float(form.round_to(torch.tensor(value, dtype=torch.float64)))
    error = abs(number - value)
    if number == value or math.isnan(value):
        error = 0.0
    relative = error if error in (0.0, math.inf) else error / abs(value)
    return number, error, relative, _verdict(form, value, number)


def _verdict(form: FloatFormat, value: float, number: float) -> str:
    if math.isnan(number):
        exact = "exact" if form.has_nan else "has no NaN"
        return exact if math.isnan(value) else "overflows to NaN"
    if not form.has_nan and abs(value) > form.max:
        return "saturates"
    if math.isinf(number):
        return "exact" if math.isinf(value) else "overflows to inf"
    if number == 0.0 and value != 0.0:
        return "underflows to 0"
    word = "exact" if number == value else "rounded"
    return f"{word}, subnormal" if 0.0 < abs(number) < form.min_normal else word


def code_of(form: FloatFormat, number: float) -> tuple[str, str]:
    """Spell a number of a format in bits, by field, and in hexadecimal."""
    if math.isnan(number) and not form.has_nan:
        return "-|-|-", "-"
    widths = (1, form.exponent_bits, form.mantissa_bits)
    bits = [f"{field:0{width}b}" for field, width in zip(form.bits_of(number), widths, strict=True)]
    return "|".join(bits), f"0x{int(''.join(bits), 2):0{-(-form.bits // 4)}x}"


def _roundings(text: str, value: float) -> str:
    spelled = str(value)
    if math.isfinite(value):
        spelled = str(Decimal(value))
        if len(spelled) > 60:  # the decimal digits of an fp64 number can be hundreds
            spelled = f"about {Decimal(value):.25g}"
        spelled += f" = {value.hex()}"
    errors = [("format", "number", "error", "relative", "verdict")]
    bits = [("format", "s|exponent|mantissa", "hex", "below", "above")]
    for form in FORMATS.values():
        number, error, relative, verdict = rounded(form, value)
        errors.append((form.name, repr(number), f"{error:.3g}", f"{relative:.3g}", verdict))
        below, above = form.neighbours(number)
        bits.append((form.name, *code_of(form, number), f"{below:.9g}", f"{above:.9g}"))
    return (
        f"{text} is read as fp64: {spelled}\nEach format rounds that once, to the nearest, ties "
        f"to even.\n\n{aligned(errors, {1, 2, 3})}\n\n{aligned(bits, {3, 4})}"
    )


def _power(value: float) -> str:
    return f"2^{math.frexp(value)[1] - 1}"


def _ranges() -> str:
    rows = [
        ("format", "bits", "s/e/m", "largest", "smallest normal", "smallest positive", "gap at 1",
         "digits")
    ]  # fmt: skip
    for form in FORMATS.values():
        layout = f"1/{form.exponent_bits}/{form.mantissa_bits}"
        normal = f"{form.min_normal:.3g} = {_power(form.min_normal)}"
        positive = f"{form.min_subnormal:.3g} = {_power(form.min_subnormal)}"
        rows.append(
            (form.name, str(form.bits), layout, f"{form.max:.6g}", normal, positive,
             _power(form.eps), f"{(form.mantissa_bits + 1) * math.log10(2):.1f}")
        )  # fmt: skip
    finite = ", ".join(form.name for form in FORMATS.values() if form.finite_only and form.has_nan)
    numbers = ", ".join(form.name for form in FORMATS.values() if not form.has_nan)
    return (
        f"{aligned(rows, range(1, 8))}\n\ns/e/m: bits of sign, exponent, mantissa. digits: "
        f"decimal, log10(2^(m+1)).\ntf32 is stored in 32 bits. {finite} has no infinity: beyond "
        f"the largest comes NaN.\n{numbers} has neither: beyond the largest comes the largest.\n"
        "halfstep formats VALUE shows what each makes of a number."
    )


def _blocks() -> str:
    rows = [("block format", "numbers", "block", "scales", "rule", "bits per number")]
    for form in BLOCK_FORMATS.values():
        shape = "the tensor" if form.block is None else "x".join(map(str, form.block))
        each = form.element.bits + (form.scale.bits / math.prod(form.block) if form.block else 0)
        scale = f"{form.scale.name}{', and one fp32' * (form.rule == 'two-level')}"
        rows.append((form.name, form.element.name, shape, scale, form.rule, f"{each:.4g}"))
    return (
        f"{aligned(rows, {5})}\n\nhalfstep formats VALUE VALUE ... --block NAME shows what becomes "
        "of a block."
    )
