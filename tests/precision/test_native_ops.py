"""Which calls of a stranger's model the compiled kernels take, and which stay torch's."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.kernels.library import loaded
from halfstep.precision.casting import autocast, op_casts

pytestmark = pytest.mark.skipif(isinstance(loaded(), str), reason=f"no kernels: {loaded()}")


@pytest.fixture(autouse=True)
def native_bf16(monkeypatch):
    """As on a CPU with bf16 instructions, so that products are not simulated."""
    monkeypatch.setattr(autocast, "cpu_has_bf16", lambda: True)


@pytest.fixture
def taken(monkeypatch):
    """The names of functions that a kernel ran."""
    found = []

    def watch(function, kernel):
        def run(*args, **kwargs):
            result = kernel(*args, **kwargs)
            if result is not NotImplemented:
                found.append(function.__name__)
            return result

        return run

    kernels = {f: watch(f, k) for f, k in op_casts.KERNELS.items()}
    monkeypatch.setattr(op_casts, "KERNELS", kernels)
    return found


def heads(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (2, 3, 32, 16)), dtype=dtype, requires_grad=True)


FEW = 4, op_casts.MANY // 4
CALLS = {
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
        heads(), heads(), heads(), is_causal=True
    ),
    "gelu": lambda: nn.GELU("tanh")(heads(dtype=torch.bfloat16)),
    "cross_entropy": lambda: nn.CrossEntropyLoss()(heads(*FEW), torch.tensor([1, -100, 3, 4])),
    "layer_norm": lambda: nn.LayerNorm(FEW[1], dtype=torch.bfloat16)(
        heads(*FEW, dtype=torch.bfloat16)
    ),
    "rms_norm": lambda: F.rms_norm(heads(4, 9, dtype=torch.bfloat16), (9,), eps=1e-5),
}


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_under_a_policy_runs_by_its_kernel(name, policy, taken):
    kept = policy == "bf16-master" and name == "scaled_dot_product_attention"
    model = nn.Linear(2, 2)
    context = halfstep.Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with context.autocast():
        out = CALLS[name]()
    assert taken == ([] if kept else [name])  # operands in fp32 mean fp32 under 16-bit weights
    out.float().sum().backward()


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass with a way of its own to compute."""


LOW = torch.ones(4, dtype=torch.bfloat16)
LOGITS, CLASSES = torch.ones(2, 3), torch.tensor([0, 1])
MANY_LOGITS = torch.ones(2, op_casts.MANY // 2)


@contextlib.contextmanager
def many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(before)


AROUND = {
    "a mode that looks at operators": Seen,
    "attention by a kernel that was chosen": lambda: sdpa_kernel(SDPBackend.MATH),
    "fewer heads than half of the threads": many_threads,
}
attend = F.scaled_dot_product_attention
STAY = {
    "a mode that looks at operators": CALLS["gelu"],
    "attention by a kernel that was chosen": CALLS["scaled_dot_product_attention"],
    "a subclass": lambda: F.gelu(LOW.as_subclass(Own), approximate="tanh"),
    "the exact GELU": lambda: F.gelu(LOW),
    "fp32 activations": lambda: F.gelu(torch.ones(4), approximate="tanh"),
    "few logits": lambda: F.cross_entropy(LOGITS, CLASSES),
    "LayerNorm of fp32": lambda: F.layer_norm(torch.ones(*FEW), FEW[1:]),
    "a norm of two dimensions": lambda: F.rms_norm(torch.ones(2, 3), (2, 3), eps=1),
    "fp64": lambda: F.cross_entropy(MANY_LOGITS.double(), CLASSES),
    "weights of classes": lambda: F.cross_entropy(MANY_LOGITS, CLASSES, weight=MANY_LOGITS[0]),
    "smoothing": lambda: F.cross_entropy(MANY_LOGITS, CLASSES, label_smoothing=0.1),
    "probabilities": lambda: F.cross_entropy(MANY_LOGITS, MANY_LOGITS / 3),
    "a mask that learns": lambda: attend(heads(), heads(), heads(), heads(32, 32)),
    "few queries": lambda: attend(heads(2, 3, 31, 16), heads(), heads()),
    "fewer heads than half of the threads": lambda: attend(*[heads(1, 1, 32, 16)] * 3),
    "three dimensions": lambda: attend(*[heads(3, 8, 16)] * 3),
}


@pytest.mark.parametrize("case", STAY)
def test_what_stays_torchs(case, taken):
    with halfstep.autocast("bf16-mixed", "cpu"), AROUND.get(case, contextlib.nullcontext)():
        STAY[case]()
    assert taken == []


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_are_torchs(reduction):
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 50000), torch.tensor([0, 10, -100, 3, 4, 5])
    with halfstep.autocast("bf16-mixed", "cpu"):
        found = F.cross_entropy(logits, targets, reduction=reduction)
        nothing = F.cross_entropy(logits, torch.full((6,), -100), reduction=reduction)
    torch.testing.assert_close(found, F.cross_entropy(logits, targets, reduction=reduction))
    expected = F.cross_entropy(logits, torch.full((6,), -100), reduction=reduction)
    torch.testing.assert_close(nothing, expected, equal_nan=True)
