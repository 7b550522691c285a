"""``halfstep formats``: what it prints of numbers, errors and bits."""

import pytest

from halfstep.cli.main import main


def formats(capsys, *arguments) -> str:
    assert main(["formats", *arguments]) == 0
    return capsys.readouterr().out


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


def test_infinities_in_a_block(capsys):
    rows = formats(capsys, "500", "inf", "--block", "mxfp8").splitlines()[-2:]
    assert [line.split()[3] for line in rows] == ["nan", "nan"]


@pytest.mark.parametrize("text", ["abc", "", "0xz", "--1"])
def test_what_is_no_number_is_refused_in_one_line(text, capsys):
    assert main(["formats", text]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("halfstep: error: ")
    if text != "--1":  # which is an option
        assert f"VALUE {text!r} is not a number; allowed: decimal (0.1, -1e-8)" in error
