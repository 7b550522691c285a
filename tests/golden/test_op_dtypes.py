"""In which format each operation of CUDA's autocast lists answers, on every device.

torch itself is asked: its CUDA autocast, run on tensors that only claim to be on a GPU (a
FakeTensorMode computes formats and shapes, no numbers). The CPU under ``*-mixed`` must answer the
same, and so must a real GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from halfstep import Precision, autocast

Make = Callable[..., Tensor]
CUDA = torch.device("cuda")


def chosen(t: Make) -> Tensor:
    return torch.zeros(4, dtype=torch.int64, device=t(1).device)


def signs(t: Make, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64, device=t(1).device)


# The name in CUDA's documented lists: a call of it. ``t`` makes a tensor of a shape, a new one each
# time: 16 bits, fp32, or the first 16 bits and the others fp32.
HALF: dict[str, Callable[[Make], Any]] = {
    "__matmul__": lambda t: t(4, 4) @ t(4, 4),
    "__rmatmul__": lambda t: t(4, 4).__rmatmul__(t(4, 4)),
    "addbmm": lambda t: torch.addbmm(t(4, 4), t(2, 4, 4), t(2, 4, 4)),
    "addmm": lambda t: torch.addmm(t(4, 4), t(4, 4), t(4, 4)),
    "addmv": lambda t: torch.addmv(t(4), t(4, 4), t(4)),
    "addr": lambda t: torch.addr(t(4, 4), t(4), t(4)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 4, 4), t(2, 4, 4), t(2, 4, 4)),
    "bmm": lambda t: torch.bmm(t(2, 4, 4), t(2, 4, 4)),
    "chain_matmul": lambda t: torch.chain_matmul(t(4, 4), t(4, 4), t(4, 4)),
    "multi_dot": lambda t: torch.linalg.multi_dot([t(4, 4), t(4, 4), t(4, 4)]),
    "vecdot": lambda t: torch.linalg.vecdot(t(4, 4), t(4, 4)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(4, 4), t(4, 4)),
    "conv1d": lambda t: F.conv1d(t(1, 2, 5), t(2, 2, 3)),
    "conv2d": lambda t: F.conv2d(t(1, 2, 5, 5), t(2, 2, 3, 3), t(2)),
    "conv3d": lambda t: F.conv3d(t(1, 2, 5, 5, 5), t(2, 2, 3, 3, 3)),
    "conv_tbc": lambda t: torch.conv_tbc(t(5, 1, 2), t(3, 2, 2), t(2)),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t(1, 2, 5), t(2, 2, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(1, 2, 5, 5), t(2, 2, 3, 3)),
    "conv_transpose3d": lambda t: F.conv_transpose3d(t(1, 2, 5, 5, 5), t(2, 2, 3, 3, 3)),
    "GRUCell": lambda t: torch.gru_cell(t(2, 4), t(2, 4), t(12, 4), t(12, 4), t(12), t(12)),
    "LSTMCell": lambda t: torch.lstm_cell(
        t(2, 4), [t(2, 4), t(2, 4)], t(16, 4), t(16, 4), t(16), t(16)
    ),
    "RNNCell": lambda t: torch.rnn_tanh_cell(t(2, 4), t(2, 4), t(4, 4), t(4, 4), t(4), t(4)),
    "RNNCell relu": lambda t: torch.rnn_relu_cell(t(2, 4), t(2, 4), t(4, 4), t(4, 4), t(4), t(4)),
    "linear": lambda t: F.linear(t(2, 4), t(3, 4), t(3)),
    "matmul": lambda t: torch.matmul(t(2, 4, 4), t(4, 4)),
    "mm": lambda t: torch.mm(t(4, 4), t(4, 4)),
    "mv": lambda t: torch.mv(t(4, 4), t(4)),
    "prelu": lambda t: F.prelu(t(2, 4), t(4)),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(
        t(1, 1, 4, 8), t(1, 1, 4, 8), t(1, 1, 4, 8)
    ),
}
FP32: dict[str, Callable[[Make], Any]] = {
    "__pow__": lambda t: t(4) ** 2,
    "__rdiv__": lambda t: t(4).__rdiv__(1.0),
    "__rpow__": lambda t: 2 ** t(4),
    "__rtruediv__": lambda t: 1 / t(4),
    "acos": lambda t: t(4).acos(),
    "asin": lambda t: torch.asin(t(4)),
    "binary_cross_entropy_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(4), t(4)),
    "cosh": lambda t: t(4).cosh(),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t(4, 3), t(4, 3), signs(t, 4)),
    "cdist": lambda t: torch.cdist(t(2, 4), t(3, 4)),
    "cosine_similarity": lambda t: F.cosine_similarity(t(4, 3), t(4, 3)),
    "cross_entropy": lambda t: F.cross_entropy(t(4, 3), chosen(t)),
    "cumprod": lambda t: t(4).cumprod(0),
    "cumsum": lambda t: torch.cumsum(t(4), 0),
    "dist": lambda t: torch.dist(t(4), t(4)),
    "erfinv": lambda t: t(4).erfinv(),
    "exp": lambda t: t(4).exp(),
    "expm1": lambda t: torch.expm1(t(4)),
    "group_norm": lambda t: F.group_norm(t(2, 4, 3), 2, t(4), t(4)),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t(4), signs(t, 4)),
    "huber_loss": lambda t: F.huber_loss(t(4), t(4)),
    "interpolate": lambda t: F.interpolate(t(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "kl_div": lambda t: F.kl_div(t(4, 3), t(4, 3), reduction="batchmean"),
    "l1_loss": lambda t: F.l1_loss(t(4), t(4)),
    "layer_norm": lambda t: F.layer_norm(t(2, 4), (4,), t(4), t(4)),
    "log": lambda t: t(4).log(),
    "log10": lambda t: t(4).log10(),
    "log1p": lambda t: torch.log1p(t(4)),
    "log2": lambda t: t(4).log2(),
    "log_softmax": lambda t: F.log_softmax(t(2, 4), -1),
    "logsumexp": lambda t: t(2, 4).logsumexp(-1),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t(4), t(4), signs(t, 4)),
    "mse_loss": lambda t: F.mse_loss(t(4), t(4)),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t(4, 3), chosen(t)),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t(4, 3), signs(t, 4, 3) - 1),
    "nll_loss": lambda t: F.nll_loss(t(4, 3), chosen(t)),
    "norm": lambda t: t(4, 3).norm(),
    "norm dim": lambda t: torch.norm(t(4, 3), dim=0),
    "linalg norm": lambda t: torch.linalg.norm(t(4, 3)),
    "vector_norm": lambda t: torch.linalg.vector_norm(t(4, 3)),
    "normalize": lambda t: F.normalize(t(4, 3)),
    "pdist": lambda t: F.pdist(t(4, 3)),
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t(4), t(4)),
    "pow": lambda t: t(4).pow(t(4)),
    "prod": lambda t: t(4).prod(),
    "reciprocal": lambda t: t(4).reciprocal(),
    "renorm": lambda t: torch.renorm(t(4, 3), 2, 0, 1.0),
    "rms_norm": lambda t: F.rms_norm(t(2, 4), (4,)),
    "rsqrt": lambda t: torch.rsqrt(t(4)),
    "sinh": lambda t: t(4).sinh(),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t(4), t(4)),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t(4), signs(t, 4)),
    "softmax": lambda t: t(2, 4).softmax(-1),
    "softmax functional": lambda t: F.softmax(t(2, 4), -1),
    "softmin": lambda t: F.softmin(t(2, 4), -1),
    "softplus": lambda t: F.softplus(t(4)),
    "square": lambda t: t(4).square(),
    "sum": lambda t: t(4).sum(),
    "sum dim": lambda t: torch.sum(t(2, 4), dim=(0,)),
    "tan": lambda t: t(4).tan(),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(4, 3), t(4, 3), t(4, 3)),
}
WIDEST: dict[str, Callable[[Make], Any]] = {
    "addcdiv": lambda t: torch.addcdiv(t(4), t(4), t(4)),
    "addcmul": lambda t: torch.addcmul(t(4), t(4), t(4)),
    "atan2": lambda t: torch.atan2(t(4), t(4)),
    "bilinear": lambda t: F.bilinear(t(2, 4), t(2, 4), t(3, 4, 4)),
    "cat": lambda t: torch.cat([t(4), t(4)]),
    "cross": lambda t: torch.cross(t(4, 3), t(4, 3), dim=-1),
    "dot": lambda t: torch.dot(t(4), t(4)),
    "grid_sample": lambda t: F.grid_sample(t(1, 1, 4, 4), t(1, 2, 2, 2), align_corners=False),
    "index_put": lambda t: torch.index_put(t(4), (chosen(t),), t(4)),
    "scatter_add": lambda t: torch.scatter_add(t(4), 0, chosen(t), t(4)),
    "stack": lambda t: torch.stack([t(4), t(4)]),
    "tensordot": lambda t: torch.tensordot(t(4, 4), t(4, 4), 1),
    "vdot": lambda t: torch.vdot(t(4), t(4)),
}
# In no list: the format of the operands, by torch's ordinary rules.
AS_GIVEN: dict[str, Callable[[Make], Any]] = {
    "add": lambda t: t(4) + t(4),
    "avg_pool3d": lambda t: F.avg_pool3d(t(1, 1, 4, 4, 4), 2),
    "batch_norm": lambda t: F.batch_norm(t(4, 3), None, None, training=True),
    "dropout": lambda t: F.dropout(t(4)),
    "exp_": lambda t: t(4).exp_(),
    "gelu": lambda t: F.gelu(t(4)),
    "max_pool3d": lambda t: F.max_pool3d(t(1, 1, 4, 4, 4), 2),
    "mean": lambda t: t(4).mean(),
    "pad reflect": lambda t: F.pad(t(1, 2, 6, 6), (1, 1, 1, 1), mode="reflect"),
    "pow_": lambda t: t(4).pow_(2),
    "sigmoid": lambda t: t(4).sigmoid(),
    "softmax out": lambda t: torch.softmax(t(2, 4), -1, out=t.like(2, 4)),
    "softmax dtype": lambda t: t(2, 4).softmax(-1, dtype=torch.float64),
    "std": lambda t: t(4).std(),
    "var": lambda t: t(4).var(),
}
LISTS = {"half": HALF, "fp32": FP32, "widest": WIDEST, "as given": AS_GIVEN}
# torch cannot pretend these without a GPU; the rows are its documentation's.
BY_HAND = {
    "GRUCell": dict.fromkeys(("fp32", "low", "mixed"), "low"),
    "grid_sample": {"fp32": "float32", "low": "low", "mixed": "float32"},
    "index_put": {"fp32": "float32", "low": "low", "mixed": "float32"},
}
FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Maker:
    """Makes tensors of 16 bits, of fp32, or of both, on a device."""

    def __init__(self, inputs: str, low: torch.dtype, device: torch.device) -> None:
        self.inputs, self.low, self.device, self.made = inputs, low, device, 0

    def __call__(self, *shape: int) -> Tensor:
        dtype = torch.float32 if self.inputs == "fp32" else self.low
        if self.inputs == "mixed" and shape != (1,):
            dtype = self.low if self.made == 0 else torch.float32
            self.made += 1
        return torch.rand(shape, device=self.device).to(dtype)

    def like(self, *shape: int) -> Tensor:
        made, self.made = self.made, 0
        result = self(*shape)
        self.made = made
        return result


def answer(call: Callable[[Make], Any], inputs: str, low: torch.dtype, device: Any) -> str:
    """The format of the result."""
    found = tree_leaves(call(Maker(inputs, low, device)))[0].dtype
    return "low" if found == low else str(found).removeprefix("torch.")


def rows(
    low: torch.dtype, device: torch.device, pretend: bool = False
) -> dict[str, dict[str, str]]:
    return {
        name: BY_HAND[name]
        if pretend and name in BY_HAND
        else {inputs: answer(call, inputs, low, device) for inputs in ("fp32", "low", "mixed")}
        for calls in LISTS.values()
        for name, call in calls.items()
    }


@contextlib.contextmanager
def cuda_autocast(low: torch.dtype) -> Iterator[None]:
    """torch's own, which ``torch.autocast("cuda")`` would not switch on without a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(cache)


