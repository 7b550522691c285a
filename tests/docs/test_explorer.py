"""The explorers' arithmetic in JavaScript is that of halfstep.formats, for every format.

The scripts run in QuickJS. Numbers go there and back as the two halves of their 64 bits, since
JSON has neither infinities nor NaN.
"""

from __future__ import annotations

import json
import math
import struct

import pytest
import quickjs
import torch
from tests.docs.blocks import DOCS

from every import every
from halfstep.formats import BLOCK_FORMATS, FORMATS

LANGUAGES = ("en", "zh")

SCRIPTS = DOCS / "javascripts"
COUNT = 10_000

READ_AND_WRITE = """
const view = new DataView(new ArrayBuffer(8));
function numbers(text) {
  return JSON.parse(text).map(([high, low]) => {
    view.setUint32(0, high); view.setUint32(4, low);
    return view.getFloat64(0);
  });
}
function halves(x) {
  view.setFloat64(0, x);
  return [view.getUint32(0), view.getUint32(4)];
}
"""


@pytest.fixture(scope="module")
def js():
    context = quickjs.Context()
    script = (SCRIPTS / "formats.js").read_text(encoding="utf-8")
    context.eval(script + READ_AND_WRITE)
    return context


def halves(x):
    return struct.unpack(">II", struct.pack(">d", x))


def number(pair):
    return struct.unpack(">d", struct.pack(">II", *pair))[0]


def same(pairs, expected):
    """Bit for bit, zeros with their sign; any NaN is NaN."""
    for pair, x in zip(pairs, expected, strict=True):
        found = number(pair)
        assert halves(found) == halves(x) or (math.isnan(found) and math.isnan(x)), (found, x)


def mapped(js, call, values):
    """``call`` of every x, in JavaScript."""
    text = json.dumps([halves(x) for x in values])
    return json.loads(js.eval(f"JSON.stringify(numbers({text!r}).map((x) => {call}))"))


