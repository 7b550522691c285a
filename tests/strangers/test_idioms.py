"""Whatever a training script does between the lines, it trains what plain fp32 torch trains."""

from __future__ import annotations

import pytest

from strangers.bounds import bound, reference, shares
from strangers.idioms import IDIOMS
from strangers.loops import POLICIES, distance, verdict

# What makes small differences of gradients large: they are divided by each other.
AMPLIFIES = {"contrastive_momentum_encoder": 3.0}
# Formats whose own defects are larger than their distance in a calm loop (docs/limits.md).
DEFECTS = {
    ("adamw", "fp16-pure,init_scale=256"): 0.5,  # (1 - beta2) g^2 underflows for |g| < 0.0055
}
OWN_OPTIMIZER = tuple(p for p in POLICIES if p.startswith("bf16-s") or p == "bf16-kahan")
STORED_16_BIT = tuple(p for p in POLICIES if p != "fp32" and "mixed" not in p)
REFUSED = {
    "batch_norm": STORED_16_BIT,  # with the rule that cures it
    "sparse_embedding": OWN_OPTIMIZER,  # halfstep's optimizers take dense gradients
    "backward_of_the_loss_itself": POLICIES,  # not scaled, and not seen
    "losses_weights_that_are_not_the_models": POLICIES,  # in no model that could be saved
}


def cell(name: str, policy: str) -> tuple[str, str]:
    allowed = bound(policy) * AMPLIFIES.get(name, 1.0)
    allowed = max(allowed, DEFECTS.get((name, policy), 0.0))
    return verdict(IDIOMS[name], policy, reference(name), allowed)


@pytest.mark.parametrize(("name", "policies"), shares(IDIOMS))
def test_an_idiom_under_every_policy(name, policies):
    """No cell raises anything but a refusal, skips a step, or ends elsewhere than plain fp32."""
    found = {policy: cell(name, policy) for policy in policies}
    refused = REFUSED.get(name, ())
    wrong = {
        policy: seen
        for policy, seen in found.items()
        if seen[0] != ("refused" if policy in refused else "equal")
    }
    assert not wrong


def test_most_cells_are_equal():
    assert len(IDIOMS) >= 40
    assert sum(map(len, REFUSED.values())) <= 0.05 * len(IDIOMS) * len(POLICIES)


def test_the_bounds_would_see_an_idiom_that_is_not_honoured():
    """Most idioms change the end by more than the bound: leaving them out would be silent."""
    plain = reference("plain")
    changed = {
        name: distance(reference(name), plain)
        for name in IDIOMS
        if len(reference(name).weights) == len(plain.weights)
    }
    for policy in POLICIES:
        assert sum(way > bound(policy) for way in changed.values()) >= 35, policy
