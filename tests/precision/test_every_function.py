"""Every public function of torch, on 16-bit and on mixed operands, under every kind of policy.

A result and its gradients equal those of plain fp32 on the same numbers within the format's bound,
or torch refuses the call in fp32, too. The calls are torch's own operator samples, and below them
the functions that these leave out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
import types
import unittest
from collections.abc import Collection
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from halfstep import POLICIES
from halfstep.errors import PrecisionError
from halfstep.precision.casting.autocast import Autocast

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
# which operands are 16 bits; the others are fp32, and hold the same numbers
MODES = ("all", "first", "rest")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of torch, about deprecated functions and sparse layouts
    pytest.mark.usefixtures("torch_alone"),
]


def coo(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 2, 2], [1, 0, 2, 3]]), values, (3, 4))


def csr(values: Tensor) -> Tensor:
    rows, columns = torch.tensor([0, 1, 2, 4]), torch.tensor([1, 0, 2, 3])
    return torch.sparse_csr_tensor(rows, columns, values, (3, 4))


def weights(gates: int, n: int = 2) -> tuple[tuple[int, ...], ...]:
    return ((gates * n, n), (gates * n, n), (gates * n,), (gates * n,))


def rnn(function):
    return lambda x, h, *w: function(x, h, w, True, 1, 0.0, False, False, False)


BAG, ENDS = torch.tensor([[0, 1, 2], [2, 3, 3]]), torch.tensor([2, 5], dtype=torch.int32)
# Not among torch's samples, or not with these operands: a function, and the shapes of its operands.
BY_HAND = {
    "affine_grid": (lambda x: F.affine_grid(x, (2, 1, 3, 3), align_corners=False), (2, 2, 3)),
    "binomial": (lambda n, p: torch.binomial(n.round().abs(), p.sigmoid()), (3,), (3,)),
    "chain_matmul": (torch.chain_matmul, (2, 3), (3, 4), (4, 2)),
    "conv_tbc": (torch.conv_tbc, (5, 1, 2), (3, 2, 2), (2,)),
    "convolution": (lambda x, w: torch.convolution(x, w, None, [1], [0], [1], False, [0], 1),
                    (1, 2, 5), (2, 2, 3)),
    "copy_": (lambda x, y: x.clone().copy_(y), (3,), (3,)),
    "dropout1d": (F.dropout1d, (1, 3, 4)),
    "embedding_bag": (lambda w, p: F.embedding_bag(BAG, w, per_sample_weights=p, mode="sum"),
                      (4, 3), (2, 3)),
    "fill_diagonal_": (lambda x: x.clone().fill_diagonal_(2.0), (3, 3)),
    "fold": (lambda x: F.fold(x, (3, 3), 2), (1, 4, 4)),
    "frobenius_norm": (lambda x: torch.frobenius_norm(x, [0]), (3, 3)),
    "grid_sampler": (lambda x, g: torch.grid_sampler(x, g, 0, 0, False),
                     (1, 1, 4, 4), (1, 2, 2, 2)),
    "grouped_mm": (lambda x, w: F.grouped_mm(x, w, offs=ENDS), (5, 8), (2, 8, 8)),
    "gru": (rnn(torch.gru), (3, 1, 2), (1, 1, 2), *weights(3)),
    "gru_cell": (torch.gru_cell, (3, 2), (3, 2), *weights(3)),
    "gumbel_softmax": (F.gumbel_softmax, (3, 4)),
    "gamma": (lambda x: torch._standard_gamma(x.abs() + 0.5), (3,)),
    "dirichlet": (lambda x: torch.distributions.Dirichlet(x.abs() + 0.5).rsample(), (3, 4)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True),
                (1, 1, 6, 6)),
    "interpolate": (lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
                    (1, 1, 5, 5)),
    "lp_pool1d": (lambda x: F.lp_pool1d(x, 2, 2), (1, 1, 4)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 2), (1, 1, 4, 4)),
    "lp_pool3d": (lambda x: F.lp_pool3d(x, 2, 2), (1, 1, 4, 4, 4)),
    "lstm": (lambda x, h, c, *w: rnn(torch.lstm)(x, (h, c), *w),
             (3, 1, 2), (1, 1, 2), (1, 1, 2), *weights(4)),
    "lstm_cell": (lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), *[(3, 2)] * 3, *weights(4)),
    "matrix_exp": (lambda x: torch.linalg.matrix_exp(x @ x.mT / 10), (4, 6)),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.5, True), (3, 4)),
    "norm nuc": (lambda x: torch.linalg.norm(x, ord="nuc"), (3, 3)),
    "norm of rows": (lambda x: torch.linalg.norm(x, 2, -1), (3, 3)),
    "norm_except_dim": (torch.norm_except_dim, (3, 3)),
    "normalize": (F.normalize, (3, 4)),
    "nuclear_norm": (torch.nuclear_norm, (3, 3)),
    "poisson": (lambda x: torch.poisson(x.abs()), (3,)),
    "rnn_relu": (rnn(torch.rnn_relu), (3, 1, 2), (1, 1, 2), *weights(1)),
    "rnn_relu_cell": (torch.rnn_relu_cell, (3, 2), (3, 2), *weights(1)),
    "rnn_tanh": (rnn(torch.rnn_tanh), (3, 1, 2), (1, 1, 2), *weights(1)),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, (3, 2), (3, 2), *weights(1)),
    "hspmm": (lambda v, x: torch.hspmm(coo(v), x), (4,), (4, 2)),
    "smm": (lambda v, x: torch.smm(coo(v), x), (4,), (4, 2)),
    "sparse @": (lambda v, x: coo(v) @ x, (4,), (4, 2)),
    "sparse addmm": (lambda y, v, x: torch.sparse.addmm(y, coo(v), x), (3, 2), (4,), (4, 2)),
    "sparse csr @": (lambda v, x: csr(v) @ x, (4,), (4, 2)),
    "sparse csr mm": (lambda v, x: torch.sparse.mm(csr(v), x), (4,), (4, 2)),
    "sparse log_softmax": (lambda v: torch.sparse.log_softmax(coo(v), 1), (4,)),
    "sparse mm": (lambda v, x: torch.sparse.mm(coo(v), x), (4,), (4, 2)),
    "sparse softmax": (lambda v: torch.sparse.softmax(coo(v), 1), (4,)),
    "sparse sum": (lambda v: torch.sparse.sum(coo(v), 1), (4,)),
    "sampled_addmm": (lambda v, x, y: torch.sparse.sampled_addmm(csr(v), x, y),
                      (4,), (3, 2), (2, 4)),
    "sparse_mask": (lambda x, v: x.sparse_mask(coo(v).coalesce()), (3, 4), (4,)),
    "spmm": (lambda v, x: torch.spmm(coo(v), x), (4,), (4, 2)),
    "sspaddmm": (lambda y, v, x: torch.sspaddmm(coo(y), coo(v), x), (4,), (4,), (4, 4)),
    "to_dense": (lambda v: coo(v).to_dense(), (4,)),
}  # fmt: skip
# Functions that neither torch's samples nor those by hand call, and why that is right.
LEFT_OUT = {
    r"_.*|.*_with_indices|max_pool.*|native_norm|affine_grid_generator": "parts of others",
    r"(cudnn|miopen|mkldnn|fbgemm|quantize|fused_moving|batch_norm_|choose_q|q_|sym_|int_repr|"
    r"dequantize|fake_quantize).*|to_mkldnn|qscheme|feature_dropout": "other devices, integers",
    r"is_.*|.*_dim|dim.*|n?numel|n(elem|dimens).*|size|stride|storage.*|.*_storage|.*_ptr|type|"
    r"get_device|element_size|numpy|tolist|.*indices|values|record_stream|.*hook": "queries",
    r".*_copy|detach_?|unsafe_.*|slice_inverse|resize.*|set_|share_memory_|pin_memory|coalesce|"
    r"retain_grad|requires_grad_|module_load|index|sparse_resize.*|.*channel_shuffle": "views",
    r"lobpcg": "its Python code passes itself to no mode",
    r"cpu|cuda|ipu|xpu|mtia|type_as|random_|apply_|map2?_|backward|constant_|kaiming_.*": "moves",
}


@cache
def samples() -> list:
    """torch's operator samples."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    torch.backends.__allow_nonbracketed_mutation_flag = True  # that module forbids it
    return op_db


