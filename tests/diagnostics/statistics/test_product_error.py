"""What recipes would change of products: entries of the true ones, against NumPy and the layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import halfstep
from halfstep.diagnostics.statistics.numerics import load_numerics
from halfstep.diagnostics.statistics.product_error import ProductError, product_error
from halfstep.errors import DataError
from halfstep.precision.policy.recipe import PRODUCTS, SCHEMES
from halfstep.trainer.models.gpt.gpt import GPT, GPTConfig
from reference import blocks


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().float()


def test_rounding_to_nearest_is_all_bias_and_the_oracle_s():
    a, b = normal(8, 96, seed=1), normal(5, 96, seed=2)
    exact = a.double().numpy() @ b.double().numpy().T
    rounded = [blocks.quantize(x.numpy(), "e4m3fn", "rceil", (1, 32))[2] for x in (a, b)]
    wanted = np.linalg.norm(rounded[0] @ rounded[1].T - exact) / np.linalg.norm(exact)
    bias, spread = product_error(a, b, SCHEMES["mxfp8"], "fprop")
    assert spread == 0
    assert bias == pytest.approx(wanted, rel=1e-9)
    # what fills no whole block is left out
    assert product_error(a[:, :70], b[:, :70], SCHEMES["mxfp8"], "fprop") == product_error(
        a[:, :64], b[:, :64], SCHEMES["mxfp8"], "fprop"
    )


def test_drawn_bits_are_spread_and_next_to_no_bias():
    a, b = normal(64, 256, seed=1), normal(64, 256, seed=2)
    for product in ("dgrad", "wgrad"):
        drawn, nearest = (
            product_error(a, b, SCHEMES[name], product) for name in ("nvfp4", "nvfp4-nearest")
        )
        # the other operand is rounded to nearest in both
        assert drawn[1] > 0.5 * nearest[0]
        assert drawn[0] < nearest[0]
    assert product_error(a, b, SCHEMES["nvfp4"], "fprop")[1] == 0


def test_the_hadamard_matrix_is_that_of_the_scheme_and_cancels():
    a, b = normal(32, 256, seed=1), normal(32, 256, seed=2)
    a[:, ::16] *= 30
    b[:, ::16] *= 30
    mixed, unmixed = SCHEMES["nvfp4-nearest"], replace(SCHEMES["nvfp4-nearest"], hadamard=False)
    with_it, without = (product_error(a, b, scheme, "wgrad") for scheme in (mixed, unmixed))
    assert with_it[0] != without[0]
    assert product_error(a, b, mixed, "dgrad") == product_error(a, b, unmixed, "dgrad")
    # numbers of few bits stay exact when they are mixed, and the matrix cancels in their product
    few = torch.randint(-2, 3, (8, 64), generator=torch.Generator().manual_seed(0)).float()
    plain = replace(mixed, inputs="mxfp8", gradients="mxfp8", block=32)
    assert product_error(few, few.flip(0), plain, "wgrad")[0] < 0.05


@pytest.mark.parametrize(
    ("a", "b"),
    [(torch.zeros(4, 32), torch.ones(4, 32)), (torch.ones(4, 16), torch.ones(4, 16)),
     (torch.full((4, 32), torch.inf), torch.ones(4, 32)), (torch.ones(0, 32), torch.ones(4, 32))],
)  # fmt: skip
def test_what_tells_nothing(a, b):
    assert product_error(a, b, SCHEMES["mxfp8"], "fprop") is None


def gpt_step(formats, path, kernels=True):
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=64, block_size=32, vocab_size=64)
    model = GPT(shape, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    precision = halfstep.Precision("bf16-mixed", model, optimizer)
    tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    if not kernels:  # a hook of the user's makes the modules run themselves
        model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with halfstep.watch(model, precision, every=1, to=path, formats=formats) as watch:
        with precision.autocast():
            total, count = model.loss_sum((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        loss = precision.step(total / count).loss
    return loss, {(p.layer, p.product, p.recipe): p for p in watch.report().products}


def test_each_product_of_each_layer_with_kernels_and_without(tmp_path):
    loss, found = gpt_step(("mxfp8", "nvfp4"), tmp_path / "n.jsonl")
    layers = ["attn.qkv", "attn.proj", "mlp.up", "mlp.down"]
    names = {f"layers.0.{name}" for name in layers} & {key[0] for key in found}
    assert len(names) == 4
    assert {key[1:] for key in found if key[0] in names} == {
        (product, recipe) for product in PRODUCTS for recipe in ("mxfp8", "nvfp4")
    }
    # Two operands with 3 bits of mantissa: about 2.6 % each, at random; e2m1 has 1 bit.
    for (_, product, recipe), one in found.items():
        low, high = (0.02, 0.06) if recipe == "mxfp8" else (0.08, 0.35)
        assert low < one.error < high, one
        assert (one.spread > 0) == (recipe == "nvfp4" and product != "fprop")
    again, plain = gpt_step(("mxfp8", "nvfp4"), tmp_path / "m.jsonl", kernels=False)
    for key, one in found.items():
        if key[0] in names:
            assert plain[key].error == pytest.approx(one.error, rel=0.2), key
    assert gpt_step((), tmp_path / "o.jsonl")[0] == loss
    assert again == pytest.approx(loss, rel=1e-2)
    assert {(p.layer, p.product, p.recipe): p
            for p in load_numerics(tmp_path / "n.jsonl").steps[0].products} == found  # fmt: skip


@pytest.mark.parametrize("change", [{"product": "fgrad"}, {"bias": -1.0}, {"spread": "x"}])
def test_a_damaged_line_is_told(change):
    fields = ProductError("a", "fprop", "mxfp8", 0.1, 0.0).to_dict()
    assert ProductError.from_dict(fields).bias == 0.1
    with pytest.raises(DataError, match="not the error of a product"):
        ProductError.from_dict(fields | change)


def test_a_layer_called_twice_is_measured_in_its_first_call():
    """The gradient of the first call, which backward has last, goes with the first input."""
    layer = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def measured(second):
        with halfstep.watch(layer, optimizer, every=1, formats=("mxfp8",)) as watch:
            y = layer(normal(32, 32, seed=1)).square().sum()
            if second:
                y = y + layer(100 * normal(64, 32, seed=2).exp()).sum()
            y.backward()
            for p in layer.parameters():
                p.grad.zero_()
            optimizer.step()
        return watch.report().products

    assert measured(True) == measured(False) != ()
