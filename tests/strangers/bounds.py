"""How far a policy may end from fp32: some times as far as it does in loops without any idiom."""

from __future__ import annotations

from functools import cache

from strangers.idioms import IDIOMS
from strangers.loops import Outcome, distance, run

# Loops without any idiom, whose distance from fp32 is the format's own.
CALM = ("plain", "accumulate", "clip_by_argument")
# Another order of operations, or another few steps, may add up to some times as much.
MARGIN = 4.0


@cache
def reference(name: str) -> Outcome:
    return run(IDIOMS[name], None)


@cache
def bound(policy: str) -> float:
    if policy == "fp32":
        return 1e-5  # the same operations, but for sums of squares in another order
    return MARGIN * max(distance(run(IDIOMS[name], policy), reference(name)) for name in CALM)
