"""The command ``halfstep formats``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import torch

from halfstep.cli.commands import Formats
from halfstep.errors import ConfigError
from halfstep.formats import BLOCK_FORMATS, FORMATS, FloatFormat, block_format
from halfstep.shown import columns, padded


def run(arguments: Formats) -> int:
    """Print every format's range and precision, or what formats make of numbers."""
    if arguments.block:
        return _block(arguments)
    if not arguments.values:
        rows = {name: _describe(form) for name, form in FORMATS.items()}
        print(_json(rows) if arguments.json else f"{_ranges()}\n\n{_blocks()}")
        return 0
    if len(arguments.values) > 1:
        raise ConfigError("formats takes one VALUE, and several with --block, such as nvfp4")
    value = read_value(arguments.values[0])
    rounded = {name: round_value(form, value) for name, form in FORMATS.items()}
    if arguments.json:
        print(_json({"value": value, "hex": value.hex(), "formats": rounded}))
    else:
        print(_roundings(arguments.values[0], value, rounded))
    return 0


def _block(arguments: Formats) -> int:
    """Print what a block format makes of a block that begins with some numbers."""
    form = block_format(arguments.block)
    if not arguments.values:
        raise ConfigError(
            f"give VALUEs to put in a block: halfstep formats 0.1 -3 --block {form.name}"
        )
    values = [read_value(text) for text in arguments.values]
    print(_json(form.rows(values)) if arguments.json else form.explain(values))
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


def round_value(form: FloatFormat, value: float) -> dict[str, Any]:
    """Round an fp64 number to one format; return the result, its bits and the error for JSON."""
    number = float(form.round_to(torch.tensor(value, dtype=torch.float64)))
    lacks = math.isnan(number) and not form.has_nan
    fields = form.bits_of(0.0 if lacks else number)
    below, above = form.neighbours(number)
    error = abs(number - value) if math.isfinite(number) else math.nan
    if math.isnan(value) or (math.isinf(value) and number == value):
        error = 0.0
    elif math.isinf(number):
        error = math.inf
    widths = (1, form.exponent_bits, form.mantissa_bits)
    bits = [f"{field:0{width}b}" for field, width in zip(fields, widths, strict=True)]
    code = f"0x{int(''.join(bits), 2):0{-(-form.bits // 4)}x}"
    sign, exponent, mantissa, code = ("-",) * 4 if lacks else (*bits, code)
    return {
        "number": number,
        "sign": sign,
        "exponent": exponent,
        "mantissa": mantissa,
        "hex": code,
        "below": below,
        "above": above,
        "absolute_error": error,
        "relative_error": error if error in (0.0, math.inf) else error / abs(value),
        "verdict": verdict(form, value, number),
    }


def verdict(form: FloatFormat, value: float, number: float) -> str:
    """Name in a word or two what rounding ``value`` to ``number`` did."""
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
    small = 0.0 < abs(number) < form.min_normal
    return f"{word}, subnormal" if small else word


def _describe(form: FloatFormat) -> dict[str, Any]:
    return {
        "bits": form.bits,
        "sign_bits": 1,
        "exponent_bits": form.exponent_bits,
        "mantissa_bits": form.mantissa_bits,
        "max": form.max,
        "min_normal": form.min_normal,
        "min_subnormal": form.min_subnormal,
        "eps": form.eps,
        "decimal_digits": form.decimal_digits,
        "has_infinity": not form.finite_only,
        "has_nan": form.has_nan,
    }


def _json(value: dict[str, Any]) -> str:
    """Format as JSON; inf and NaN, which JSON does not have, become strings."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(entry) for key, entry in item.items()}
        if isinstance(item, list):
            return [plain(entry) for entry in item]
        return str(item) if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=1, allow_nan=False)


def _power(value: float) -> str:
    """Format a power of two as ``2^-24``."""
    return f"2^{math.frexp(value)[1] - 1}"


def table(rows: Sequence[tuple[str, ...]], right: set[int]) -> str:
    """Align rows in columns of a terminal, those in ``right`` flush right."""
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        parts = [padded(c, w, right=i in right) for i, (c, w) in enumerate(cells)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _ranges() -> str:
    head = (
        "format", "bits", "s/e/m", "largest", "smallest normal",
        "smallest positive", "gap at 1", "digits",
    )  # fmt: skip
    rows = [
        (
            form.name,
            str(form.bits),
            f"1/{form.exponent_bits}/{form.mantissa_bits}",
            f"{form.max:.6g}",
            f"{form.min_normal:.3g} = {_power(form.min_normal)}",
            f"{form.min_subnormal:.3g} = {_power(form.min_subnormal)}",
            _power(form.eps),
            f"{form.decimal_digits:.1f}",
        )
        for form in FORMATS.values()
    ]
    finite = ", ".join(form.name for form in FORMATS.values() if form.finite_only and form.has_nan)
    numbers = ", ".join(form.name for form in FORMATS.values() if not form.has_nan)
    return (
        f"{table([head, *rows], {1, 2, 3, 4, 5, 6, 7})}\n\ns/e/m: bits of sign, exponent, "
        f"mantissa. digits: decimal, log10(2^(m+1)).\ntf32 is stored in 32 bits. {finite} has no "
        f"infinity: beyond the largest comes NaN.\n{numbers} has neither: beyond the largest "
        "comes the largest.\nhalfstep formats VALUE shows what each makes of a number."
    )


def _blocks() -> str:
    rows = [
        (
            *("block format", "numbers", "block", "scales"),
            *("rule", "bits per number"),
        )
    ]
    for form in BLOCK_FORMATS.values():
        shape = "the tensor" if form.block is None else "x".join(map(str, form.block))
        each = float(form.element.bits)
        if form.block is not None:
            each += form.scale.bits / math.prod(form.block)
        two = form.rule == "two-level"
        scale = f"{form.scale.name}, and one fp32" if two else form.scale.name
        rows.append((form.name, form.element.name, shape, scale, form.rule, f"{each:.4g}"))
    return (
        f"{table(rows, {5})}\n\nhalfstep formats VALUE VALUE ... --block NAME shows what becomes "
        "of a block."
    )


def _roundings(text: str, value: float, rounded: dict[str, dict[str, Any]]) -> str:
    spelled = str(value)
    if math.isfinite(value):
        spelled = str(Decimal(value))
        if len(spelled) > 60:  # the decimal digits of an fp64 number can be hundreds
            spelled = f"about {Decimal(value):.25g}"
        spelled += f" = {value.hex()}"
    form = "format"
    errors = [(form, "number", "error", "relative", "verdict")]
    bits = [(form, "s|exponent|mantissa", "hex", "below", "above")]
    for name, row in rounded.items():
        error, relative = row["absolute_error"], row["relative_error"]
        errors.append(
            (name, repr(row["number"]), f"{error:.3g}", f"{relative:.3g}", row["verdict"])
        )
        fields = "|".join((row["sign"], row["exponent"], row["mantissa"]))
        bits.append((name, fields, row["hex"], f"{row['below']:.9g}", f"{row['above']:.9g}"))
    return (
        f"{text} is read as fp64: {spelled}\nEach format rounds that once, to the nearest, ties "
        f"to even.\n\n{table(errors, {1, 2, 3})}\n\n{table(bits, {3, 4})}"
    )
