"""How far AdamW may take two runs apart whose gradients differ by rounding alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

EPS = 1e-2
"""Adam's eps where weights of two layouts, batch cuts or CPUs are compared.

The usual 1e-8 is below the rounding noise of a gradient, and Adam divides a gradient by its own
size: a parameter whose true gradient is 0 (the key bias of attention, of which softmax ignores the
shift; a bias before a norm) then moves by up to a whole learning rate in a direction that rounding
draws, another one on every CPU. With an eps above the noise an update is continuous in the
gradient, and one bound holds for every parameter. It also sees what eps = 1e-8 hides: a gradient
that is wrong by a factor.
"""
U32 = 2.0**-24
"""The unit roundoff of fp32: half the gap between 1 and the next number."""
GRADIENT_ERROR = 16 * U32
"""An fp32 gradient of these small models off fp64's, relative to the length of the whole gradient.

Some 50 roundings lie between an input and a gradient, and add up as the root of their number;
tests/distributed/test_parity.py holds fp32 gradients to this bound against fp64.
"""


def most(betas: tuple[float, float], step: int) -> float:
    """The largest |m| / sqrt(v) that any gradients reach in Adam's bias-corrected step ``step``.

    m and v are means of g and of g squared with weights a and b; by Cauchy and Schwarz
    m^2 <= v sum(a^2 / b).
    """
    beta1, beta2 = betas
    ages = range(step)
    a = [(1 - beta1) * beta1**k / (1 - beta1**step) for k in ages]
    b = [(1 - beta2) * beta2**k / (1 - beta2**step) for k in ages]
    return math.sqrt(sum(x * x / y for x, y in zip(a, b, strict=True)))


def apart(
    rates: Iterable[float],
    noise: float,
    *,
    eps: float = EPS,
    betas: tuple[float, float] = (0.9, 0.95),
) -> float:
    """The furthest that one weight of two runs of AdamW can be apart after these steps.

    Args:
        rates: The learning rate of every step.
        noise: How far an element of a gradient of one run is from the other's, at most, as the
            optimizer gets it (clipped).
        eps: Adam's.
        betas: Adam's.

    m moves by at most ``noise``, as a mean of what moved by that; so does sqrt(v), a 2-norm, by the
    triangle inequality. So m / (sqrt(v) + eps) moves by at most noise / eps from its numerator,
    and |m| / sqrt(v) times that from its denominator. No update is further than that from the
    other's, and no two are further apart than their sizes together.
    """
    total = 0.0
    for step, rate in enumerate(rates, start=1):
        largest = most(betas, step)
        total += rate * min((1 + largest) * noise / eps, 2 * largest)
    return total


def assert_near(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    rates: Iterable[float],
    *,
    max_norm: float = 1.0,
    eps: float = EPS,
    betas: tuple[float, float] = (0.9, 0.95),
) -> None:
    """Check fp32 weights of two runs that saw the same batches, summed in another order.

    Args:
        found: Weights by name.
        wanted: The other run's.
        rates: The learning rate of every step.
        max_norm: An upper bound of the length of every gradient, as clipping gives it.
        eps: Adam's in both runs.
        betas: Adam's.
    """
    rates = list(rates)
    # two runs, each off by its own roundings; and once more for weights that are already apart:
    # their gradients differ by the curvature times that distance, which is below the noise here
    bound = apart(rates, 2 * 2 * GRADIENT_ERROR * max_norm, eps=eps, betas=betas)
    # and in each run two roundings of the weight itself a step, of decay and of update
    roundings = 2 * 2 * len(rates) * U32
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        off = (found[name].double() - tensor.double()).abs()
        allowed = bound + roundings * tensor.double().abs()
        assert bool((off <= allowed).all()), (name, float((off - allowed).max()), bound)
