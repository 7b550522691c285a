"""Linear layers under the published recipes, against exact products of what each recipe rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.formats import block_format
from halfstep.precision.casting.block_products import Layer, Noise, linear, rotated
from halfstep.precision.policy.recipes import RECIPES, parse_recipe
from reference import blocks

# Of the papers and of TransformerEngine: the formats of left and right, and of which left operand
# is rounded stochastically. W and x are rounded along the dim that each product contracts.
PUBLISHED = {
    "fp8": {"fprop": ("fp8", "fp8"), "dgrad": ("fp8-e5m2", "fp8"), "wgrad": ("fp8-e5m2", "fp8")},
    "fp8-block": {
        "fprop": ("fp8-block", "fp8-block-2d"),
        "dgrad": ("fp8-block", "fp8-block-2d"),
        "wgrad": ("fp8-block", "fp8-block"),
    },
    "mxfp8": dict.fromkeys(("fprop", "dgrad", "wgrad"), ("mxfp8", "mxfp8")),
    "nvfp4": {
        "fprop": ("nvfp4", "nvfp4-2d"),
        "dgrad": ("nvfp4", "nvfp4-2d"),
        "wgrad": ("nvfp4", "nvfp4"),
    },
}


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.from_numpy(blocks.bell(11, 256, 384)).to(dtype).view(2, 128, 384)
    weight = torch.from_numpy(blocks.bell(12, 128, 384)).to(dtype) / 16
    g = torch.from_numpy(blocks.bell(13, 256, 128)).to(dtype).view(2, 128, 128) / 64
    return x, weight, torch.from_numpy(blocks.bell(14, 1, 128))[0].to(dtype), g


def hadamard_of(x: Tensor) -> Tensor:
    """The rotation by its definition: (i, j) is (-1)^(bits that i and j share) times s_i / 4."""
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    matrix = torch.tensor(
        [[signs[i] * (-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)],
        dtype=torch.float64,
    )
    return (x.double().reshape(-1, 16) @ matrix).reshape(x.shape)


def expected(recipe: str, which: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The exact product of the rounded operands, and the sum of magnitudes."""
    left, right = map(block_format, PUBLISHED[recipe][which])
    bits = None
    if recipe == "nvfp4" and which == "wgrad":
        a, b = rotated(a), rotated(b.t()).t()
    if recipe == "nvfp4" and which != "fprop":
        bits = Noise(3, 7, "mlp.up", which).bits(a)
    a = left.quantize(a, -1, bits=bits).dequantize().double()
    b = right.quantize(b, -2).dequantize().double()
    return a @ b, a.abs() @ b.abs()


@pytest.mark.parametrize("recipe", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_three_products_are_those_of_the_rounded_operands(recipe, dtype):
    x, weight, bias, g = tensors(dtype)
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    out = linear(x, weight, bias, Layer(RECIPES[recipe], "mlp.up", seed=3, step=7))
    out.backward(g)
    flat, rows = x.detach().flatten(0, 1), g.flatten(0, 1)
    w = weight.detach()
    found = {
        "fprop": (out - bias).detach().flatten(0, 1),
        "dgrad": x.grad.flatten(0, 1),
        "wgrad": weight.grad,
    }
    operands = {"fprop": (flat, w.t()), "dgrad": (rows, w), "wgrad": (rows.t(), flat)}
    for which, got in found.items():
        assert got.dtype == dtype
        want, magnitude = expected(recipe, which, *operands[which])
        k = operands[which][0].shape[1]
        # fp32 sums of k products and a few scales; of bf16 results half a gap; of the output the
        # sum with the bias, whose result is rounded once more, at up to 4 times the size.
        last = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
        bound = (k + 5) * 2.0**-24 * magnitude + last * want.abs()
        bound += (4 * last) * (2.0 if which == "fprop" else 0.0)
        assert ((got.double() - want).abs() <= bound + 1e-30).all(), which
    assert torch.allclose(bias.grad.double(), rows.double().sum(0), rtol=1e-2, atol=1e-2)


def test_the_rotation_is_the_definition_s_and_leaves_products_as_they_are():
    x = torch.from_numpy(blocks.bell(15, 64, 128))
    exact = hadamard_of(x)
    # bf16 rounds by at most half a gap, 2^-8 relative to 8 significant bits; fp32 sums before that
    assert ((rotated(x).double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all()
    assert torch.allclose(exact @ exact.t(), x.double() @ x.double().t(), atol=1e-9)
    spike = torch.zeros(1, 16)
    spike[0, 3] = 8.0
    assert (rotated(spike).abs() == 2).all()


def test_a_product_without_formats_is_the_plain_one():
    x, weight, _, g = tensors(torch.bfloat16)
    recipe = replace(RECIPES["mxfp8"], name="forward only", dgrad=None, wgrad=None)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    linear(*leaves, None, Layer(recipe, "head")).backward(g)
    assert torch.equal(leaves[0].grad, (g.flatten(0, 1) @ weight).view_as(x))
    assert torch.equal(leaves[1].grad, g.flatten(0, 1).t() @ x.flatten(0, 1))


def test_a_replay_draws_the_same_bits_and_another_step_others():
    x, weight, _, g = tensors(torch.bfloat16)

    def gradients(**layer) -> Tensor:
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        named = {"name": "mlp.up", "step": 4, **layer}
        linear(*leaves, None, Layer(RECIPES["nvfp4"], **named)).backward(g)
        return torch.cat([leaf.grad.flatten() for leaf in leaves])

    assert torch.equal(gradients(), gradients())
    for other in ({"step": 5}, {"seed": 1}, {"name": "mlp.down"}):
        assert not torch.equal(gradients(), gradients(**other))


def test_gradients_are_asked_for_one_by_one():
    x, weight, _, g = tensors(torch.bfloat16)
    weight.requires_grad_()
    linear(x, weight, None, Layer(RECIPES["mxfp8"], "mlp")).backward(g)
    assert x.grad is None
    assert weight.grad is not None


def test_a_size_that_does_not_fit_names_layer_product_and_what_to_do():
    layer = Layer(RECIPES["mxfp8"], "blocks.3.mlp.up")
    with pytest.raises(
        PrecisionError,
        match=r"blocks of 32 along dim 1, and blocks\.3\.mlp\.up \(fprop\) has 40 there",
    ):
        linear(torch.zeros(64, 40), torch.zeros(32, 40), None, layer)
    x = torch.zeros(48, 64, requires_grad=True)  # 48 tokens: wgrad contracts them
    out = linear(x, torch.zeros(32, 64, requires_grad=True), None, layer)
    with pytest.raises(PrecisionError, match=r"mlp\.up \(wgrad\) has 48 there .* pad it to 64"):
        out.sum().backward()


def test_recipes_are_known_by_name():
    assert list(RECIPES) == list(PUBLISHED)
    assert parse_recipe("nvfp4") is RECIPES["nvfp4"] is parse_recipe(RECIPES["nvfp4"])
    with pytest.raises(PrecisionError, match="no recipe 'nvfp8'; allowed: fp8, fp8-block"):
        parse_recipe("nvfp8")
