"""Norm, finiteness and clipping against fp64 and against torch."""

import math

import pytest
import torch

from halfstep.precision.scaling.gradients import (
    NonFinite,
    Progress,
    exact_global_norm,
    find_nonfinite,
    global_norm,
    is_finite,
)
from halfstep.precision.scaling.loss_scale import LossScaleConfig

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _sparse_tensors_are_checked():
    """Opt in explicitly: torch warns of sparse tensors made by a process that never chose."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fp64_norm(gradients) -> float:
    dense = [g.to_dense() if g.is_sparse else g for g in gradients]
    return math.sqrt(sum(float(g.double().square().sum()) for g in dense))


def sparse(dtype=torch.float32) -> torch.Tensor:
    """Rows 0 and 3 of five, row 3 given twice: its two entries add up."""
    return torch.sparse_coo_tensor([[0, 3, 3]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], (5, 2)).to(
        dtype
    )


# --- the norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_norm_equals_fp64(dtype, magnitude):
    gradients = [
        (magnitude * normal(*s, seed=i)).to(dtype)
        for i, s in enumerate([(100, 30), (7,), (), (3, 4, 5), (0, 4)])
    ]
    # fp32 accumulation of n = 3068 non-negative terms, and a square root: below n * 2^-24 relative
    norm = global_norm(gradients)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert float(norm) == pytest.approx(fp64_norm(gradients), rel=3068 * 2**-24, abs=0)
    # fp64: the same with 2^-53
    exact = exact_global_norm(gradients)
    assert exact.dtype == torch.float64
    assert float(exact) == pytest.approx(fp64_norm(gradients), rel=3068 * 2**-53, abs=0)


def test_norm_of_sparse_gradients_adds_up_duplicates_first():
    expected = math.sqrt(1 + 4 + (3 + 5) ** 2 + (4 + 6) ** 2 + 9)
    gradients = [sparse(), torch.tensor([3.0])]
    # five terms in fp32
    assert float(global_norm(gradients)) == pytest.approx(expected, rel=5 * 2**-24, abs=0)
    assert float(exact_global_norm(gradients)) == pytest.approx(expected, rel=5 * 2**-53, abs=0)


# --- who is not finite ----------------------------------------------------------------------------


def test_names_are_sorted_into_nan_and_inf():
    named = [
        ("fine", torch.tensor([1.0, -2.0])),
        ("huge", torch.tensor([3.4e38])),
        ("plus", torch.tensor([1.0, INF])),
        ("nan", torch.tensor([[NAN, 1.0]])),
        ("minus", torch.tensor([-INF, 0.0]).half()),
        ("both", torch.tensor([INF, NAN]).bfloat16()),
        ("empty", torch.zeros(0)),
    ]
    found = find_nonfinite(named)
    assert found == NonFinite(nan=("nan", "both"), inf=("plus", "minus", "both"))
    assert found.names == ("nan", "both", "plus", "minus")
    assert found.reason == "overflow"
    assert NonFinite(nan=("a",), inf=()).reason == "nan_gradients"
    assert NonFinite(nan=(), inf=()).reason is None
    assert find_nonfinite([]).names == ()


def test_sparse_gradients_are_looked_into():
    bad = torch.sparse_coo_tensor([[2]], [INF], (4,))
    # two finite fp16 entries whose sum is not
    overflow = torch.sparse_coo_tensor([[1, 1]], [60000.0, 60000.0], (4,)).half()
    found = find_nonfinite([("good", sparse()), ("bad", bad), ("sum", overflow)])
    assert found == NonFinite(nan=(), inf=("bad", "sum"))


# --- scaling and clipping -------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_element_makes_a_tensor_not_finite(dtype, bad):
    for place in (0, 37, 99):  # at both ends and in what vectors leave over
        x = normal(100, dtype=dtype)
        assert is_finite(x)
        x[place] = bad
        assert not is_finite(x)


@pytest.mark.parametrize(
    ("losses", "rose"),
    [
        ([6.96, 27, 50], "6.96 at step 1 to 50 at step 3"),
        ([6.96, 54.4], "6.96 at step 1 to 54.4 at step 2"),
        ([3.2] * 30 + [3.0, 11.5, 30], "3 at step 31 to 30 at step 33"),
        ([52, 1476, 1200, 1400], "52 at step 1 to 1400 at step 4"),
        ([-5, -5.2, -1, 40, 50], "-5.2 at step 2 to 50 at step 5"),
        ([], ""), ([3.0], ""), ([5, 4, 3, 3.1, 3.2], ""), ([0, 0, 0.1, 0.2], ""),
        ([3, 2.5, 2.6, 2.4, 2.6, 30], ""), ([3.0, 4.1, 4.4], ""),
        ([1, -1, 2, -2, 1.5], ""), ([11, 5, 3, 13, 14], ""),
    ],
)  # fmt: skip
def test_a_loss_that_leaves_its_past_is_told_from_noise(losses, rose):
    progress = Progress(LossScaleConfig())
    progress.losses.extend(enumerate(losses, 1))
    expected = rose and f"lower the learning rate: the loss rose from {rose}"
    assert progress.slower() == expected
