"""The compiled kernels beside torch in what surrounds them: layouts, defaults, frozen operands."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.kernels import rows
from halfstep.kernels.library import loaded
from halfstep.precision.casting import autocast, op_casts

pytestmark = pytest.mark.skipif(isinstance(loaded(), str), reason=f"no kernels: {loaded()}")
LOW = torch.bfloat16
MANY = 4, op_casts.MANY // 4


@pytest.fixture(autouse=True)
def native_bf16(monkeypatch):
    """As on a CPU with bf16 instructions, so that products are not simulated."""
    monkeypatch.setattr(autocast, "cpu_has_bf16", lambda: True)


def mixed():
    """The forward's context under bf16-mixed."""
    model = nn.Linear(2, 2, dtype=torch.float32)
    precision = halfstep.Precision("bf16-mixed", model, torch.optim.SGD(model.parameters(), 1.0))
    return precision.autocast()


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# --- memory as it lies ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torchs_default_dtype_changes_nothing(dtype):
    """Buffers are fp32 whatever torch's default is: a smaller one would be overrun."""

    def everything():
        torch.manual_seed(0)
        found = []
        with mixed():
            q, k, v = (torch.randn(2, 4, 64, 32, dtype=LOW, requires_grad=True) for _ in range(3))
            seen = torch.ones(64, 64, dtype=torch.bool).tril()
            out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p=0.25)
            found += [out, *torch.autograd.grad(out.float().sum(), (q, k, v))]
            x = torch.randn(*MANY, dtype=LOW, requires_grad=True)
            gain = torch.ones(MANY[1], dtype=torch.float32, requires_grad=True)
            y = F.layer_norm(x, (MANY[1],), gain)
            found += [y, *torch.autograd.grad(y.float().square().sum(), (x, gain))]
            y = F.rms_norm(x, (MANY[1],), gain)
            found += [y, *torch.autograd.grad(y.float().square().sum(), (x, gain))]
            loss = F.cross_entropy(x, torch.tensor([1, -100, 3, 4]))
            found += [loss, *torch.autograd.grad(loss, x)]
            found.append(F.dropout(x, 0.5))
        return found

    plain = everything()
    with default_dtype(dtype):
        other = everything()
    for a, b in zip(plain, other, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# --- second derivatives and batches of gradients --------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: rows.gelu_tanh(x),
        lambda x: rows.norm(x, None, None, 1e-5, LOW),
        lambda x: rows.cross_entropy(x, torch.tensor([0, 1, 2]), -100).to(LOW),
    ],
    ids=["gelu", "norm", "cross_entropy"],
)
def test_a_batch_of_gradients(function):
    """``is_grads_batched`` calls the backward under vmap, whose tensors have no memory."""
    x = torch.randn(3, 8, dtype=LOW, requires_grad=True)
    y = function(x)
    upstream = torch.randn(5, *y.shape).to(LOW)
    (batched,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in upstream]
    # torch's operations and the kernel round the same sums in another order: a unit of bf16
    torch.testing.assert_close(batched, torch.stack(single), rtol=2**-7, atol=2**-9)