# What differs by its nature: memory that nobody wrote, random draws of another width, and the
# gradient of a norm of one number, which is all rounding (normalize is called by hand).
DIFFERS = re.compile(r"(new_)?empty.*|randn?_like|normal|uniform|nn.functional.normalize")


def by_hand():
    """Name, function, operands (arguments, keywords) and whether the first one is written."""
    for name, (function, *shapes) in BY_HAND.items():
        torch.manual_seed(0)
        yield name, function, (tuple(torch.randn(s) for s in shapes), {}), False


def of_torch(most: int, only: Collection[str] = ()):
    """The same of torch's samples, at most so many of each function."""
    for op in samples():
        private = op.name.startswith(("_", "torch.")) or DIFFERS.fullmatch(op.name)
        if torch.float32 not in op.dtypes or private or (only and op.name not in only):
            continue
        found = [*itertools.islice(op.sample_inputs("cpu", torch.float32), 40)]
        for sample in found[:: max(1, len(found) // most)][:most]:
            given = (sample.input, *sample.args), sample.kwargs
            functions = {op.op: False, op.method_variant: False, op.operator_variant: False}
            if "dtype" not in sample.kwargs:
                functions |= {op.inplace_variant: True, op.inplace_operator_variant: True}
            for function, writes in functions.items():
                if function is not None:
                    yield f"{op.name} {op.variant_test_name}", function, given, writes


def operands(given, mode: str, low: torch.dtype):
    """The call's operands, rounded to 16 bits, some of them of that dtype; and how many."""
    count = itertools.count()

    def change(x):
        if not (isinstance(x, Tensor) and x.dtype == torch.float32):
            return x
        first = next(count) == 0
        return x.to(low) if mode == "all" or (mode == "first") == first else x.to(low).float()

    return tree_map(change, given), next(count)


def run(function, given, writes: bool, backward: bool = True, policy: str = "fp32", off=0.0):
    """Results and gradients of a call, the latter for a fixed random gradient of each result."""
    torch.manual_seed(0)
    given = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)
    leaves = [
        x.requires_grad_() for x in tree_leaves(given)
        if isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided
    ]  # fmt: skip
    args, kwargs = given
    if writes:
        args = (args[0].clone(), *args[1:])
    context = Autocast(POLICIES[policy], None, torch.device("cpu"))
    with context:
        made = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
    made = [dense(x) for x in made]
    total, generator = torch.zeros(()), torch.Generator().manual_seed(1)
    for x in made:
        if backward and x.requires_grad:
            wide = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
            gradient = torch.randn(wide.shape, generator=generator)
            gradient *= 1 + off * (torch.randint(0, 2, wide.shape) * 2 - 1)
            total = total + (wide.float() * gradient).sum()
    if not (leaves and total.requires_grad):
        return [x.detach() for x in made], []
    with context.arithmetic():
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [x.detach() for x in made], [*map(dense, grads)]


def dense(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.layout == torch.strided else x.to_dense()


def near(found, expected, others, low: torch.dtype, floor: float) -> bool:
    """Whether two results are equal but for rounding; ``others`` come from disturbed operands."""
    if found is None or expected is None:
        return found is expected
    if found.shape != expected.shape or found.is_complex() != expected.is_complex():
        return False
    if not found.is_floating_point() and not found.is_complex():
        return torch.equal(found, expected)
    found, expected, *others = (
        (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()
        for x in (found, expected, *others)
    )
    limits = torch.finfo(low)
    beyond = expected.abs() > limits.max / 4  # something on the way may have become infinite
    if not found[beyond].abs().ge(limits.max / 8).all():
        return False
    expected = torch.where(beyond, found, expected)
    # a few roundings of the largest number, and what rounding the operands would change in fp32
    size = float(expected.abs().nan_to_num(0.0, 0.0).amax()) if expected.numel() else 0.0
    moved = [(x - expected).abs().nan_to_num(math.inf).amax() for x in others if x.numel()]
    bound = 16 * limits.eps * max(size, floor, limits.tiny) + 16 * float(max(moved, default=0.0))
    return torch.allclose(found, expected, rtol=0, atol=bound, equal_nan=True)


def agree(found, expected, others, low: torch.dtype) -> bool:
    """Whether results and, where those do not overflow, gradients are equal but for rounding."""
    sizes = [float(x.abs().amax()) for x in expected[0] if x.is_floating_point() and x.numel()]
    largest = max([1.0, *sizes])  # of the numbers whose rounding a gradient sees
    for part in (0, 1) if largest <= torch.finfo(low).max else (0,):
        columns = found[part], expected[part], *(other[part] for other in others)
        if len({*map(len, columns)}) > 1:
            return False
        for one, wide, *rest in zip(*columns, strict=True):
            if not near(one, wide, rest, low, 4 * largest * part):
                return False
    return True


def disturbed(given, off: float, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def change(x):
        if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.layout != torch.strided:
            return x
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        return x * (1 + off * signs)

    return tree_map(change, given)


def verdict(policy: str, low: torch.dtype, function, given, writes: bool, mode: str) -> str:
    """What is wrong with a call under a policy; empty if nothing is."""
    narrow, count = operands(given, mode, low)
    if not count or (count == 1 and mode != "all"):
        return ""
    wide = tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == low else x, narrow)
    for backward in (True, False):
        with contextlib.suppress(Exception):
            expected = run(function, wide, writes, backward)
            break
    else:
        return ""  # torch refuses it in fp32, too
    try:
        found = run(function, narrow, writes, backward, policy)
    except PrecisionError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    if agree(found, expected, [], low):
        return ""
    others, off = [], torch.finfo(low).eps
    for seed in range(3):
        with contextlib.suppress(Exception):
            others.append(run(function, disturbed(wide, off, seed), writes, backward, off=off))
    return "" if agree(found, expected, others, low) else "other numbers than in fp32"


def wrong(policies: list[str], found) -> dict[str, str]:
    """What is wrong with these calls, by call, policy and operands."""
    failed = {}
    for name, function, given, writes in found:
        for policy in policies:
            for mode in MODES:
                why = verdict(policy, LOW[policy[:4]], function, given, writes, mode)
                if why:
                    failed[f"{name}{' in place' * writes}, {policy}, {mode}"] = why
    return failed


QUICK = {
    *("bmm", "cat", "cdist", "complex", "histogram", "index_put", "inner", "lerp", "linalg.norm"),
    *("logcumsumexp", "polar", "scatter_add", "special.i1e", "special.log_ndtr"),
    *(f"nn.functional.{name}" for name in ("bilinear", "cosine_similarity", "grid_sample")),
}
EACH = pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-pure", "fp16-mixed", "fp16-pure"])


@EACH
def test_some_functions_and_those_that_torchs_samples_leave_out(policy):
    assert not wrong([policy], itertools.chain(by_hand(), of_torch(1, QUICK)))


@pytest.mark.slow
@pytest.mark.parametrize("form", LOW)
def test_every_function_equals_fp32_or_is_refused(form):
    assert not wrong([f"{form}-mixed", f"{form}-pure"], of_torch(6))


def test_no_function_of_torch_is_left_out():
    known = {*BY_HAND, *(op.name.rpartition(".")[2] for op in samples())}
    known |= {alias.name.rpartition(".")[2] for op in samples() for alias in op.aliases}
    known |= {op.aten_name for op in samples()}
    names = {resolve_name(f).rpartition(".")[2] for f in get_testing_overrides() if resolve_name(f)}
    rest = {name for name in names if name.rstrip("_") not in known and name not in known}
    assert not [n for n in rest if not any(re.fullmatch(p, n) for p in LEFT_OUT)]


# --- constants ------------------------------------------------------------------------------------

# Scores, a mask and a constant beyond 16 bits.
CONSTANTS = {
    "clamp": lambda s, m, c: s.clamp(max=c),
    "fill_": lambda s, m, c: torch.empty_like(s).fill_(c),
    "full": lambda s, m, c: torch.full((2,), c, dtype=s.dtype),
    "full_like": lambda s, m, c: torch.full_like(s, c),
    "index_fill": lambda s, m, c: s.index_fill(0, torch.tensor([1]), c),
    "index_put": lambda s, m, c: s.index_put((m,), torch.tensor(c)),
    "masked_fill": lambda s, m, c: s.masked_fill(m, c),
    "masked_fill of a tensor": lambda s, m, c: s.masked_fill(m, torch.tensor(c)),
    "pad": lambda s, m, c: F.pad(s, (1, 1), value=c),
    "pad_sequence": lambda s, m, c: pad_sequence([s, s[:1]], padding_value=c),
    "s[0] = c": lambda s, m, c: set_item(s.clone(), 0, c),
    "s[m] = c": lambda s, m, c: set_item(s.clone(), m, c),
    "s[m] = tensor": lambda s, m, c: set_item(s.clone(), m, torch.tensor(c)),
    "scatter": lambda s, m, c: s.scatter(0, torch.zeros(1, 4, dtype=torch.int64), c),
    "threshold": lambda s, m, c: F.threshold(s, 0.5, c),
    "where": lambda s, m, c: torch.where(m, c, s),
    "where of a tensor": lambda s, m, c: torch.where(m, torch.tensor(c), s),
}


def set_item(tensor: Tensor, where, value) -> Tensor:
    tensor[where] = value
    return tensor


@EACH
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_constant_beyond_the_format_is_its_largest_number(policy, compiled, monkeypatch):
    # torch compiles nothing around a simulation
    monkeypatch.setattr("halfstep.precision.casting.autocast._is_simulated", lambda *_: False)
    low = LOW[policy[:4]]
    limits = torch.finfo(low)
    # torch.compile shows a mode nothing of the namespace in which torch pads
    names = [name for name in CONSTANTS if not (compiled and name.startswith("pad"))]

    scores, mask = torch.linspace(-2, 2, 16).reshape(4, 4).to(low), torch.eye(4).bool()
    wide = torch.finfo(torch.float32)
    for constant in [wide.min, wide.max, -math.inf] + [-1e9] * (low == torch.float16):

        def every_one(s, m, constant=constant):
            return [CONSTANTS[name](s, m, constant) for name in names]

        call = torch.compile(every_one, backend="aot_eager", fullgraph=True)
        with Autocast(POLICIES[policy], None, torch.device("cpu")):
            found = (call if compiled else every_one)(scores, mask)
        for name, one, exact in zip(names, found, every_one(scores.float(), mask), strict=True):
            finite = exact.clamp(limits.min, limits.max)
            expected = torch.where(exact.isinf(), exact, finite).to(low)
            assert one.dtype == low, name
            assert torch.equal(one, expected), (name, constant)
        torch._dynamo.reset()
