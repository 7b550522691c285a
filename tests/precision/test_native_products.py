"""Native products below 16 bits: what is handed to torch, read back as cuBLAS documents it.

No CPU has such products but fp8 by tensor. A stand-in for ``torch.nn.functional.scaled_mm`` checks
sizes and strides as torch's CUDA code does, and reads codes and scales by their documented layouts.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS
from halfstep.precision import low_bit
from halfstep.precision.low_bit import linear, native
from halfstep.precision.low_bit.native import scaled_product
from halfstep.precision.policy.recipe import OPERANDS, SCHEMES

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
    if name == "TensorWise":
        assert swizzle is None
        assert scales.shape == ()
        return numbers * scales.double().item()
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


@pytest.mark.covering
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("product", OPERANDS)
def test_what_torch_gets_stands_for_the_quantised_operands(scheme, product, monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", Tensorcores())
    forms = [BLOCK_FORMATS[getattr(SCHEMES[scheme], kind)] for kind in OPERANDS[product]]
    for rows, columns, k in ((136, 256, 640), (128, 128, 128), (1, 384, 256)):
        for dims in ((1, 1), (1, 0), (0, 0)):
            a, b = spread(rows, k), spread(columns, k, 1)
            left = forms[0].quantize(a if dims[0] else a.t(), dims[0])
            right = forms[1].quantize(b if dims[1] else b.t(), dims[1])
            found = scaled_product(left, right).double()
            x, y = left.dequantize().double(), right.dequantize().double()
            x, y = x if dims[0] else x.t(), y.t() if dims[1] else y
            # the stand-in's result and the scales of whole tensors are rounded to fp32
            bound = 4 * 2.0**-24 * (x.abs() @ y.abs())
            assert found.shape == (rows, columns)
            assert ((found - x @ y).abs() <= bound).all()


def test_the_product_of_fp8_is_torchs_own_on_a_cpu():
    """torch has fp8 by tensor on CPUs, too: the one product that is tried here for what it is."""
    for forms, k in ((("fp8", "fp8"), 256), (("fp8-e5m2", "fp8"), 40)):
        a, b = (BLOCK_FORMATS[name].quantize(spread(48, k, i), 1) for i, name in enumerate(forms))
        x, y = a.dequantize().double(), b.dequantize().double().t()
        found = scaled_product(a, b).double()
        # fp32 sums: docs/low-bit.md, "Products"
        assert ((found - x @ y).abs() <= (k + 3) * 2.0**-24 * (x.abs() @ y.abs())).all()


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
    assert len(tensorcores.calls) == 3
    assert halfstep.support(policy, "cpu").status == "native"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "why_not_native", lambda name, device: "it is simulated")
        simulated = products(policy)
    assert len(tensorcores.calls) == 3
    for a, b in zip(found, simulated, strict=True):
        # One rounding to bf16 more, where an outer scale follows the simulated product, before a
        # bias of at most 1 / sqrt(128) is added.
        assert ((a - b).abs() <= 2 * 2.0**-8 * (b.abs() + 128**-0.5)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_probe_sees_scales_in_a_wrong_layout(scheme, monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(F, "scaled_mm", Tensorcores())
    assert native._failed_probe(scheme, device) == ""
    if scheme == "fp8":
        monkeypatch.setattr(F, "scaled_mm", lambda *a, **k: Tensorcores()(*a, **k) * 1.01)
    elif scheme == "fp8-block":
        right = native._by_columns
        monkeypatch.setattr(native, "_by_columns", lambda *a: right(*a).flip(0))
    else:
        plain = lambda s: F.pad(s, (0, -s.shape[1] % 4, 0, -len(s) % 128)).reshape(-1)  # noqa: E731
        monkeypatch.setattr(native, "swizzled", plain)
    assert "wrong" in native._failed_probe(scheme, device)

    def refuses(*args, **kwargs):
        raise RuntimeError("CUDA error: not supported")

    monkeypatch.setattr(F, "scaled_mm", refuses)
    assert "not supported" in native._failed_probe(scheme, device)


def test_a_cpu_has_none_and_says_what_to_add():
    with pytest.raises(PrecisionError, match=r"a CPU has no nvfp4 products; add simulate"):
        products("nvfp4")
