"""Random programs of calls, run on two loss scalers side by side, compared after every call.

A program is a seed. Both sides run it on models and optimizers of their own, made alike; what a
call returned or raised, its warnings, the scaler's numbers, and every gradient, weight and
optimizer moment (bit for bit) must be the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from integrations.scaler_side import Side, outcome

LENGTH = 25
EXTREMES = [2.0**-149, 2.0**-130, 2.0**-128, 2.0**-127, 2.0**-20, 0.5, 3.0, 65536.0, 2.0**127]
ORDINARY = [0, 1, 2, 3, 4, 7]  # most programs use those that are not refused


def program(seed: int) -> tuple[dict[str, Any], list[tuple[str, tuple[Any, ...]]]]:
    """The scaler's options and the calls of one program."""
    rng = random.Random(seed)
    options = {
        "device": "cpu",
        "init_scale": rng.choice([*EXTREMES, 65536.0, 1024.0, 4.0, 1]),
        "growth_factor": rng.choice([2.0, 2.0, 1.5]),
        "backoff_factor": rng.choice([0.5, 0.5, 0.25, 2.0**-60]),
        "growth_interval": rng.choice([1, 2, 3, 2000]),
        "enabled": rng.random() > 0.06,
    }
    return options, [call for _ in range(LENGTH) for call in _calls(rng)][:LENGTH]


def _calls(rng: random.Random) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A whole iteration, more or less in order, or something odd."""
    which = rng.choice(ORDINARY) if rng.random() < 0.8 else rng.randrange(9)
    if rng.random() < 0.65:
        for _ in range(rng.choice([1, 1, 1, 2])):
            yield "scale", (rng.choice([0, 1, 2, 3]), rng.choice([0, 0, 0, 1, 2, 3, 4]))
            yield "backward", ()
        if rng.random() < 0.3:
            yield "poison", (rng.randrange(5), rng.choice([math.inf, -math.inf, math.nan]))
        if rng.random() < 0.4:
            yield "unscale_", (which,)
            if rng.random() < 0.3:
                yield "second_device", (which, rng.choice([0.0, 1.0, 1.0]))
            if rng.random() < 0.5:
                yield "clip", (which,)
        yield "step", (which,)
        if rng.random() < 0.25:
            yield "step", (rng.choice(ORDINARY),)
        if rng.random() < 0.9:
            yield "update", ()
        if rng.random() < 0.7:
            yield "zero_grad", (rng.random() < 0.7,)
        return
    scale, kind = rng.choice([*EXTREMES, 8.0]), rng.choice([0, 0, 0, 1, 1, 2, 3, 4, 5])
    factors = rng.choice([2.0, 4.0]), rng.choice([0.5, 0.0]), rng.randint(1, 3)
    odd: list[tuple[str, tuple[Any, ...]]] = [
        ("unscale_", (which,)),
        ("step", (which,)),
        ("step_with_closure", (which, rng.random() < 0.6)),
        ("update", ()),
        ("update_to", (scale, kind)),
        ("update_to", (scale, 0)),
        ("scale_nonsense", ()),
        ("get_scale", ()),
        ("is_enabled", ()),
        ("set_factors", factors),
        ("save", ()),
        ("reload", ()),
        ("restart", ()),
        ("swap", ()),
        ("load_nothing", ()),
        ("load_damaged", ()),
        ("deepcopy", ()),
        ("pickle", ()),
    ]
    yield rng.choice([*odd, ("swap", ())])


def first_difference(reference: type, ours: type, seed: int) -> str | None:
    """Run one program on both; None if they agree to the end, else where they part."""
    options, calls = program(seed)
    a, b = Side(reference, options, seed), Side(ours, options, seed)
    for number, (name, arguments) in enumerate(calls):
        if name == "swap":  # each goes on from the state that the other saved
            states = b.saved or b.scaler.state_dict(), a.saved or a.scaler.state_dict()
            results = [
                outcome(partial(side.scaler.load_state_dict, state))
                for side, state in zip((a, b), states, strict=True)
            ]
        else:
            results = [outcome(partial(getattr(side, name), *arguments)) for side in (a, b)]
        where = f"seed {seed}, call {number}, {name}{arguments}: "
        if results[0] != results[1]:
            return f"{where}{results[0]} and {results[1]}"
        seen_a, seen_b = outcome(a.observe), outcome(b.observe)
        if seen_a != seen_b:
            return f"{where}then {seen_a} and {seen_b}"
    return None
