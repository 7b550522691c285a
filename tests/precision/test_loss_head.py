"""The loss head against a NumPy fp64 oracle, in every dtype, and its promises about memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import linear_cross_entropy
from halfstep.errors import DataError
from halfstep.precision import loss_head

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
UNIT[torch.float16] = 2.0**-11
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def oracle(x, w, targets):
    """Loss sum, dX and dW in fp64, written from the definition."""
    x, w = x.detach().double().numpy(), w.detach().double().numpy()
    z = x @ w.T
    loss, error = 0.0, np.zeros_like(z)
    for n, t in enumerate(targets.tolist()):
        if t == -100:
            continue
        top = z[n].max()
        e = np.exp(z[n] - top)
        loss += math.log(e.sum()) + top - z[n, t]
        error[n] = e / e.sum()
        error[n, t] -= 1.0
    return loss, torch.from_numpy(error @ w), torch.from_numpy(error.T @ x)


def bounds(x, w, dtype):
    """How far loss, dX and dW may be from the oracle: rounding, worst case, to first order.

    A logit is a sum of D products in fp32 (D units of fp32 of the sum of magnitudes), rounded to
    the dtype (one unit), and softmax works on it in fp32 (a few units): ``dz`` in all. A loss moves
    by at most 2 dz. A row of E moves by at most 2 dz (its positive part, which sums to at most 1)
    plus one unit of rounding of entries that sum to at most 2 in magnitude; times the largest
    operand, plus the rounding and the fp32 accumulation of the result, twice for margin.
    """
    u, u32 = UNIT[dtype], UNIT[torch.float32]
    x, w = x.detach().double().abs(), w.detach().double().abs()
    n, v = x.shape[0], w.shape[0]
    z_max = (x @ w.T).max().item() if n else 0.0
    dz = u * z_max + u32 * x.shape[1] * z_max + 8 * u32 * (z_max + math.log(v) + 1)
    row = 2 * math.expm1(min(2 * dz, 1.0)) + 8 * u
    loss = n * (2 * dz + u32 * 4 * (z_max + math.log(v) + 1))
    grad_x = w.max().item() * (row + 4 * v * u32)
    grad_w = x.sum(0).max().item() * (row + 4 * n * u32) if n else 0.0
    return loss, grad_x, grad_w


def problem(n, d, v, dtype, *, seed, ignored=0.2, gain=0.3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(v, d, generator=g) * gain).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=g)
    targets[torch.rand(n, generator=g) < ignored] = -100
    return x, w, targets


@contextmanager
def chunks(rows, vocab):
    """Chunks of at most so many rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_head, "MAX_ROWS", rows)
        patch.setattr(loss_head, "CHUNK_ON_GPU", rows * vocab)
        yield


def loss_sum(x, w, targets, rows=512):
    with chunks(rows, len(w)):
        return linear_cross_entropy(x, w, targets, reduction="sum")


