"""Error bounds of fp16 products with fp32 accumulation, from the standard model of rounding.

A sum of K exact products, accumulated in fp32 in any order, errs by at most
``(K - 1) u / (1 - (K - 1) u) * sum |a b|`` with u = 2^-24 (Higham, "Accuracy and Stability of
Numerical Algorithms", 2nd ed., 3.1); ``K * 2^-24 * sum |a b|`` is larger for every K used here,
up to a factor (1 + K u) that the K - 1 leaves room for. Products of two fp16 numbers have 22
significant bits, so they are exact in fp32. One rounding to fp16 adds half a gap.
"""

import numpy as np
import torch
from torch import Tensor

from reference import floats

U32 = 2.0**-24
"""Unit roundoff of fp32: half the gap above 1."""
U16 = 2.0**-11
"""Unit roundoff of fp16."""


def fp16_gap(exact: Tensor, slack: Tensor) -> Tensor:
    """The fp16 gap at the far end of an interval of half-width ``slack`` around fp64 numbers."""
    far = (exact.abs() + slack).clamp(max=65504.0).cpu().numpy()
    return torch.from_numpy(np.asarray(floats.gap(far, floats.FP16)))


def assert_within(got: Tensor, exact: Tensor, slack: Tensor, gaps: float, what: str = "") -> None:
    """Fail unless every |got - exact| <= gaps * (fp16 gap there) + slack; all in fp64."""
    error = (got.double() - exact).abs()
    allowed = gaps * fp16_gap(exact, slack) + slack
    worst = int((error - allowed).argmax())
    assert bool((error <= allowed).all()), (
        f"{what}: element {worst}: got {got.flatten()[worst]!r}, exact {exact.flatten()[worst]!r}, "
        f"error {error.flatten()[worst]:.3e} > allowed {allowed.flatten()[worst]:.3e}"
    )