def expected(low: torch.dtype) -> dict[str, dict[str, str]]:
    """The formats of torch's CUDA autocast."""
    with FakeTensorMode(), cuda_autocast(low):
        return rows(low, CUDA, pretend=True)


pytestmark = pytest.mark.filterwarnings(
    "ignore:.*chain_matmul is deprecated", "ignore:.*Mismatch dtype"
)


@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("own", [False, True], ids=["autocast", "Precision"])
def test_a_cpu_computes_in_the_formats_of_a_gpu(policy, own):
    model = torch.nn.Linear(1, 1)
    context = autocast(policy, "cpu")
    if own:
        context = Precision(policy, model, torch.optim.SGD(model.parameters(), lr=1.0)).autocast()
    low = FORMATS[policy[:4]]
    wanted = expected(low)
    if torch.__version__ < TorchVersion("2.12"):
        # which put rms_norm on the list (pytorch/pytorch#174824); halfstep's has it
        wanted["rms_norm"] = dict.fromkeys(("fp32", "low", "mixed"), "float32")
    with context:
        assert rows(low, torch.device("cpu")) == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: nothing of CUDA was tested")
@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-mixed"])
def test_a_gpu_does_so(policy):
    with autocast(policy, "cuda"):
        assert rows(FORMATS[policy[:4]], CUDA) == expected(FORMATS[policy[:4]])
