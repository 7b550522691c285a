"""``halfstep formats``: what it prints of numbers, errors and bits."""

import json
import math
from fractions import Fraction

import pytest
import torch

from halfstep.cli.formats import read_value
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


def as_json(capsys, value) -> dict:
    return json.loads(formats(capsys, "--json", value))


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
    rows = json.loads(formats(capsys, "500", "inf", "--block", "mxfp8-floor", "--json"))
    assert rows["format"] == "mxfp8-floor"
    assert [row["becomes"] for row in rows["numbers"]] == ["nan", "nan"]
    row = json.loads(formats(capsys, "500", "--block", "mxfp8-floor", "--json"))["numbers"][0]
    assert row == {"number": 500.0, "code": "0x7e", "in_block": 448.0, "becomes": 448.0,
                   "error": 52.0, "relative": 0.104}  # fmt: skip


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


def test_without_a_value_as_json(capsys):
    rows = json.loads(formats(capsys, "--json"))
    assert list(rows) == NAMES
    assert rows["fp16"] == {
        "bits": 16, "sign_bits": 1, "exponent_bits": 5, "mantissa_bits": 10, "max": 65504.0,
        "min_normal": 2.0**-14, "min_subnormal": 2.0**-24, "eps": 2.0**-10,
        "decimal_digits": pytest.approx(3.31, abs=0.005), "has_infinity": True,
        "has_nan": True,
    }  # fmt: skip
    assert not rows["e4m3fn"]["has_infinity"]


@pytest.mark.parametrize("text", VALUES)
def test_each_format_rounds_the_fp64_once(text, capsys):
    """How each rounds is tested in tests/test_formats.py, by exact arithmetic."""
    value = float.fromhex(text) if "x" in text else float(text)
    report = as_json(capsys, text)
    assert report["value"] == value == float.fromhex(report["hex"])
    assert list(report["formats"]) == NAMES
    for name, row in report["formats"].items():
        number = float(row["number"])
        rounded = float(FORMATS[name].round_to(torch.tensor(value, dtype=torch.float64)))
        assert str(number) == str(rounded), name
        if math.isnan(number):
            assert row["verdict"] == "overflows to NaN"
            continue
        if math.isinf(number):
            assert row["absolute_error"] == row["relative_error"] == "inf"
            assert row["verdict"] == "overflows to inf"
            continue
        error = abs(Fraction(number) - Fraction(value))
        if row["verdict"] == "saturates":  # far beyond, where fp64 rounds the difference
            assert row["absolute_error"] == float(error)
            continue
        assert Fraction(row["absolute_error"]) == error
        # One fp64 division: at most half an ulp, 2^-53, off.
        assert row["relative_error"] == pytest.approx(error / abs(Fraction(value)), rel=2**-52)
        assert row["verdict"].startswith("exact") == (error == 0)
        assert (row["verdict"] == "underflows to 0") == (number == 0)


@pytest.mark.parametrize("text", VALUES)
def test_the_bits_are_those_that_torch_stores(text, capsys):
    dtypes = {
        "fp32": (torch.float32, torch.int32),
        "bf16": (torch.bfloat16, torch.int16),
        "fp16": (torch.float16, torch.int16),
        "e4m3fn": (torch.float8_e4m3fn, torch.uint8),
        "e5m2": (torch.float8_e5m2, torch.uint8),
    }
    for name, row in as_json(capsys, text)["formats"].items():
        pattern = int(row["sign"] + row["exponent"] + row["mantissa"], 2)
        assert int(row["hex"], 16) == pattern
        if name in dtypes and row["number"] != "nan":
            dtype, integer = dtypes[name]
            stored = torch.tensor(float(row["number"]), dtype=torch.float64).to(dtype)
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
    assert as_json(capsys, text)["formats"][name]["verdict"] == verdict
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


def test_neighbours_are_those_of_the_rounded_number(capsys):
    rows = as_json(capsys, "65504")["formats"]
    assert (rows["fp16"]["below"], rows["fp16"]["above"]) == (65472.0, "inf")
    assert (rows["e5m2"]["below"], rows["e5m2"]["above"]) == (57344.0, "inf")  # 65504 gives inf
    rows = as_json(capsys, "1")["formats"]
    assert (rows["fp16"]["below"], rows["fp16"]["above"]) == (1 - 2.0**-11, 1 + 2.0**-10)


def test_minus_zero_keeps_its_sign(capsys):
    for row in as_json(capsys, "-0")["formats"].values():
        assert math.copysign(1, row["number"]) == -1
        assert (row["sign"], int(row["exponent"] + row["mantissa"], 2)) == ("1", 0)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "-0", "-1e-8", "-0x1.8p-3", "-5", "-.5"])
def test_special_and_negative_values_need_no_quoting(text, capsys):
    value = str(as_json(capsys, text)["value"])
    expected = str(float.fromhex(text) if "x" in text else float(text))
    assert value == expected
    assert json.loads(formats(capsys, text, "--json"))["value"] is not None  # in either order
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


def test_help_names_the_command(capsys):
    assert main(["formats", "--help"]) == 0
    assert "to the nearest, ties to even" in " ".join(capsys.readouterr().out.split())
