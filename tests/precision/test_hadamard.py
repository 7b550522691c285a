"""The mixing of tokens before a weight's gradient in NVFP4, against its definition in fp64."""

import numpy as np
import torch

from halfstep.precision.low_bit.linear import mixed
from reference.blocks import bell

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
MATRIX = (
    np.array([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) * SIGNS / 4
)


def spread(rows, columns):
    """Numbers over 40 binary exponents, so that sums of 16 are not exact in fp32."""
    x = bell(11, rows, columns) * np.exp2(bell(12, rows, columns) * 8)
    return torch.from_numpy(x).bfloat16()


def test_the_matrix_is_orthogonal_and_cancels_in_the_product():
    assert np.array_equal(MATRIX @ MATRIX.T, np.eye(16))
    assert np.array_equal(mixed(torch.eye(16).bfloat16()).double().numpy(), MATRIX)
    # numbers of few bits stay exact when they are mixed, so the product without rounding is equal
    x = torch.randint(-3, 4, (32, 8)).bfloat16()
    y = mixed(x).double()
    assert torch.equal(y.T @ y, x.double().T @ x.double())


def test_the_error_is_that_of_four_sums_and_one_rounding():
    x = spread(512, 64)
    numbers = x.double().numpy().reshape(-1, 16, 64)
    exact, size = MATRIX @ numbers, abs(MATRIX) @ abs(numbers)
    sums = 4 * 2.0**-24 / (1 - 4 * 2.0**-24) * size
    bound = sums + 2.0**-8 * (abs(exact) + sums)  # half a gap of 8 significant bits
    error = abs(mixed(x).double().numpy().reshape(exact.shape) - exact)
    assert (error <= bound).all()
    assert (error > 0.9 * bound).any()
    assert (mixed(x).float() == mixed(x.flip(1)).flip(1).float()).all()
