"""The product of bf16 matrices with fp32 scales of blocks, against exact sums in fp64."""

import pytest
import torch

from halfstep.kernels.blocks import has_products, kernel, product_by_blocks

LENGTH = 128


@pytest.fixture(autouse=True)
def compiled():
    if isinstance(kernel(), str):
        pytest.skip(f"no compiled kernel: {kernel()}")


def operand(rows, k, seed, turned):
    """Numbers and scales over several exponents, adjacent along K or, turned, along the rows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, k, generator=generator).bfloat16()
    scales = torch.randn(rows, k // LENGTH, generator=generator).mul(3).exp2()
    return [x.t().contiguous().t() if turned else x for x in (values, scales)]


def exact(values, scales):
    return values.double() * scales.double().repeat_interleave(LENGTH, 1)


@pytest.mark.parametrize("shape", [(1, 128, 1), (49, 256, 33), (12, 384, 70), (100, 128, 32)])
@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_is_within_the_bound_of_the_exact_one(shape, turned, threads):
    m, k, n = shape
    a, b = operand(m, k, 1, turned[0]), operand(n, k, 2, turned[1])
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = product_by_blocks(a, b, LENGTH, bias).double()
        without = product_by_blocks(a, b, LENGTH, None).double()
    finally:
        torch.set_num_threads(before)
    x, y = exact(*a), exact(*b)
    # fp32 sums of K numbers, three roundings by scales and one of the bias; then bf16's half gap
    sums = (k + 4) * 2.0**-24 * (x.abs() @ y.abs().t() + bias.double().abs())
    for got, want in ((found, x @ y.t() + bias.double()), (without, x @ y.t())):
        assert ((got - want).abs() <= sums + 2.0**-8 * (want.abs() + sums)).all()
    # the bound is so tight that a product of 384 terms misses one
    lost = without - x[:, 1:] @ y[:, 1:].t()
    missed = lost.abs() > sums + 2.0**-8 * (without.abs() + sums)
    assert m < 12 or missed.double().mean() > 0.3


def test_what_is_not_finite_stays_in_its_row_and_column():
    a, b = operand(20, 256, 1, False), operand(30, 256, 2, False)
    a[0][3, 7], b[1][5, 1] = torch.nan, torch.inf
    found = product_by_blocks(a, b, LENGTH, None)
    assert found[3].isnan().all()
    assert not found[:, 5].isfinite().any()
    assert found.isfinite().sum() == 19 * 29


def test_a_mode_that_watches_products_gets_those_of_torch():
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        pass

    with Watch():
        assert not has_products()