class Recorder(TorchDispatchMode):
    """Notes every operation with the dtypes and shapes that go in and the tensor that comes out."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.calls.append((name, [t.dtype for t in tensors], out))
        return out

    def matmuls(self):
        return [c for c in self.calls if c[0] in ("mm", "addmm", "addmm_", "matmul", "bmm")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_as_near_as_a_few_roundings(dtype):
    # Sharper than the worst case above: relative in the 2-norm, where roundings average out. Three
    # of them (logits, E, result) and the logits' magnitude of about 2 leave 8 units as the bound;
    # fp32 accumulates over V and N besides, so its bound has a factor 4 more.
    x, w, targets = problem(200, 24, 67, dtype, seed=2)
    _, dx, dw = oracle(x, w, targets)
    got = loss_sum(x, w, targets, rows=20)
    got.backward()
    bound = UNIT[dtype] * (32 if dtype == torch.float32 else 8)
    assert (x.grad.double() - dx).norm() <= bound * dx.norm()
    assert (w.grad.double() - dw).norm() <= bound * dw.norm()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    n=st.integers(0, 50),
    d=st.integers(1, 9),
    v=st.integers(1, 40),
    ignored=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    rows=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_any_shape_ignore_pattern_and_chunk_size(n, d, v, ignored, rows, dtype, seed):
    x, w, targets = problem(n, d, v, dtype, seed=seed, ignored=ignored)
    loss, dx, dw = oracle(x, w, targets)
    got = loss_sum(x, w, targets, rows)
    got.backward()
    bound = bounds(x, w, dtype)
    assert got.dtype == torch.float32
    assert x.grad.dtype == w.grad.dtype == dtype
    assert abs(got.item() - loss) <= bound[0]
    assert (x.grad[targets == -100] == 0).all()
    if n:
        assert (x.grad.double() - dx).abs().max().item() <= bound[1]
        assert (w.grad.double() - dw).abs().max().item() <= bound[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_ignored_row_that_is_not_finite_leaves_everything_alone(dtype):
    x, weight, targets = problem(40, 8, 30, dtype, seed=5)
    targets[3] = -100
    clean = loss_sum(x, weight, targets)
    for value in (math.nan, math.inf):
        with torch.no_grad():
            x[3] = value
        weight.grad = x.grad = None
        got = loss_sum(x, weight, targets)
        got.backward()
        assert got.item() == clean.item()
        assert weight.grad.isfinite().all()
        assert x.grad.isfinite().all()
        assert (x.grad[3] == 0).all()


def test_the_mean_of_any_shape_with_a_bias_is_that_of_torch():
    x, weight, targets = problem(40, 8, 30, torch.float64, seed=6)
    bias = torch.randn(30, dtype=torch.float64, requires_grad=True)
    rows = x.view(4, 10, 8).transpose(0, 1)
    targets = torch.where(targets == -100, 7, targets).view(4, 10).t()
    with chunks(15, 30):
        own = linear_cross_entropy(rows, weight, targets, bias=bias, ignore_index=7)
    logits = F.linear(rows, weight, bias).flatten(0, 1)
    torchs = F.cross_entropy(logits, targets.flatten(), ignore_index=7)
    parts = (x, weight, bias)
    pairs = zip(*(torch.autograd.grad(loss * 3, parts) for loss in (own, torchs)), strict=True)
    for got, want in ((own, torchs), *pairs):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert linear_cross_entropy(rows, weight, targets * 0 - 100).isnan()  # the mean of nothing


def test_wrong_arguments_are_refused():
    x, weight = torch.randn(4, 8), torch.randn(9, 8)
    with pytest.raises(DataError, match=r"torch\.int32; allowed: torch\.int64"):
        loss_sum(x, weight, torch.arange(4, dtype=torch.int32))
    with pytest.raises(DataError, match=r"shape \(3,\) and reduction 'sum'; allowed: \(4,\)"):
        loss_sum(x, weight, torch.arange(3))
    with pytest.raises(DataError, match="'mean' or 'sum'"):
        linear_cross_entropy(x, weight, torch.arange(4), reduction="none")


# --- fp16: range -------------------------------------------------------------------------------


@pytest.mark.parametrize("log2_scale", [-12, 0, 16])
def test_fp16_overflows_where_the_true_gradient_does_and_nowhere_else(log2_scale):
    x, w, targets = problem(96, 8, 40, torch.float16, seed=9, gain=1.0)
    _, dx, dw = oracle(x, w, targets)
    scale = 2.0**log2_scale
    got = loss_sum(x, w, targets)
    (got * scale).backward()
    for grad, true in ((x.grad.double(), dx * scale), (w.grad.double(), dw * scale)):
        # 65520 is where fp16 rounds to inf; 1 % is ten times the error seen in the norm test above.
        must, must_not = true.abs() > 65520 * 1.01, true.abs() < 65520 * 0.99
        assert torch.isinf(grad[must]).all()
        assert torch.isfinite(grad[must_not]).all()
        assert (log2_scale == 16) == bool(must.any())  # the case is as extreme as it says


@pytest.mark.parametrize("log2_scale", [-12, 0, 16])
def test_fp16_gradient_of_a_confident_model_keeps_its_digits(log2_scale):
    # Each token but the target has 1e-7, of which fp16 would hold two bits in an unscaled E.
    g = torch.Generator().manual_seed(10)
    w = torch.randn(40, 40, generator=g).half().float()
    w = torch.linalg.qr(w)[0].half()
    targets = torch.randint(0, 40, (96,), generator=g)
    x = (w[targets].float() * 16).half()
    x32, w32 = x.float().requires_grad_(), w.float().requires_grad_()  # fp32-stored, autocast fp16
    loss, dx, dw = oracle(x32, w32, targets)
    assert loss / 96 < 1e-3
    with torch.autocast("cpu", torch.float16):
        got = loss_sum(x32, w32, targets)
    (got * 2.0**log2_scale).backward()
    # A logit of 16 is rounded by up to 16 * 2^-12 = 0.4 %, and so, relatively, are all small
    # probabilities; E, result and operands add 3 * 2^-11 = 0.15 %. Twice, for margin.
    for grad, true in ((x32.grad, dx), (w32.grad, dw)):
        true = true * 2.0**log2_scale
        assert (grad.double() - true).norm() <= 0.011 * true.norm()


def test_fp16_sum_of_many_like_tokens_does_not_overflow_before_its_scale():
    # Each chunk of 500 rows pushes one row of W by 200: 1e5, beyond fp16, until the mean is taken.
    x = torch.full((4000, 4), 200.0, dtype=torch.float16, requires_grad=True)
    w = torch.zeros(50, 4, dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(4000, dtype=torch.int64)
    got = loss_sum(x, w, targets, rows=500)
    (got / 4000).backward()
    _, _, dw = oracle(x, w, targets)
    assert dw.abs().max() > 65504 * 8
    # 4 units of fp16: E, the result of each chunk's matmul, the mean, and the final cast.
    assert (w.grad.double() - dw / 4000).abs().max() <= 4 * 2.0**-11 * (dw / 4000).abs().max()


# --- autograd ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_twice_gives_the_same_gradients(dtype):
    x, w, targets = problem(40, 8, 30, dtype, seed=12)
    with chunks(20, 30):
        got = linear_cross_entropy(x, w, targets)
        first = torch.autograd.grad(got * 0.5, (x, w), retain_graph=True)
        second = torch.autograd.grad(got * 0.5, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivative_is_refused():
    x, w, targets = problem(5, 4, 6, torch.float32, seed=13)
    got = loss_sum(x, w, targets)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(got, x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func use F\.cross_entropy"):
        torch.func.grad(lambda w: linear_cross_entropy(x, w, targets))(w)


@pytest.mark.parametrize(("need_x", "need_w"), [(True, False), (False, True), (False, False)])
def test_no_gradient_that_nobody_needs_is_computed(need_x, need_w):
    x, w, targets = problem(40, 8, 30, torch.bfloat16, seed=14)
    x.requires_grad_(need_x)
    w.requires_grad_(need_w)
    with Recorder() as seen:
        got = loss_sum(x, w, targets)
    assert len(seen.matmuls()) == 1 + need_x + need_w
    assert got.requires_grad == (need_x or need_w)
    if got.requires_grad:
        got.backward()
        _, dx, dw = oracle(x, w, targets)
        bound = bounds(x, w, torch.bfloat16)
        for t, true, limit in ((x, dx, bound[1]), (w, dw, bound[2])):
            assert (t.grad is not None) == t.requires_grad
            if t.grad is not None:
                assert (t.grad.double() - true).abs().max().item() <= limit


# --- dtypes, memory, synchronisation -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_decides_the_dtype_of_every_matmul(dtype):
    x, w, targets = problem(40, 8, 30, torch.float32, seed=16)
    with Recorder() as seen:
        with torch.autocast("cpu", dtype):
            got = loss_sum(x, w, targets, rows=20)
        got.backward()
    assert len(seen.matmuls()) == 6  # 2 chunks of logits, dX, dW
    for name, dtypes, out in seen.matmuls():
        assert name == "mm"
        assert {*dtypes, out.dtype} == {dtype}
    assert x.grad.dtype == w.grad.dtype == torch.float32
    loss, dx, dw = oracle(x.to(dtype), w.to(dtype), targets)
    bound = bounds(x, w, dtype)
    assert abs(got.item() - loss) <= bound[0]
    assert (x.grad.double() - dx).abs().max().item() <= bound[1]
    assert (w.grad.double() - dw).abs().max().item() <= bound[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_more_than_a_chunk_of_logits_exists_and_the_host_never_waits(dtype):
    n, v, rows = 300, 200, 30
    x, w, targets = problem(n, 8, v, dtype, seed=19)
    with Recorder() as seen:
        got = loss_sum(x, w, targets, rows=rows)
        got.backward()
    wide = [out for _, _, out in seen.calls if isinstance(out, torch.Tensor) and v in out.shape[1:]]
    assert wide  # chunks were seen at all
    assert max(out.shape[0] for out in wide) == rows
    names = {name for name, _, _ in seen.calls}
    # What .item(), bool() and boolean masks dispatch to.
    assert not names & {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awkward_rows_of_logits(dtype):
    huge, masked, sure, short, unlikely = logits = torch.randn(5, 5003).to(dtype)
    huge[:] *= 9000
    masked[:4500] = -math.inf  # more than a block
    sure[41] = 30
    short[7], unlikely[8], unlikely[9] = -40, 45, 0
    targets = torch.tensor([5002, 4600, 41, 7, 9])
    z = logits.double()
    losses = F.cross_entropy(z, targets, reduction="none")
    unit = loss_head.FP16_UNIT if dtype == torch.float16 else 1.0
    errors = (z.softmax(1) - F.one_hot(targets, 5003)) * unit
    padded = logits.new_full((5, 5008), math.nan)[:, :5003].copy_(logits)
    own, made = loss_head._losses_and_errors(padded, targets, -100, unit, True)
    torch.testing.assert_close(own.flatten().double(), losses, rtol=2e-6, atol=1e-5)
    rtol = 3e-6 + 2.1 * UNIT[dtype]  # Triton's interpreter cuts bf16 off
    torch.testing.assert_close(made.double(), errors, rtol=rtol, atol=2e-8 * unit)


# --- compiled, and on a GPU ----------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_whole_with_the_same_bits(autocast):
    x, w, targets = problem(60, 8, 30, torch.float32, seed=22)

    def loss_of(x, w, targets):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return linear_cross_entropy(x * 2, w, targets)

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    (own, *gradients), again = (
        (loss, *torch.autograd.grad(loss * 3, (x, w)))
        for loss in (loss_of(x, w, targets), compiled(x, w, targets))
    )
    assert all(torch.equal(a, b) for a, b in zip((own, *gradients), again, strict=True))
    with torch.no_grad():
        assert torch.equal(compiled(x, w, targets), own)


@pytest.mark.slow
@pytest.mark.skipif(loss_head._kernels("cuda", torch.float32) is None, reason="NO TRITON")
def test_the_kernel_in_the_interpreter():
    words = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", __file__]
    left_out = "not interpreter and not compiles and not cuda and not like_tokens"
    done = subprocess.run(
        [*words, "-W", "ignore::RuntimeWarning", "-k", left_out],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout


# --- errors --------------------------------------------------------------------------------------


def test_a_target_out_of_range_is_named():
    for dtype in (torch.float32, torch.bfloat16):
        x, w, targets = problem(40, 8, 30, dtype, seed=20)
        for bad in (30, -1, 10**9):
            targets[17] = bad
            with pytest.raises(DataError, match=rf"target {bad} at row 17 .* 0 to 29, or -100"):
                loss_sum(x, w, targets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NEEDS AN NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_matches_the_definition_without_a_sync(dtype, no_synchronisation):
    x, w, targets = problem(400, 64, 300, dtype, seed=21)
    loss, dx, dw = oracle(x, w, targets)
    bound = bounds(x, w, dtype)
    gx, gw = (t.detach().cuda().requires_grad_() for t in (x, w))
    targets = targets.cuda()
    with no_synchronisation(), Recorder() as seen:
        got = loss_sum(gx, gw, targets, rows=100)
        got.backward()
    assert {out.dtype for _, _, out in seen.calls if 300 in out.shape[1:]} == {dtype}
    assert abs(got.item() - loss) <= bound[0]
    assert (gx.grad.cpu().double() - dx).abs().max().item() <= bound[1]
    assert (gw.grad.cpu().double() - dw).abs().max().item() <= bound[2]


@pytest.mark.parametrize("rows", [0, 5])
def test_where_no_token_counts_gradients_are_0(rows):
    x, w = (torch.randn(n, 8, requires_grad=True) for n in (rows, 11))
    loss = linear_cross_entropy(x, w, torch.full((rows,), -100))
    loss.backward()
    assert loss.isnan()
    assert not w.grad.any()


def test_a_loss_whose_gradient_is_none_has_none():
    x, w = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    target = torch.tensor([1, 2, -100])
    assert torch.autograd.gradcheck(lambda *a: linear_cross_entropy(*a, target), (x, w))
