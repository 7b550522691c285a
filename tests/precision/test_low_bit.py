"""Linear layers below 16 bits: each product against fp64 products of operands that NumPy rounds."""

import numpy as np
import pytest
import torch
from torch import nn

import halfstep
from halfstep.precision.low_bit.linear import Clock, mixed
from halfstep.precision.masters.rounding import bits_of
from reference.blocks import bell, quantize

TOKENS, INPUTS, OUTPUTS = 48, 256, 128
BLOCKS = {
    "fp8": ("amax", None, None),
    "fp8-block": ("amax", (1, 128), (128, 128)),
    "mxfp8": ("rceil", (1, 32), (1, 32)),
    "mxfp8-e5m2": ("rceil", (1, 32), (1, 32)),
    "nvfp4-nearest": ("two-level", (1, 16), (16, 16)),
}
ELEMENTS = {
    "fp8": ("e4m3fn", "e5m2"),
    "mxfp8-e5m2": ("e4m3fn", "e5m2"),
    "nvfp4-nearest": ("e2m1", "e2m1"),
}  # of inputs and weights, and of gradients


def by_definition(x, scheme, what):
    """What an fp32 matrix becomes, in fp64, in blocks along its rows."""
    rule, plain, square = BLOCKS[scheme]
    forward, backward = ELEMENTS.get(scheme, ("e4m3fn", "e4m3fn"))
    element = backward if what == "gradients" else forward
    missing = -x.shape[1] % plain[1] if plain else 0
    padded = np.pad(x, ((0, 0), (0, missing)))
    numbers = quantize(padded, element, rule, square if what == "weights" else plain)[2]
    if rule == "two-level":  # the scale of the whole tensor: 448 times the largest e2m1, by amax
        numbers = numbers / np.float32(2688 / np.abs(x).max())
    return numbers[:, : x.shape[1]]


def close(found, expected, terms):
    """Within the rounding to bf16, twice where a scale multiplies afterwards, and of fp32 sums."""
    magnitude = np.abs(expected)
    return np.abs(found - expected) <= 2.2 * 2.0**-8 * magnitude + terms * 2.0**-22


def layer(seed=0, **shape):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.bfloat16())
        model[0].bias.copy_(model[0].bias.bfloat16())
    return model


def prepared(policy, model, **given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return halfstep.Precision(policy, model, optimizer, **given)


def products(policy, model, x, g):
    """The output, and the gradients of input and weight, for an output's gradient ``g``."""
    precision = prepared(policy, model)
    with precision.autocast():
        y = model[0](x)
        y.backward(g.to(y.dtype))
    return y.detach().double().numpy(), x.grad.double().numpy(), model[0].weight.grad.numpy()


def tensors(tokens=TOKENS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, INPUTS, generator=generator).bfloat16().float().requires_grad_()
    g = torch.randn(tokens, OUTPUTS, generator=generator).mul(1e-3).bfloat16().float()
    return x, g


def numbers(tensor):
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "mxfp8", "mxfp8-e5m2", "nvfp4-nearest"])
@pytest.mark.parametrize("tokens", [TOKENS, 41])
def test_each_product_is_that_of_operands_rounded_by_definition(scheme, tokens):
    # NVFP4 mixes operands first: that is tested alone
    scheme_of_wgrad = "bf16" if scheme == "nvfp4-nearest" else scheme
    recipe = f"{scheme}/{scheme}/{scheme_of_wgrad}"
    model, (x, g) = layer(), tensors(tokens)
    y, dx, dw = products(f"bf16-mixed,recipe={recipe},simulate=yes", model, x, g)
    X, W, G = numbers(x), numbers(model[0].weight), numbers(g)
    bias = numbers(model[0].bias)
    expected = by_definition(X, scheme, "inputs") @ by_definition(W, scheme, "weights").T + bias
    assert close(y, expected, np.abs(X).max() * INPUTS).all()
    # a weight's rows are summed over, so blocks lie along its columns
    by_rows = by_definition(np.ascontiguousarray(W.T), scheme, "weights").T
    expected = by_definition(G, scheme, "gradients") @ by_rows
    assert close(dx, expected, np.abs(G).max()).all()
    if scheme_of_wgrad != "bf16":
        left = by_definition(np.ascontiguousarray(G.T), scheme, "gradients")
        right = by_definition(np.ascontiguousarray(X.T), scheme, "inputs")
        assert close(dw, left @ right.T, np.abs(G).max() * tokens).all()


def test_a_product_that_is_kept_is_the_one_of_bf16_bit_by_bit():
    for product in range(3):
        kept = ["mxfp8"] * 3
        kept[product] = "bf16"
        x, g = tensors()
        found = products(f"bf16-mixed,recipe={'/'.join(kept)},simulate=yes", layer(), x, g)
        x, g = tensors()
        plain = products("bf16-mixed", layer(), x, g)
        same = [np.array_equal(a, b) for a, b in zip(found, plain, strict=True)]
        assert same == [i == product for i in range(3)]


def test_micro_batches_ranks_and_steps_draw_other_bits():
    clock = prepared("nvfp4,simulate=yes", layer()).clock
    drawn = [clock.draw(7), clock.draw(7), clock.draw(8)]
    clock.step += 1
    drawn.append(clock.draw(7))
    other = Clock()
    other.rank = 1
    drawn.append(other.draw(7))
    assert len(set(drawn)) == 5
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            first, second = (bits_of(torch.arange(64), key) for key in (a, b))
            assert (first == second).float().mean() < 0.1
    clock.step = 0
    assert clock.draw(7) == drawn[0]


# The mixing of tokens before a weight's gradient in NVFP4, against its definition in fp64.

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
MATRIX = (
    np.array([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) * SIGNS / 4
)


def spread(rows, columns):
    """Numbers over 40 binary exponents, so that sums of 16 are not exact in fp32."""
    x = bell(11, rows, columns) * np.exp2(bell(12, rows, columns) * 8)
    return torch.from_numpy(x).bfloat16()


def test_the_matrix_is_orthogonal_and_cancels_in_the_product():
    assert np.array_equal(MATRIX @ MATRIX.T, np.eye(16))
    assert np.array_equal(mixed(torch.eye(16).bfloat16()).double().numpy(), MATRIX)
    # numbers of few bits stay exact when they are mixed, so the product without rounding is equal
    x = torch.randint(-3, 4, (32, 8)).bfloat16()
    y = mixed(x).double()
    assert torch.equal(y.T @ y, x.double().T @ x.double())


def test_the_error_is_that_of_four_sums_and_one_rounding():
    x = spread(512, 64)
    numbers = x.double().numpy().reshape(-1, 16, 64)
    exact, size = MATRIX @ numbers, abs(MATRIX) @ abs(numbers)
    sums = 4 * 2.0**-24 / (1 - 4 * 2.0**-24) * size
    bound = sums + 2.0**-8 * (abs(exact) + sums)  # half a gap of 8 significant bits
    error = abs(mixed(x).double().numpy().reshape(exact.shape) - exact)
    assert (error <= bound).all()
    assert (error > 0.9 * bound).any()
    assert (mixed(x).float() == mixed(x.flip(1)).flip(1).float()).all()
