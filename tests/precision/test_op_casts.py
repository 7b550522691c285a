"""The op table and the modes that apply it."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from halfstep import POLICIES, Precision, autocast
from halfstep.optim import AdamW
from halfstep.precision.casting import op_casts
from halfstep.precision.casting.autocast import Autocast
from halfstep.precision.casting.cast import cast_parameters_
from halfstep.precision.casting.op_casts import LEAVES, StoredCasts
from halfstep.precision.casting.op_table import MIXED_ON_CPU, OPS, STORED, spellings

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
LOW = [name for name, policy in POLICIES.items() if policy.param_dtype != F32]
MIXED_POLICIES = ["bf16-mixed", "fp16-mixed"]


# --- the table ------------------------------------------------------------------------------------


NAMES = {name: row for row in OPS.values() for name in row.names.split()}


def test_every_entry_is_a_function_of_torch_and_in_one_row():
    assert sum(len(row.names.split()) for row in OPS.values()) == len(NAMES)
    rows: dict[object, object] = {}
    for name, row in NAMES.items():
        found = dict(spellings(name))
        assert found, f"torch has no {name}"
        for path, function in found.items():
            if not path.startswith(("torch.sparse.", "torch.linalg.norm")):
                assert rows.setdefault(function, row) is row, path


def test_every_operation_that_cuda_casts_is_in_the_table():
    found = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.removeprefix("aten::").partition(".")[0] for name in found}
    inside = {  # of operations above, and no Python function
        *("_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
        *("cudnn_convolution", "cudnn_convolution_transpose"),
    }
    assert names - {*NAMES} - inside == set()


# --- *-mixed on a CPU -----------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Written by hand, as in many a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_fp64_integers_and_what_the_user_says_are_left_alone():
    with autocast("bf16-mixed", "cpu"):
        assert torch.ones(3).double().exp().dtype == torch.float64
        assert torch.mv(torch.ones(2, 2).double(), torch.ones(2).double()).dtype == torch.float64
        assert torch.ones(3, dtype=torch.int64).sum().dtype == torch.int64
        assert torch.ones(3).to(B16).sum(dtype=B16).dtype == B16
        assert torch.linalg.vector_norm(torch.ones(3).to(B16), dtype=B16).dtype == B16
        assert torch.ones(3).to(B16).exp_().dtype == B16


@pytest.mark.parametrize("policy", MIXED_POLICIES)
def test_functions_of_python_are_cast_inside(policy):
    # the weights of attention are a softmax, which multi_head_attention_forward calls itself
    low = POLICIES[policy].compute_dtype
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    with autocast(policy, "cpu"):
        y, weights = attention(x, x, x)
        assert (y.dtype, weights.dtype) == (low, F32)
        assert F.local_response_norm(x.to(low), 2).dtype == F32
        assert F.gumbel_softmax(x.to(low)).dtype == F32
        assert F.interpolate(x.to(low)[None], scale_factor=2, mode="area").dtype == low
    assert torch.allclose(weights.sum(-1), torch.ones(2, 3), atol=1e-6)  # fp32, 3 terms


def test_functions_that_are_not_looked_into_have_nothing_of_the_table_inside():
    known = {*MIXED_ON_CPU, *STORED}
    assert not LEAVES & known
    x = torch.rand(4, 4)
    calls = {
        F.embedding: (torch.tensor([0, 1]), x),
        torch.Tensor.split: (x, 2),
        torch.split: (x, 2),
        torch.Tensor.unflatten: (x, 1, (2, 2)),
        torch.broadcast_tensors: (x, x),
    }

    class Look(TorchFunctionMode):
        def __init__(self) -> None:
            self.seen = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    for leaf in LEAVES:
        with Look() as look:
            op_casts._unasked(leaf)(*calls.get(leaf, (x,)))
        assert not known & {*look.seen}, leaf


@pytest.mark.covering
@pytest.mark.parametrize("policy", MIXED_POLICIES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["after", "within"])
def test_checkpointing_repeats_the_same_casts(policy, reentrant, inside):
    # torch checks formats and shapes of what is computed again against the first time
    torch.manual_seed(0)
    model, x = RMSNorm(), torch.randn(3, 8)
    gradients = []
    for again in (False, True):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with autocast(policy, "cpu"):
            y = checkpoint(model, leaf, use_reentrant=reentrant) if again else model(leaf)
            loss = y.float().softmax(-1).square().sum()
            if inside:
                loss.backward()
        if not inside:
            with Autocast(POLICIES[policy], None, CPU).arithmetic():
                loss.backward()
        gradients.append([leaf.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# --- 16-bit weights -------------------------------------------------------------------------------

LOWS = pytest.mark.parametrize("low", [B16, F16], ids=["bf16", "fp16"])


@LOWS
def test_what_operands_of_two_formats_give(low):
    """Their numbers are compared in ``test_every_function.py``."""
    x, w = torch.randn(4, 4).to(low), torch.randn(4, 4)
    v, b = w[0], x[0]
    with StoredCasts(low):
        matmuls = (
            *(x @ w, w @ x, F.linear(w, x), w.mv(b), torch.dot(b, v), torch.inner(x, w)),
            *(torch.einsum("ij,jk->ik", x, w), torch.tensordot(x, w, 1), F.conv1d(x, w[..., None])),
        )
        others = (
            *(F.layer_norm(w, (4,), b), F.rms_norm(w, (4,), b), F.group_norm(w, 2, b)),
            *(F.cosine_similarity(x, w), F.instance_norm(w[None], weight=b), F.l1_loss(x, x)),
            *(F.batch_norm(w, None, None, b, training=True), torch.sparse.mm(w.to_sparse(), x)),
        )
    assert {found.dtype for found in matmuls} == {low}
    assert {found.dtype for found in others} == {F32}


@LOWS
def test_running_statistics_are_written_where_they_are(low):
    norm = nn.BatchNorm1d(4)
    cast_parameters_(norm, low)
    x = torch.randn(8, 4)
    with StoredCasts(low):
        norm(x)
        norm(x.to(low))
    assert norm.running_mean.dtype == F32
    assert int(norm.num_batches_tracked) == 2
    expected = 0.1 * (0.9 * x.mean(0) + x.to(low).float().mean(0))
    assert torch.allclose(norm.running_mean, expected, atol=1e-6)  # fp32, 8 terms


@LOWS
def test_an_attention_mask_of_large_numbers_stays_finite(low):
    q = torch.randn(1, 1, 3, 8).to(low)
    mask = torch.zeros(3, 3)
    mask[0] = torch.finfo(F32).min  # a row of nothing, which some padded batches have
    mask[1, 1:] = -math.inf
    with StoredCasts(low):
        found = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        positional = F.scaled_dot_product_attention(q, q, q, mask)
    assert found.isfinite().all()
    assert found[..., 0, :].abs().sum() > 0  # as of -inf alone it would be NaN, or all 0
    assert torch.equal(found, positional)
    expected = F.scaled_dot_product_attention(*[q.float()] * 3, attn_mask=mask)
    # probabilities and result are rounded, each to half a gap
    tolerance = 4 * torch.finfo(low).eps
    rows = slice(1, None)  # what stands in a row of nothing is no matter, but that it is finite
    assert torch.allclose(
        found[..., rows, :].float(), expected[..., rows, :], atol=tolerance, rtol=tolerance
    )


# --- what stands on the model ---------------------------------------------------------------------


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))


def prepared(policy: str, model: nn.Module) -> Precision:
    own = POLICIES[policy.partition(",")[0]].needs_own_optimizer
    kind = AdamW if own else torch.optim.SGD
    return Precision(policy, model, kind(model.parameters(), lr=0.1))


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master", "bf16-master,keep_fp32=1"])
def test_a_model_is_exported_traced_copied_and_pickled(policy):
    model, x = small(), torch.randn(3, 4)
    precision = Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.eval()
    with torch.no_grad(), precision.autocast():
        expected = model(x)
    assert torch.fx.symbolic_trace(small()).code
    torch.fx.symbolic_trace(model)
    # a pickle has the weights as stored; a copy is fp32, and without rules: both round elsewhere
    same = 2.0**-7 if "keep_fp32" in policy else 0.0
    for twin, off in (pickle.loads(pickle.dumps(model)), same), (copy.deepcopy(model), 2.0**-7):
        with torch.no_grad(), precision.autocast():
            assert torch.allclose(twin(x).float(), expected, rtol=0, atol=off)
    with torch.no_grad():
        plain = model(x)  # without the context, as it is served
        exported = torch.export.export(model, (x,)).module()(x)
    assert exported.dtype == F32
    # the same roundings; fused operations may keep fp32 between two of them
    assert torch.allclose(exported, plain, atol=2.0**-7)


@torch.library.custom_op("tests::grouped_mm_fallback", mutates_args=())
def fallback(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Stands for transformers' own, which a graph has where weights are fp32."""
    raise AssertionError("nobody saw the call")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_multiply_in_the_format_of_autocast_on_every_device(compiled):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.ParameterList([torch.randn(2, 16, 32)])

        def forward(self, call):
            return call(x, self.own[0], offs=torch.tensor([3, 8], dtype=torch.int32))

    model, x = Experts(), torch.randn(8, 16)
    precision = Precision("bf16-mixed", model, AdamW(model.parameters()))
    low, w = x.to(B16), model.own[0].detach().to(B16)
    expected = torch.cat([low[:3] @ w[0], low[3:] @ w[1]]).float()
    run, calls = model, (F.grouped_mm, torch._grouped_mm)
    if compiled:
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        calls = (torch.ops.tests.grouped_mm_fallback,)
    bare = torch.autocast("cpu", B16)  # as on CUDA, without a mode for all of torch's calls
    for call, context in itertools.product(calls, (bare, precision.autocast())):
        with context:
            y = run(call)
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
        assert torch.autograd.grad(y.sum(), model.own[0])[0].dtype == F32
