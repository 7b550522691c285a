"""The what-if of formats below 16 bits: true roundings of sampled rows, bias apart from spread."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import halfstep
from halfstep.diagnostics.statistics.numerics import load_numerics
from halfstep.diagnostics.statistics.rounding_error import rounding_error
from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS
from reference.blocks import quantize


@pytest.mark.parametrize("rows", [40, 64])
def test_to_nearest_it_is_the_error_by_definition(rows):
    x = torch.randn(rows, 70, generator=torch.Generator().manual_seed(0))
    kept = x[:, :64].numpy()  # two whole blocks of 32
    rounded = quantize(kept, "e4m3fn", "rceil", (1, 32))[2]
    wanted = np.linalg.norm(rounded - kept) / np.linalg.norm(kept)
    found = rounding_error(x, "mxfp8")
    assert found.bias == pytest.approx(wanted, rel=1e-6)  # fp32 against fp64 sums
    assert found.error == found.bias
    assert found.spread == 0


@pytest.mark.parametrize("name", [*BLOCK_FORMATS])
def test_stochastic_rounding_has_next_to_no_bias_and_more_spread_than_nearest_has_error(name):
    if BLOCK_FORMATS[name].rule == "floor":
        pytest.skip("it saturates, which is bias")
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    nearest, drawn = rounding_error(x, name), rounding_error(x, name, draws=16)
    # the estimate of the bias has an error of about (2 / n)^(1/4) spread / sqrt(16)
    assert drawn.bias < 0.1 * nearest.bias
    assert 1.1 < drawn.spread / nearest.bias < 2
    assert drawn.error == pytest.approx(math.hypot(drawn.bias, drawn.spread))
    raw = rounding_error(x, name, draws=2)
    assert raw.spread == pytest.approx(drawn.spread, rel=0.05)


def test_rows_are_sampled_and_the_scale_is_the_whole_tensors():
    x = torch.full((1000, 64), 0.3)
    x[0, 0] = 3e4  # it takes the range of fp8: 0.3 is subnormal by a scale of 448 / 3e4
    assert rounding_error(x[1:], "fp8").bias < 0.04
    some = rounding_error(x[1:], "fp8", rows=8)
    assert some.bias == rounding_error(x[1:], "fp8").bias
    plain = (BLOCK_FORMATS["fp8"].fake_quantize(x) - x)[1:].norm() / x[1:].norm()
    y = torch.cat([x[1:], x[:1]])[:, :]
    found = rounding_error(torch.cat([y[:1], x[:1], y[1:]]), "fp8", rows=1)
    assert found.bias == pytest.approx(float(plain), rel=1e-4)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(4, 64), torch.ones(3), torch.tensor(1.0), torch.zeros(0, 64),
     torch.full((4, 64), math.nan)],
)  # fmt: skip
def test_where_nothing_can_be_rounded_there_is_no_error(x):
    assert rounding_error(x, "nvfp4") is None
    assert rounding_error(x, "nvfp4", draws=4) is None


def watched(path, formats):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    precision = halfstep.Precision("bf16-mixed", model, optimizer)
    losses = []
    with halfstep.watch(model, precision, every=2, to=path, formats=formats) as watch:
        for _ in range(4):
            with precision.autocast():
                loss = model(torch.randn(32, 64)).square().mean()
            losses.append(precision.step(loss).loss)
    return losses, watch


def test_a_watch_writes_them_and_changes_no_bit(tmp_path):
    file = tmp_path / "numerics.jsonl"
    losses, watch = watched(file, ("mxfp8", "nvfp4"))
    assert losses == watched(tmp_path / "plain.jsonl", ())[0]
    assert "rounding" not in (tmp_path / "plain.jsonl").read_text()
    last = load_numerics(file).steps[-1]
    found = {(one.kind, one.name): one.rounding for one in last.tensors}
    for kind, name in (("weight", "0.weight"), ("activation", "2"), ("gradient", "2.weight")):
        for form, least, most in (("mxfp8", 0.01, 0.05), ("nvfp4", 0.05, 0.2)):
            nearest, bias, spread = found[kind, name][form]
            assert least < nearest < most
            assert bias < 0.5 * spread
    assert watch.report().tensors[0].rounding.keys() == {"mxfp8", "nvfp4"}


def test_an_unknown_format_is_refused_at_once():
    with pytest.raises(PrecisionError, match="there is no block format 'mxfp9'"):
        halfstep.watch(nn.Linear(4, 4), formats=("mxfp9",))
