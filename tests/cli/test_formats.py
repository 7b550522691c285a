"""``halfstep formats``: what it prints of numbers, errors and bits."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from halfstep.cli.formats import code_of, read_value, rounded
from halfstep.cli.main import main
from halfstep.errors import ConfigError
from halfstep.formats import FORMATS, NVFP4

NAMES = ["fp32", "tf32", "bf16", "fp16", "e4m3fn", "e5m2", "e2m1"]
VALUES = [
    "0.1", "1e-8", "-1e-8", "-2.5", "1", "65504", "65519.99", "65520", "-65520", "464", "464.01",
    "6e-8", "2049", "257", "1e-45", "1e39", "3.4028235e38", "0x1.8p-3", "-0x1p-24", "0x1p-25",
    "0.0001", "61440", "-0.001953125", "1e-300", "-1e300",
    # A rounding through fp32 would make a tie of this and end below, in fp16 as in bf16.
    "0x1.00200000001p0", "0x1.01000000001p0",
]  # fmt: skip


def formats(capsys, *arguments) -> str:
    assert main(["formats", *arguments]) == 0
    return capsys.readouterr().out


def test_without_a_value_every_format_s_range(capsys):
    lines = formats(capsys).splitlines()
    rows = {line.split()[0]: " ".join(line.split()) for line in lines[1:8]}
    assert list(rows) == NAMES
    # IEEE 754-2019 table 3.5 and OFP8 1.0 tables 1 and 2, as a textbook prints them.
    assert rows["fp32"] == "fp32 32 1/8/23 3.40282e+38 1.18e-38 = 2^-126 1.4e-45 = 2^-149 2^-23 7.2"
    assert (
        rows["tf32"] == "tf32 19 1/8/10 3.40116e+38 1.18e-38 = 2^-126 1.15e-41 = 2^-136 2^-10 3.3"
    )
    assert rows["bf16"] == "bf16 16 1/8/7 3.38953e+38 1.18e-38 = 2^-126 9.18e-41 = 2^-133 2^-7 2.4"
    assert rows["fp16"] == "fp16 16 1/5/10 65504 6.1e-05 = 2^-14 5.96e-08 = 2^-24 2^-10 3.3"
    assert rows["e4m3fn"] == "e4m3fn 8 1/4/3 448 0.0156 = 2^-6 0.00195 = 2^-9 2^-3 1.2"
    assert rows["e5m2"] == "e5m2 8 1/5/2 57344 6.1e-05 = 2^-14 1.53e-05 = 2^-16 2^-2 0.9"
    assert rows["e2m1"] == "e2m1 4 1/2/1 6 1 = 2^0 0.5 = 2^-1 2^-1 0.6"  # OCP MX 1.0, table 5
    assert max(map(len, lines)) <= 100


def test_without_a_value_the_block_formats_too(capsys):
    lines = [" ".join(line.split()) for line in formats(capsys).splitlines()]
    assert "mxfp8 e4m3fn 1x32 e8m0 rceil 8.25" in lines  # 8 bits, and 8 for 32 numbers
    assert "nvfp4 e2m1 1x16 e4m3fn, and one fp32 two-level 4.5" in lines
    assert "fp8 e4m3fn the tensor fp32 amax 8" in lines


def test_a_block_of_numbers(capsys):
    text = formats(capsys, "0.1", "-3", "6", "--block", "nvfp4")
    assert text.strip() == NVFP4.explain([0.1, -3.0, 6.0])
    row = formats(capsys, "500", "--block", "mxfp8").splitlines()[-1]
    assert row.split() == ["500", "0x78", "256", "512", "12", "0.024"]
    rows = formats(capsys, "500", "inf", "--block", "mxfp8").splitlines()[-2:]
    assert [line.split()[3] for line in rows] == ["nan", "nan"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--block", "nvfp4"], "halfstep formats 0.1 -3 --block nvfp4"),
        (["1", "--block", "nvfp8"], "there is no block format 'nvfp8'; allowed: fp8, "),
        (["1", "2"], "formats takes one VALUE, and several with --block"),
        (["1", "x", "--block", "fp8"], "VALUE 'x' is not a number"),
    ],
)
def test_what_makes_no_block_is_refused(words, says, capsys):
    assert main(["formats", *words]) == 2
    assert says in capsys.readouterr().err


def test_each_format_rounds_the_fp64_once():
    """How each rounds is tested in tests/test_formats.py, by exact arithmetic."""
    for text, (name, form) in itertools.product(VALUES, FORMATS.items()):
        value = read_value(text)
        number, absolute, relative, verdict = rounded(form, value)
        assert str(number) == str(float(form.round_to(torch.tensor(value, dtype=torch.float64))))
        if not math.isfinite(number):
            beyond = "NaN" if math.isnan(number) else "inf"
            assert (str(absolute), verdict) == (beyond.lower(), f"overflows to {beyond}"), name
            continue
        error = abs(Fraction(number) - Fraction(value))
        if verdict == "saturates":  # far beyond, where fp64 rounds the difference
            assert absolute == float(error)
            continue
        assert Fraction(absolute) == error
        # One fp64 division: at most half an ulp, 2^-53, off.
        assert relative == pytest.approx(error / abs(Fraction(value)), rel=2**-52)
        assert verdict.startswith("exact") == (error == 0)
        assert (verdict == "underflows to 0") == (number == 0)


def test_the_bits_are_those_that_torch_stores():
    dtypes = {
        "fp32": (torch.float32, torch.int32),
        "bf16": (torch.bfloat16, torch.int16),
        "fp16": (torch.float16, torch.int16),
        "e4m3fn": (torch.float8_e4m3fn, torch.uint8),
        "e5m2": (torch.float8_e5m2, torch.uint8),
    }
    for text, (name, form) in itertools.product(VALUES, FORMATS.items()):
        number = rounded(form, read_value(text))[0]
        fields, code = code_of(form, number)
        pattern = int(fields.replace("|", ""), 2)
        assert int(code, 16) == pattern
        if name in dtypes and not math.isnan(number):
            dtype, integer = dtypes[name]
            stored = torch.tensor(number, dtype=torch.float64).to(dtype)
            assert stored.view(integer).item() % 2 ** (8 * dtype.itemsize) == pattern


@pytest.mark.parametrize(
    ("text", "name", "verdict"),
    [
        ("1", "e5m2", "exact"), ("0", "fp16", "exact"), ("-0", "fp16", "exact"),
        ("0.1", "fp32", "rounded"), ("1e-8", "fp16", "underflows to 0"),
        ("0x1p-24", "fp16", "exact, subnormal"), ("6e-8", "fp16", "rounded, subnormal"),
        ("0x1p-14", "fp16", "exact"), ("1e39", "bf16", "overflows to inf"),
        ("500", "e4m3fn", "overflows to NaN"), ("inf", "e4m3fn", "overflows to NaN"),
        ("inf", "fp32", "exact"), ("-inf", "fp32", "exact"), ("nan", "fp16", "exact"),
        ("nan", "e4m3fn", "exact"), ("nan", "e2m1", "has no NaN"), ("-9", "e2m1", "saturates"),
        ("inf", "e2m1", "saturates"), ("6", "e2m1", "exact"),
    ],
)  # fmt: skip
def test_verdicts(text, name, verdict, capsys):
    for table in formats(capsys, text).split("\n\n")[1:2]:
        row = next(line for line in table.splitlines() if line.startswith(name + " "))
        assert row.endswith("  " + verdict)


def test_what_a_person_reads(capsys):
    out = formats(capsys, "0.1")
    assert "0.1000000000000000055511151231257827021181583404541015625" in out
    assert "rounds that once" in out
    assert "fp64" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["fp16", "0.0999755859375", "2.44e-05", "0.000244", "rounded"] in rows
    assert ["fp16", "0|01011|1001100110", "0x2e66", "0.0999145508", "0.100036621"] in rows
    assert ["bf16", "0|01111011|1001101", "0x3dcd", "0.099609375", "0.100585938"] in rows


def test_minus_zero_keeps_its_sign():
    for form in FORMATS.values():
        number = rounded(form, -0.0)[0]
        sign, *rest = code_of(form, number)[0].split("|")
        assert (math.copysign(1, number), sign, int("".join(rest), 2)) == (-1, "1", 0)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "-0", "-1e-8", "-0x1.8p-3", "-5", "-.5"])
def test_special_and_negative_values_need_no_quoting(text, capsys):
    assert formats(capsys, text).startswith(f"{text} is read as fp64: ")


@pytest.mark.parametrize("text", ["abc", "", "1,5", "0x", "0xz", "1.8p-3", "-x", "1e", "--1"])
def test_what_is_no_number_is_refused_in_one_line(text, capsys):
    assert main(["formats", text]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("halfstep: error: ")
    if text not in ("--1", "-x"):  # which are options
        assert f"VALUE {text!r} is not a number; allowed: decimal (0.1, -1e-8)" in error


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1e-400", "-0.001e-330", "0x1p1024",
                                  "0x1p-1076"])  # fmt: skip
def test_what_fp64_cannot_hold_is_refused_and_not_rounded_twice(text):
    with pytest.raises(ConfigError, match=r"in fp64, from which the formats round"):
        read_value(text)


@pytest.mark.parametrize(("text", "value"), [("0e9", 0.0), ("-0.000", -0.0), ("0x0p-5", 0.0),
                                             ("5e-324", 5e-324), ("Infinity", math.inf),
                                             ("0X1P-1074", 5e-324)])  # fmt: skip
def test_what_fp64_holds_is_read(text, value):
    got = read_value(text)
    assert (got, math.copysign(1, got)) == (value, math.copysign(1, value))
