"""Native products below 16 bits: what is handed to torch, read back as cuBLAS documents it.

No CPU has such products but fp8 by tensor. A stand-in for ``torch.nn.functional.scaled_mm`` checks
sizes and strides as torch's CUDA code does, and reads codes and scales by their documented layouts.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.formats import BLOCK_FORMATS, FP8_TENSOR
from halfstep.precision import low_bit
from halfstep.precision.low_bit import linear
from halfstep.precision.low_bit.linear import USES, mixed, operands
from halfstep.precision.low_bit.native import scaled_matmul
from halfstep.precision.policy.recipe import OPERANDS, SCHEMES, Recipe

SUMMED = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def numbers_of(codes):
    """The numbers of codes, (rows, K) in fp64."""
    if codes.dtype == torch.float4_e2m1fn_x2:
        raw = codes.view(torch.uint8).numpy()
        return E2M1[np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)]
    return codes.double().numpy()


def scale_at(scales, row, block, blocks):
    """Scale of a 1x16 or 1x32 block by cuBLAS 13's "1D Block Scaling Factors Layout"."""
    tile = (row // 128) * (round_up(blocks, 4) // 4) + block // 4
    inside = (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
    return scales[tile * 512 + inside]


def operand_of(codes, scales, kind, swizzle):
    """What one operand stands for, (rows, K) in fp64; the checks are those of ScaledBlas.cpp."""
    numbers, name = numbers_of(codes), kind.name
    rows, k = numbers.shape
    assert codes.is_contiguous()
    assert codes.shape[1] % 16 == 0
    length = int(name.rpartition("x")[2])
    blocks = -(-k // length)
    if length < 128:
        assert swizzle is F.SwizzleType.SWIZZLE_32_4_4
        assert scales.is_contiguous()
        assert scales.numel() == round_up(rows, 128) * round_up(blocks, 4)
        assert scales.dtype == (torch.float8_e4m3fn if length == 16 else torch.float8_e8m0fnu)
        flat = scales.float().double().numpy()
        table = [[scale_at(flat, r, b, blocks) for b in range(blocks)] for r in range(rows)]
    else:
        assert swizzle is None
        assert scales.dtype == torch.float32
        tall = name == "BlockWise128x128"
        shape = (round_up(blocks, 4), -(-rows // 128)) if tall else (rows, blocks)
        assert scales.shape == shape
        assert scales.stride(0) == 1
        assert scales.stride(1) == shape[0] or shape[1] == 1
        by_rows = scales.double().numpy()
        by_rows = by_rows[:blocks].T.repeat(128, 0)[:rows] if tall else by_rows
        table = by_rows.tolist()
    return numbers * np.array(table).repeat(length, 1)[:, :k]


class Tensorcores:
    """The stand-in; it counts products."""

    def __init__(self):
        self.calls = []

    def __call__(self, a, b, a_scale, a_kind, b_scale, b_kind, *, swizzle_a, swizzle_b,
                 output_dtype):  # fmt: skip
        assert output_dtype == torch.float32
        assert a.shape[1] == b.shape[0]
        assert b.shape[1] % 16 == 0
        assert not a.dtype == b.dtype == torch.float8_e5m2
        self.calls.append((a_kind.name, b_kind.name))
        left = operand_of(a, a_scale, a_kind, swizzle_a)
        right = operand_of(b.t(), b_scale, b_kind, swizzle_b)
        return torch.from_numpy(left @ right.T).float()


@pytest.fixture
def tensorcores(monkeypatch):
    """A CPU that has every scheme natively."""
    stand_in = Tensorcores()
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    for module in (linear, low_bit):
        monkeypatch.setattr(module, "why_not_native", lambda name, device: "")
    return stand_in


def spread(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.randint(-6, 7, x.shape, generator=generator).exp2()).bfloat16()


def rounded(what, x, scheme):
    """The operands of both products of a tensor, each with the format and dim that it is in."""
    recipe = Recipe(*[scheme] * 3)
    made = operands(what, x, recipe, frozenset([scheme]), (True, True), (None, None))
    form = BLOCK_FORMATS[getattr(SCHEMES[scheme], what)]
    return {product: (each, form) for (product, _), each in zip(USES[what], made, strict=True)}


@pytest.mark.covering
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("product", OPERANDS)
def test_what_torch_gets_stands_for_the_quantised_operands(scheme, product, monkeypatch):
    """Those of ``fp8`` go to torch's own product, which CPUs have, too."""
    monkeypatch.setattr(F, "scaled_mm", Tensorcores())
    for tokens, inputs, outputs in ((128, 640, 256), (128, 128, 128), (256, 256, 384)):
        sizes = {"inputs": (tokens, inputs), "weights": (outputs, inputs)}
        sizes["gradients"] = tokens, outputs
        tensors = {what: spread(*sizes[what], seed) for seed, what in enumerate(sizes)}
        dims = dict(zip(OPERANDS[product], SUMMED[product], strict=True))
        pair = [rounded(what, tensors[what], scheme)[product] for what in dims]
        found = scaled_matmul(
            pair[0][0], pair[1][0], [form for _, form in pair], None, torch.float32, fast=False
        )
        exact = []
        for (what, dim), (_, form) in zip(dims.items(), pair, strict=True):
            x = tensors[what]
            x = mixed(x) if SCHEMES[scheme].hadamard and product == "wgrad" else x
            x = form.quantize(x, dim).dequantize().double()
            exact.append(x if dim else x.t())
        x, y = exact[0], exact[1].t()
        # fp32 sums, in the stand-in of results alone: docs/low-bit.md, "Products"
        terms = x.shape[1] + 3 if scheme == "fp8" else 4
        assert found.shape == (x @ y).shape
        assert ((found.double() - x @ y).abs() <= terms * 2.0**-24 * (x.abs() @ y.abs())).all()


def products(policy):
    """The output of a layer, and the gradients of its input and weight."""
    torch.manual_seed(0)
    model = nn.Linear(128, 256)
    precision = halfstep.Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(40, 128).requires_grad_()
    with precision.autocast():
        y = model(x)
    y.backward(torch.randn(40, 256))
    return [t.detach().double() for t in (y, x.grad, model.weight.grad)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_takes_the_native_product_where_the_device_has_it(scheme, tensorcores):
    policy = f"bf16-mixed,recipe={scheme}"
    found = products(policy)  # nobody says simulate
    count = 0 if scheme == "fp8" else 3  # torch's own product is called for that
    assert len(tensorcores.calls) == count
    assert halfstep.support(policy, "cpu").status == "native"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "why_not_native", lambda name, device: "it is simulated")
        simulated = products(policy)
    assert len(tensorcores.calls) == count
    for a, b in zip(found, simulated, strict=True):
        # One rounding to bf16 more, where an outer scale follows the simulated product; another
        # where a CPU adds the bias of its fp8 product.
        assert (a - b).norm() <= 1.5 * 2.0**-8 * b.norm()


class Amaxes(TorchDispatchMode):
    """Counts the searches for a largest magnitude."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.amax.default
        return func(*args, **(kwargs or {}))


def test_a_tensor_with_one_scale_is_rounded_once_and_kept_in_one_byte_a_number(tensorcores):
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    precision = halfstep.Precision("fp8", model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, kept = torch.randn(48, 64).requires_grad_(), []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with Amaxes() as amaxes:
        with precision.autocast(), saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
        y.sum().backward()
    assert amaxes.count == 3  # of input, weight and gradient
    assert sum(t.nbytes for t in kept if t.ndim) == (48 + 32) * 64
    codes = FP8_TENSOR.quantize(x.detach().bfloat16()).codes.t()
    assert torch.equal(kept[0].view(torch.uint8), codes.view(torch.uint8))
    with torch.no_grad(), precision.autocast(), Amaxes() as amaxes:
        model(x[:41])  # tensor cores sum over 16 tokens; what fills them up is cut off again
    assert amaxes.count == 2
