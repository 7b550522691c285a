"""The norm by the compiled kernel: one read of the gradients, fp32 squares, fp64 sums."""

import math

import pytest
import torch

from halfstep import Precision
from halfstep.optim.optimizers import AdamW
from halfstep.precision.scaling.gradients import global_norm


def gradients(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(), (1,), (127,), (128,), (129,), (8192,), (8193,), (300, 211), (0,)]
    return [(torch.randn(s, generator=generator) * 3).to(dtype) for s in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_norm_of_the_definition(kernel, dtype):
    tensors = gradients(dtype)
    exact = math.sqrt(math.fsum((t.double().numpy() ** 2).sum() for t in tensors))
    # 8 additions in fp32 within a block, all else in fp64, and the result in fp32
    assert kernel.norm(tensors).item() == pytest.approx(exact, rel=9 * 2.0**-24)
    assert global_norm(tensors).item() == pytest.approx(exact, rel=1e-5)


def test_the_number_of_threads_changes_no_bit(kernel):
    tensors = [torch.randn(500_001), torch.randn(70_000).half()]
    before = torch.get_num_threads()
    try:
        found = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(kernel.norm(tensors).item())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 128, 8192, 9999])
def test_one_number_that_is_not_finite_is_seen_anywhere(kernel, dtype, bad, place):
    tensor = torch.zeros(10_000, dtype=dtype)
    tensor[place] = bad
    assert not math.isfinite(kernel.norm([torch.ones(5), tensor]))


def test_squares_beyond_fp32_are_no_overflow_after_a_closer_look(kernel):
    for size in (1e30, 1e-22, 1e-30):  # whose squares are inf, subnormal and 0
        model = torch.nn.Linear(10, 20, bias=False)
        optimizer = AdamW(model.parameters(), lr=0.1)  # whose kernel measures
        precision = Precision("fp32", model, optimizer)
        model.weight.grad = torch.full((20, 10), size)
        judged = precision._steps.judge(torch.ones(()), precision.masters.gradients())
        assert not judged.broken
        assert judged.norm == pytest.approx(size * math.sqrt(200), rel=1e-6, abs=0)
