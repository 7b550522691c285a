"""Random programs of ordinary actions train what plain fp32 torch trains, under every policy."""

from __future__ import annotations

import pytest

from strangers.bounds import bound
from strangers.loops import POLICIES, run, verdict
from strangers.programs import program


def wrong(seed: int) -> dict[str, tuple[str, str]]:
    idiom = program(seed)
    reference = run(idiom, None)
    found = {policy: verdict(idiom, policy, reference, bound(policy)) for policy in POLICIES}
    return {policy: what for policy, what in found.items() if what[0] != "equal"}


@pytest.mark.parametrize("seed", range(20))
def test_a_program(seed):
    assert not wrong(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 220))
def test_more_programs(seed):
    assert not wrong(seed)
