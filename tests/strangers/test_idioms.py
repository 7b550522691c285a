"""Whatever a training script does between the lines, it trains what plain fp32 torch trains."""

from __future__ import annotations

import itertools

import pytest

import halfstep
from every import every
from strangers.bounds import bound, reference
from strangers.idioms import IDIOMS
from strangers.loops import POLICIES, distance, verdict

OWN_OPTIMIZER = tuple(p for p in POLICIES if p.startswith("bf16-s") or p == "bf16-kahan")
REFUSED = {
    "sparse_embedding": OWN_OPTIMIZER,  # halfstep's optimizers take dense gradients
    "backward_of_the_loss_itself": POLICIES,  # not scaled, and not seen
    "losses_weights_that_are_not_the_models": POLICIES,  # in no model that could be saved
}


QUICK = ("fp32", "fp16-mixed,init_scale=256", "bf16-master", "bf16-split", "bf16-pure")
"""One policy a mechanism: none, a scale and casts, masters, remainders, 16-bit weights alone."""


def require_as_expected(name: str, policy: str) -> None:
    """No cell raises anything but a refusal, skips a step, or ends elsewhere than plain fp32."""
    kind, seen = verdict(IDIOMS[name], policy, reference(name), bound(policy))
    wanted = "refused" if policy in REFUSED.get(name, ()) else "equal"
    assert kind == wanted, f"{kind}: {seen}"


def test_every_policy_of_a_cpu_is_run():
    honoured = {
        name for name in halfstep.POLICIES if halfstep.support(name, "cpu").status != "refused"
    }
    assert honoured - {"bf16-module"} == {p.split(",")[0] for p in POLICIES}  # that is for FSDP2


def test_idioms():
    every(itertools.product(IDIOMS, QUICK), require_as_expected)


@pytest.mark.slow
def test_idioms_under_the_other_policies():
    others = (policy for policy in POLICIES if policy not in QUICK)
    every(itertools.product(IDIOMS, others), require_as_expected)


def test_the_bounds_would_see_an_idiom_that_is_not_honoured():
    """Most idioms change the end by more than the bound: leaving them out would be silent."""
    plain = reference("plain")
    changed = {
        name: distance(reference(name), plain)
        for name in IDIOMS
        if len(reference(name).weights) == len(plain.weights)
    }
    for policy in POLICIES:
        assert sum(way > bound(policy) for way in changed.values()) >= len(changed) / 2, policy
