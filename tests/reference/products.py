"""Error bounds of 16-bit products with fp32 accumulation, from the standard model of rounding.

A sum of K exact products, accumulated in fp32 in any order, errs by at most
``(K - 1) u / (1 - (K - 1) u) * sum |a b|`` with u = 2^-24 (Higham, "Accuracy and Stability of
Numerical Algorithms", 2nd ed., 3.1); ``K * 2^-24 * sum |a b|`` is larger for every K used here,
up to a factor (1 + K u) that the K - 1 leaves room for. Products of two fp16 numbers have 22
significant bits and of two bf16 numbers 16, so they are exact in fp32. One rounding to 16 bits adds
half a gap.
"""

import numpy as np
import torch
from torch import Tensor

from reference import floats

U32 = 2.0**-24
"""Unit roundoff of fp32: half the gap above 1."""
U16 = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Unit roundoff of the 16-bit formats."""
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
"""Half the gap above 0: what a rounding among the subnormal numbers errs by."""
_TABLES = {torch.float16: floats.FP16, torch.bfloat16: floats.BF16}


def assert_within(
    got: Tensor,
    exact: Tensor,
    slack: Tensor,
    gaps: float,
    what: str = "",
    low: torch.dtype | None = None,
) -> None:
    """Fail unless every |got - exact| <= gaps * (gap there) + slack; all in fp64.

    The gap is that at the far end of the interval of half-width ``slack``, in the format ``low``
    (of ``got`` where it is not said).
    """
    values = _TABLES[low or got.dtype]
    values = values[np.isfinite(values)]
    far = (exact.abs() + slack).clamp(max=float(values[-1])).cpu().numpy()
    gap = torch.from_numpy(np.asarray(floats.gap(far, values)))
    error = (got.double() - exact).abs()
    allowed = gaps * gap + slack
    worst = int((error - allowed).argmax())
    assert bool((error <= allowed).all()), (
        f"{what}: element {worst}: got {got.flatten()[worst]!r}, exact {exact.flatten()[worst]!r}, "
        f"error {error.flatten()[worst]:.3e} > allowed {allowed.flatten()[worst]:.3e}"
    )
