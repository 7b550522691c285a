"""Random programs of ordinary actions train what plain fp32 torch trains, under every policy."""

from __future__ import annotations

import pytest

from strangers.bounds import bound
from strangers.loops import POLICIES, Idiom, run, verdict
from strangers.programs import program
from strangers.wider_programs import program as wider_program


def wrong(idiom: Idiom) -> dict[str, tuple[str, str]]:
    reference = run(idiom, None)
    found = {policy: verdict(idiom, policy, reference, bound(policy)) for policy in POLICIES}
    return {policy: what for policy, what in found.items() if what[0] != "equal"}


@pytest.mark.parametrize("seed", range(20))
def test_a_program(seed):
    assert not wrong(program(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 220))
def test_more_programs(seed):
    assert not wrong(program(seed))


@pytest.mark.parametrize("seed", range(10))
def test_a_wider_program(seed):
    assert not wrong(wider_program(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 110))
def test_more_wider_programs(seed):
    assert not wrong(wider_program(seed))
