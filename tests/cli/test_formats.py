"""``halfstep formats``: what it prints of numbers, errors and bits."""

import itertools
import math

import pytest
import torch

from halfstep.cli.main import main
from halfstep.cli.small import code_of, read_value, rounded
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
    assert rows["fp32"] == "fp32 32 1/8/23 3.40282e+38 1.18e-38 = 2^-126 1.4e-45 = 2^-149 2^-23"
    assert rows["tf32"] == "tf32 19 1/8/10 3.40116e+38 1.18e-38 = 2^-126 1.15e-41 = 2^-136 2^-10"
    assert rows["bf16"] == "bf16 16 1/8/7 3.38953e+38 1.18e-38 = 2^-126 9.18e-41 = 2^-133 2^-7"
    assert rows["fp16"] == "fp16 16 1/5/10 65504 6.1e-05 = 2^-14 5.96e-08 = 2^-24 2^-10"
    assert rows["e4m3fn"] == "e4m3fn 8 1/4/3 448 0.0156 = 2^-6 0.00195 = 2^-9 2^-3"
    assert rows["e5m2"] == "e5m2 8 1/5/2 57344 6.1e-05 = 2^-14 1.53e-05 = 2^-16 2^-2"
    assert rows["e2m1"] == "e2m1 4 1/2/1 6 1 = 2^0 0.5 = 2^-1 2^-1"  # OCP MX 1.0, table 5
    assert max(map(len, lines)) <= 100


def test_a_block_of_numbers(capsys):
    text = formats(capsys, "0.1", "-3", "6", "--block", "nvfp4")
    assert text.strip() == NVFP4.explain([0.1, -3.0, 6.0])
    row = formats(capsys, "500", "--block", "mxfp8").splitlines()[-1]
    assert row.split() == ["500", "0x78", "256", "512", "12", "0.024"]
    rows = formats(capsys, "500", "inf", "--block", "mxfp8").splitlines()[-2:]
    assert [line.split()[3] for line in rows] == ["nan", "nan"]


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
        pattern = int(code_of(form, number).replace("|", ""), 2)
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


@pytest.mark.parametrize("text", ["abc", "", "1,5", "0x", "0xz", "1.8p-3", "-x", "1e", "--1"])
def test_what_is_no_number_is_refused_in_one_line(text, capsys):
    assert main(["formats", text]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("halfstep: error: ")
    if text not in ("--1", "-x"):  # which are options
        assert f"VALUE {text!r} is not a number; allowed: decimal (0.1, -1e-8)" in error
