"""Random programs of ordinary actions train what plain fp32 torch trains, under every policy."""

from __future__ import annotations

import pytest

from every import every
from strangers.bounds import bound
from strangers.loops import POLICIES, run, verdict
from strangers.programs import program


def require_equal(seed: int) -> None:
    idiom = program(seed)
    reference = run(idiom, None)
    found = {policy: verdict(idiom, policy, reference, bound(policy)) for policy in POLICIES}
    assert {policy: what for policy, what in found.items() if what[0] != "equal"} == {}


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 300), marks=pytest.mark.slow)])
def test_programs(seeds):
    every(seeds, require_equal)
