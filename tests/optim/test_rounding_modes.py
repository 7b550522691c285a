"""Every entry of the table of rounding modes has all its parts."""

import re
from pathlib import Path
from typing import get_args

import pytest

from halfstep.precision.masters.rounding import ROUNDING, RoundingMode, Update
from halfstep.precision.policy.policy import POLICIES

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "halfstep" / "optim" / "kernels"
CPP = (KERNELS / "cpu.cpp").read_text()
TRITON = (KERNELS / "triton_kernels.py").read_text()
DOCS = (ROOT / "docs" / "policies.md").read_text()


def in_cpp(mode: RoundingMode) -> str:
    return f"k{mode.name.capitalize()}"


def test_names_and_numbers_are_those_of_the_table():
    assert get_args(Update) == tuple(ROUNDING)
    assert f"enum Update {{ {', '.join(map(in_cpp, ROUNDING.values()))} }}" in CPP


@pytest.mark.parametrize("mode", ROUNDING.values(), ids=lambda mode: mode.name)
def test_a_mode_has_all_its_parts(mode: RoundingMode):
    assert (mode.join is None) == (mode.remainder_dtype is None)
    assert f"`{mode.name}`" in DOCS
    assert mode.weight, "what explain says of its weights"
    if mode.name == "nearest":  # what is left when no other case has matched
        return
    assert POLICIES[mode.policy].update == mode.name
    assert f"`{mode.policy}`" in DOCS
    cases = len(re.findall(rf"p\.update == {in_cpp(mode)}\b", CPP))
    assert cases == (1 if mode.join is None else 2), "its cases in C++: written, and read"
    assert f'update == "{mode.name}"' in TRITON, "its case in Triton"
