"""Random programs of ordinary actions train what plain fp32 torch trains, under every policy."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from strangers.bounds import bound, shares
from strangers.loops import POLICIES, Idiom, run, verdict
from strangers.programs import program
from strangers.wider_programs import program as wider_program


def require_equal(idiom: Idiom, policies: Iterable[str] = POLICIES) -> None:
    reference = run(idiom, None)
    found = {policy: verdict(idiom, policy, reference, bound(policy)) for policy in policies}
    assert {policy: what for policy, what in found.items() if what[0] != "equal"} == {}


@pytest.mark.parametrize(("seed", "policies"), shares(range(20)))
def test_a_program(seed, policies):
    require_equal(program(seed), policies)


@pytest.mark.parametrize(("seed", "policies"), shares(range(12)))
def test_a_wider_program(seed, policies):
    require_equal(wider_program(seed), policies)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 220))
def test_more_programs(seed):
    require_equal(program(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 110))
def test_more_wider_programs(seed):
    require_equal(wider_program(seed))