def values_for(form):
    """Random bits of fp64 and fp32, and what is hard in the format: ties, ends, subnormals."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (2000,), generator=generator)
    wide = bits.view(torch.float64)
    narrow = torch.randint(-(2**31), 2**31 - 1, (2000,), generator=generator, dtype=torch.int32)
    narrow = narrow.view(torch.float32).double()
    low, high = math.log2(form.min_subnormal) - 2, math.log2(form.max) + 1
    within = torch.rand(2000, generator=generator, dtype=torch.float64) * (high - low) + low
    within = torch.exp2(within) * torch.where(narrow < 0, -1.0, 1.0)
    held = form.round_to(within)
    held = held[held.isfinite()]
    gaps = torch.tensor([form.ulp(x) for x in held.tolist()], dtype=torch.float64)
    ties = torch.cat([held + gaps / 2, held - gaps / 2])
    ends = [
        0.0, math.inf, math.nan, form.max, form.min_normal, form.min_subnormal,
        form.min_subnormal / 2, form.max + form.ulp(form.max) / 2, 5e-324,
    ]  # fmt: skip
    near = [math.nextafter(x, to) for x in ends for to in (-math.inf, math.inf)]
    ends = torch.tensor([sign * x for x in [*ends, *near] for sign in (1, -1)], dtype=torch.float64)
    found = torch.cat([ends, ties, wide, narrow, within, held])[:COUNT]
    more = torch.randn(COUNT - len(found), generator=generator, dtype=torch.float64)
    return torch.cat([found, more])


def test_numbers_are_rounded_alike(js):
    def check(name):
        form = FORMATS[name]
        values = values_for(form)
        assert len(values) == COUNT
        call = f"halves(Formats.round(Formats.byName.{name}, x))"
        same(mapped(js, call, values.tolist()), form.round_to(values).tolist())

    every(FORMATS, check)


@pytest.mark.parametrize(
    "name", [n if n == "e4m3fn" else pytest.param(n, marks=pytest.mark.slow) for n in FORMATS]
)
def test_bits_gaps_and_neighbours_are_alike(js, name):
    form = FORMATS[name]
    values = values_for(form).tolist()
    numbers = [x for x in form.round_to(torch.tensor(values, dtype=torch.float64)).tolist()
               if not math.isnan(x)] + [math.nan] * form.has_nan  # fmt: skip
    found = mapped(js, f"Formats.neighbours(Formats.byName.{name}, x).map(halves)", numbers)
    for x, pair in zip(numbers, found, strict=True):
        low, high = (number(side) for side in pair)
        if all(map(math.isfinite, (low, x, high))):
            between = torch.tensor([(low + x) / 2, (x + high) / 2], dtype=torch.float64)
            rounded = form.round_to(between).tolist()  # no other number lies there
            assert low < x < high
            assert rounded[0] in (low, x)
            assert rounded[1] in (x, high)
    found = mapped(js, f"Formats.bitsOf(Formats.byName.{name}, x)", numbers)
    assert [tuple(fields) for fields in found] == [form.bits_of(x) for x in numbers]
    finite = [x for x in numbers if math.isfinite(x)]
    same(
        mapped(js, f"halves(Formats.gap(Formats.byName.{name}, x))", finite),
        [form.ulp(x) for x in finite],
    )


def test_the_formats_are_halfsteps(js):
    fields = ("name", "bits", "max", "minNormal", "minSubnormal", "eps")
    found = json.loads(
        js.eval(
            f"JSON.stringify(Formats.FORMATS.map((f) => {json.dumps(fields)}.map((k) => f[k])))"
        )
    )
    assert found == [
        [f.name, f.bits, f.max, f.min_normal, f.min_subnormal, f.eps] for f in FORMATS.values()
    ]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_blocks_are_scaled_and_rounded_alike(js, name):
    """Each block as a tensor of its own, as on the page, of magnitudes all over fp32."""
    form = BLOCK_FORMATS[name]
    size = form.block[1]
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randn(-(-COUNT // size), size, generator=generator)
    middle = torch.randint(-140, 120, (len(blocks), 1), generator=generator)
    spread = torch.randint(-8, 1, blocks.shape, generator=generator)
    blocks = (blocks.double() * torch.exp2((middle + spread).double())).float()
    blocks[0] = 0.0
    blocks[1, 0], blocks[2, 0] = form.element.max, torch.finfo(torch.float32).max
    text = json.dumps([[halves(x) for x in block] for block in blocks.tolist()])
    found = json.loads(
        js.eval(
            f"""JSON.stringify(JSON.parse({text!r}).map((block) => {{
              const form = Formats.BLOCKS.find((one) => one.name === "{name}");
              const xs = numbers(JSON.stringify(block));
              const by = Formats.scales(form, Math.max(...xs.map(Math.abs)));
              return xs.map((x) => halves(Formats.inBlock(form, x, by).value));
            }}))"""
        )
    )
    for block, pairs in zip(blocks, found, strict=True):
        same(pairs, form.quantize(block.view(1, size)).dequantize()[0].tolist())


@pytest.mark.parametrize("name", ["fp16", "e4m3fn", "e5m2"])
def test_shares_are_those_of_numbers_spread_evenly(js, name):
    form, cells = FORMATS[name], 4096
    steps = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    for exponent in range(int(math.log2(form.min_subnormal)) - 3, int(math.log2(form.max)) + 3):
        x = form.round_to(2.0**exponent * (1 + steps))
        call = f"JSON.stringify(Formats.shares(Formats.byName.{name}, {{'{exponent}': 7}}, 0))"
        found = json.loads(js.eval(call))
        beyond = ~x.isfinite()
        assert found["zero"] == pytest.approx((x == 0).double().mean().item(), abs=1 / cells)
        assert found["overflow"] == pytest.approx(beyond.double().mean().item(), abs=1 / cells)
        small = ((x > 0) & (x < form.min_normal)).double().mean().item()
        assert found["subnormal"] == pytest.approx(small, abs=1 / cells)
