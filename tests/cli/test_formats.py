"""``halfstep formats``: what it prints of numbers, errors and bits."""

import pytest

from halfstep.cli.main import main
from halfstep.formats import NVFP4

NAMES = ["fp32", "tf32", "bf16", "fp16", "e4m3fn", "e5m2", "e2m1"]


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
    rows = [line.split() for line in out.splitlines()]
    bits = "0|01011|1001100110"
    assert ["fp16", "0.0999755859375", "2.44e-05", "0.000244", bits, "rounded"] in rows


@pytest.mark.parametrize("text", ["abc", "", "1,5", "0x", "0xz", "1.8p-3", "-x", "1e", "--1"])
def test_what_is_no_number_is_refused_in_one_line(text, capsys):
    assert main(["formats", text]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("halfstep: error: ")
    if text not in ("--1", "-x"):  # which are options
        assert f"VALUE {text!r} is not a number; allowed: decimal (0.1, -1e-8)" in error
