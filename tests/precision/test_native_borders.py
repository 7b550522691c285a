"""The compiled kernels beside torch in what surrounds them: layouts, defaults, frozen operands."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfstep
from halfstep.kernels import rows
from halfstep.kernels.library import loaded
from halfstep.precision.casting import autocast, native_ops

pytestmark = pytest.mark.skipif(isinstance(loaded(), str), reason=f"no kernels: {loaded()}")
LOW = torch.bfloat16
MANY = 4, native_ops.MANY // 4


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


@pytest.mark.parametrize("layout", ["one number for all", "a column"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_gain_of_any_layout(norm, layout):
    width = native_ops.MANY // 8
    x = torch.randn(8, width).to(LOW).requires_grad_()
    held = torch.randn(1) if layout == "one number for all" else torch.randn(width, 2)
    gain = held.expand(width) if layout == "one number for all" else held[:, 1]
    gain = gain.detach().requires_grad_()
    assert not gain.is_contiguous()

    def results(of):
        with mixed():
            y = (
                F.layer_norm(x, (width,), of)
                if norm == "layer_norm"
                else F.rms_norm(x, (width,), of)
            )
        return y, *torch.autograd.grad(y.float().square().sum(), (x, of))

    dense = gain.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    for a, b in zip(results(gain), results(dense), strict=True):
        assert torch.equal(a, b)


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


def test_torchs_default_device_changes_nothing():
    """Memory for a kernel is the CPU's, whatever device new tensors get."""
    x = torch.randn(*MANY, dtype=LOW)
    q = torch.randn(1, 2, 64, 32, dtype=LOW)
    seen = torch.ones(64, 64, dtype=torch.bool)
    targets = torch.tensor([1, -100, 3, 4])

    def everything():
        with mixed(), torch.no_grad():
            return [
                F.scaled_dot_product_attention(q, q, q, seen),
                F.layer_norm(x, (MANY[1],)),
                F.cross_entropy(x, targets),
                F.dropout(x, 0.5).sum() * 0,
            ]

    plain = everything()
    precision = mixed()  # made before: its own model is on the CPU
    with torch.device("meta"), precision, torch.no_grad():
        other = [
            F.scaled_dot_product_attention(q, q, q, seen),
            F.layer_norm(x, (MANY[1],)),
            F.cross_entropy(x, targets),
            F.dropout(x, 0.5).sum() * 0,
        ]
    for a, b in zip(plain, other, strict=True):
        assert b.device.type == "cpu"
        assert torch.equal(a, b)


# --- arguments that torch knows and a kernel does not ---------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64], ids=str)
def test_a_mask_that_torch_refuses_is_refused(dtype):
    q = torch.randn(1, 2, 16, 32)
    mask = torch.ones(1, 1, 1, 16, dtype=dtype)
    with mixed(), pytest.raises(RuntimeError, match="attn_mask dtype"):
        F.scaled_dot_product_attention(q, q, q, mask)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"size_average": False}, "sum"),
        ({"reduce": False}, "none"),
        ({"size_average": True}, "mean"),
        ({"reduce": True}, "mean"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_the_old_names_of_reductions(old, new):
    x, targets = torch.randn(*MANY), torch.tensor([1, -100, 3, 4])
    with mixed():
        found = F.cross_entropy(x, targets, **old)
        true = F.cross_entropy(x, targets, reduction=new)
    # the two paths add in another order: a few units of fp32
    torch.testing.assert_close(found, true, rtol=2e-6, atol=0.0)


# --- second derivatives and batches of gradients --------------------------------------------------


def penalty(y, x):
    """A gradient penalty's own gradient."""
    (slope,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    slope.float().square().sum().backward()
    return x.grad


@pytest.mark.parametrize("frozen", ["gain", "keys"])
def test_a_second_derivative_past_frozen_operands(frozen):
    def found(of_torch):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 32, 16, requires_grad=True)
        gain = torch.rand(16)
        key = torch.randn(2, 3, 32, 16)
        # torch's own second derivative of attention is that of its definition
        with sdpa_kernel(SDPBackend.MATH) if of_torch else mixed():
            if frozen == "gain":
                y = F.rms_norm(x, (16,), gain, 1e-5)
            else:
                y = F.scaled_dot_product_attention(x, key, key)
        return penalty(y, x)

    ours, exact = found(False), found(True)
    # bf16 has 8 digits; the penalty is a product of a few rounded factors
    assert float((ours - exact).norm()) <= (2**-6) * float(exact.norm())


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


def test_a_batch_of_gradients_through_dropout():
    x = torch.randn(100, dtype=LOW, requires_grad=True)
    y = rows.dropout(x, 0.5)
    upstream = torch.ones(3, 100, dtype=LOW)
    (batched,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True, retain_graph=True)
    assert torch.equal(batched[0], torch.where(y == 0, 0.0, 2.0).to(LOW))
    assert torch.equal(batched[0], batched[2])
