"""The random Hadamard matrix that spreads outliers over 16 tokens before a weight's gradient.

Both operands of the product are multiplied by it, and it cancels there, since it is orthogonal::

    y = H S x / 4    S the diagonal matrix of fixed random signs, H Sylvester's matrix of +-1

The arithmetic is defined here, so that every device and kernel has the same bits: ``x`` times
+-1/4, four rounds of sums and differences in fp32 (of tokens 1, 2, 4 and 8 apart), and one rounding
to bf16. Each term of a number goes through four additions, so that before the last rounding the
number is off by at most 4 u / (1 - 4 u) times the sum of magnitudes, u = 2^-24.

**Source:** Sylvester's construction; arXiv 2509.25149, appendix C.4, for the 16 tokens;
TransformerEngine ``nvfp4_tensor.py``, ``get_wgrad_sign_vector``, for the signs; Higham, "Accuracy
and Stability of Numerical Algorithms", 2nd ed., 4.2, for the bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 16
"""How many tokens are mixed."""

SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], device="cpu") / 4.0
"""fp32, (16,): the sign of each token, times the matrix's norm."""


def mixed(x_NF: Tensor) -> Tensor:
    """Numbers whose tokens are mixed, 16 at a time.

    Args:
        x_NF: bf16, (N tokens, F features); N a multiple of 16.

    Returns:
        bf16, of the same shape.
    """
    blocks, features = x_NF.shape[0] // TOKENS, x_NF.shape[1]
    y = x_NF.reshape(blocks, TOKENS, features).float() * SIGNS.to(x_NF.device)[:, None]
    for apart in (1, 2, 4, 8):
        a, b = y.reshape(blocks, TOKENS // 2 // apart, 2, apart, features).unbind(2)
        y = torch.stack((a + b, a - b), 2)
    return y.to(x_NF.dtype).reshape(x_NF.shape)
