"""Buffers in 16 bits: what they are recognised by, what is refused, what a cast reports."""

import math

import pytest
import torch
from torch import nn

from halfstep import CastReport, Precision, PrecisionError, cast_module_, check_buffers
from halfstep.precision.casting.buffers import kind_of_buffer

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
PLAIN = nn.Module()
INV_FREQ = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
ANGLES = torch.outer(torch.arange(4096.0), INV_FREQ)


class Holder(nn.Module):
    """A linear layer and the buffers it is given."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())

    def forward(self, x):
        return self.linear(x)


# --- recognising ---------------------------------------------------------------------------------

BY_NAME = {
    "rope": "inv_freq original_inv_freq rope_cache freqs_cis freqs cos_cached sin_cached cos "
    "rotary_table layers.0.attn.rotary_emb.inv_freq",
    "running statistics": "running_mean running_var bn.running_mean num_batches_tracked "
    "e_score_correction_bias router_bias gate_bias expert_bias",
    "positions": "position_ids pos_ids relative_position_index positions pos",
    "mask": "attn_mask causal masked_bias tril layers.0.attn.mask",
    "other": "scale weight_ema cost single sinew frequency_penalty opposite compose",
}


@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for k, ns in BY_NAME.items() for n in ns.split()]
)
def test_kinds_by_name(name, kind):
    values = (
        torch.tensor([3.0, 7.0, 11.0]) if kind == "positions" else torch.tensor([0.3, 7.1, 2.5])
    )
    assert kind_of_buffer(name, values, PLAIN) == kind


causal = torch.ones(5, 5).tril()
BY_VALUE = [
    ("rope", INV_FREQ),
    ("rope", 500000.0 ** -(torch.arange(0, 128, 2) / 128)),
    ("rope", ANGLES.cos()),
    ("rope", ANGLES.sin()),
    ("rope", torch.cat((ANGLES, ANGLES), -1).cos()[None, None]),
    ("rope", torch.stack((ANGLES.sin(), ANGLES.cos()), -1).flatten(1)),
    ("positions", torch.arange(4096.0)),
    ("positions", torch.tensor([[0.0, -1.0], [1.0, 0.0]])),
    ("mask", causal.bool()),
    ("mask", causal),
    ("mask", causal[None, None]),
    ("mask", torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf)),
    ("mask", torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -1e9)),
    ("other", torch.randn(5, generator=torch.Generator().manual_seed(0))),
    ("other", torch.rand(8, 8, generator=torch.Generator().manual_seed(0))),
    ("other", torch.ones(8)),
    ("other", torch.zeros(8, 8)),
    ("other", torch.eye(4)),
    ("other", torch.tensor(1.0)),
    ("other", torch.linspace(1, 0.1, 9)),
    ("other", 1.1 ** torch.arange(9)),
    ("other", torch.arange(5)),
    ("other", torch.empty(0)),
]


@pytest.mark.parametrize(("kind", "values"), BY_VALUE)
def test_kinds_by_value(kind, values):
    assert kind_of_buffer("thing", values, PLAIN) == kind


@pytest.mark.parametrize("dtype", [B16, F16])
@pytest.mark.parametrize("values", [INV_FREQ, ANGLES.cos(), ANGLES.sin(), torch.arange(200.0)])
def test_kinds_are_still_seen_when_rounded(values, dtype):
    expected = "positions" if values.max() > 1 else "rope"
    assert kind_of_buffer("thing", values.to(dtype), PLAIN) == expected


def test_kinds_by_owner():
    class LlamaRotaryEmbedding(nn.Module):
        pass

    assert kind_of_buffer("table", torch.tensor([0.3, 0.7, 0.2]), LlamaRotaryEmbedding()) == "rope"
    with torch.device("meta"):
        assert kind_of_buffer("x", torch.ones(3), PLAIN) == "other"
        assert kind_of_buffer("position_ids", torch.ones(3), PLAIN) == "positions"


# --- what is 16 bit already ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [B16, F16])
@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (
            {"inv_freq": INV_FREQ},
            r"inv_freq \(rope\).*at position 4096 an angle may be off by .* rad",
        ),
        (
            {"table": ANGLES.cos()},
            r"table \(rope\).*of 4096 positions distinct, each number off by",
        ),
        ({"running_mean": torch.rand(3)}, r"running_mean \(running statistics\).*round to nothing"),
        ({"position_ids": torch.arange(4096.0)}, r"position_ids \(positions\).*of 4096 positions"),
    ],
)
def test_a_model_that_model_to_has_damaged_is_refused(buffer, message, dtype):
    model = nn.Sequential(Holder(**buffer)).to(dtype)
    with pytest.raises(PrecisionError, match=f"buffer 0.{message}.*cast_module_"):
        check_buffers(model)
    for policy in ("bf16-master" if dtype == B16 else "fp16-master", "bf16-pure"):
        with pytest.raises(PrecisionError, match=message):
            Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_damage_is_counted():
    # of 0 to 4095, bf16 has 256 up to 255, 128 in each of [256, 512) to [2048, 4096), and 4096
    assert 256 + 4 * 128 + 1 == 769
    with pytest.raises(PrecisionError, match="769 of 4096 positions distinct"):
        check_buffers(Holder(positions=torch.arange(4096.0)).to(B16))
    # fp16 has every whole number up to 2048, every second up to 4096
    with pytest.raises(PrecisionError, match="3073 of 4096 positions distinct"):
        check_buffers(Holder(positions=torch.arange(4096.0)).to(F16))
    # a frequency below 1 is off by up to 2^-9 (half an ulp of bf16 in [0.5, 1)): 4096 / 2^9
    with pytest.raises(PrecisionError, match="off by 8 rad"):
        check_buffers(Holder(inv_freq=INV_FREQ).to(B16))
    measured = (INV_FREQ.to(B16).double() - INV_FREQ.double()).abs().max() * 4096
    assert 1 < measured <= 8


@pytest.mark.parametrize(("dtype", "whole"), [(B16, 256), (F16, 2048)])
def test_whole_numbers_that_16_bits_hold_are_no_damage(dtype, whole):
    check_buffers(Holder(position_ids=torch.arange(float(whole))).to(dtype))
    check_buffers(Holder(position_ids=torch.arange(whole + 1.0)).to(dtype))
    with pytest.raises(PrecisionError, match=f"{whole + 1} of {whole + 2} positions distinct"):
        check_buffers(Holder(position_ids=torch.arange(whole + 2.0)).to(dtype))


def test_other_buffers_and_exact_ones_are_left_in_peace():
    model = Holder(
        inv_freq=INV_FREQ,
        running_mean=torch.rand(3),
        num_batches_tracked=torch.tensor(3),
        position_ids=torch.arange(4096),
        mask=causal.bool(),
    )
    check_buffers(model)
    Precision("bf16-mixed", model, torch.optim.SGD(model.parameters(), lr=0.1))
    check_buffers(Holder(scale=torch.rand(3), mask=causal, ids=torch.arange(9)).to(B16))
    check_buffers(nn.Linear(2, 2).to(B16))
    with torch.device("meta"):
        meta = Holder().to(B16)
        meta.register_buffer("inv_freq", torch.ones(3, dtype=B16))
    with pytest.raises(PrecisionError, match="will be rounded"):
        check_buffers(meta)


# --- casting a module ----------------------------------------------------------------------------


def test_parameters_are_cast_and_buffers_are_not():
    model = Holder(inv_freq=INV_FREQ, scale=torch.rand(5), steps=torch.tensor(3))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    same = dict(model.named_parameters())
    reports = {r.name: r for r in cast_module_(model, B16)}
    assert set(reports) == {"linear.weight", "linear.bias", "inv_freq", "scale"}
    for name, parameter in model.named_parameters():
        assert parameter is same[name]
        assert torch.equal(parameter, before[name].to(B16))
        report = reports[name]
        error = (parameter.double() - before[name].double()).abs()
        assert (report.from_dtype, report.to_dtype) == (F32, B16)
        assert report.max_abs_error == error.max().item()
        assert report.max_rel_error == (error / before[name].double().abs()).max().item()
        assert 0 < report.max_rel_error <= 2.0**-8  # half an ulp of bf16, relative
    assert torch.equal(model.inv_freq, INV_FREQ)
    for name in ("inv_freq", "scale"):
        assert reports[name] == CastReport(name, F32, F32)
    check_buffers(model)


def test_named_buffers_are_cast():
    model = Holder(scale=torch.rand(5), mask=causal, other=torch.rand(2))
    cast_module_(model, B16, buffers=["sc*", "mask"])
    assert [b.dtype for b in model.buffers()] == [B16, B16, F32]


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        # users.md, acceptance test L: a bf16 RoPE cast is refused
        (
            {"inv_freq": INV_FREQ},
            r"inv_freq \(rope\) is not cast to bf16.*cosines are off by up to 1",
        ),
        ({"thing": INV_FREQ}, r"thing \(rope\) is not cast to bf16"),
        ({"cos": ANGLES.cos()}, r"cos \(rope\) is not cast to bf16: numbers are off by up to 0.00"),
        ({"ids": torch.arange(4096.0)}, r"ids \(positions\).*769 of 4096 positions distinct"),
        (
            {"running_var": torch.rand(3)},
            r"running_var \(running statistics\) is not cast.*get lost",
        ),
        (
            {"counts": torch.tensor([0.0, 257.0])},
            "counts holds whole numbers, of which 1 of 2 would",
        ),
    ],
)
def test_sensitive_and_lossy_whole_buffers_are_refused_and_nothing_is_changed(buffer, message):
    model = Holder(first=torch.rand(3), **buffer)
    with pytest.raises(PrecisionError, match=message):
        cast_module_(model, B16, buffers=["*"])
    assert {t.dtype for t in model.state_dict().values()} == {F32}


def test_the_rope_damage_is_the_one_that_was_measured():
    # users.md, item 21: "max cos error 2.0"; this table's is what fp64 says
    positions = torch.arange(4096, dtype=torch.float64)
    exact, rounded = (
        torch.outer(positions, f.double()).cos() for f in (INV_FREQ, INV_FREQ.to(B16))
    )
    worst = (exact - rounded).abs().max().item()
    assert worst > 1.5
    with pytest.raises(PrecisionError, match=f"cosines are off by up to {worst:.2g};"):
        cast_module_(Holder(inv_freq=INV_FREQ), B16, buffers=["inv_freq"])


def test_whole_numbers_that_fit_are_cast():
    model = Holder(counts=torch.tensor([0.0, 256.0]))
    cast_module_(model, B16, buffers=["counts"])
    assert model.counts.tolist() == [0.0, 256.0]


def test_overflow_and_underflow_are_counted():
    model = Holder(values=torch.tensor([1e5, -7e4, 65504.0, 1e-9, -1e-8, 0.0, math.inf, 1.5]))
    (report,) = [r for r in cast_module_(model, F16, buffers=["values"]) if r.name == "values"]
    assert (report.overflowed, report.underflowed) == (2, 2)
    # 2^-25 rounds to 0: the largest absolute error of what stayed finite is 1e-8 itself
    assert report.max_abs_error == torch.tensor(1e-8).item()
    assert report.max_rel_error == 1.0


def test_kept_modules_stay_in_fp32_and_compute_so():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    reports = {r.name: r for r in cast_module_(model, B16, keep_fp32=["type:LayerNorm", "2"])}
    assert [p.dtype for p in model.parameters()] == [B16, B16, F32, F32, F32, F32]
    assert reports["1.weight"] == CastReport("1.weight", F32, F32)
    x = torch.randn(2, 4).to(B16)
    hidden = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
    normed = torch.nn.functional.layer_norm(hidden.float(), (4,)).to(B16)
    expected = torch.nn.functional.linear(normed.float(), model[2].weight, model[2].bias).to(B16)
    assert torch.equal(model(x), expected)
    cast_module_(model, F32)
    assert {p.dtype for p in model.parameters()} == {F32}
    assert model(x.float()).dtype == F32


def test_gradients_go_along():
    model = Holder()
    model(torch.ones(1, 4)).sum().backward()
    cast_module_(model, B16)
    assert model.linear.weight.grad.dtype == B16
    model(torch.ones(1, 4, dtype=B16)).sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffers": ["nothing"]}, "'nothing' matches no floating buffer of the model: scale"),
        ({"keep_fp32": ["nothing"]}, "rule 'nothing' -> fp32 matches no module"),
        ({"dtype": torch.float64}, "cast to fp64; allowed: fp32, bf16, fp16"),
        ({"dtype": torch.int8}, "cast to int8; allowed"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message):
    model = Holder(scale=torch.rand(2))
    with pytest.raises(PrecisionError, match=message):
        cast_module_(model, **{"dtype": B16, **options})
    assert {p.dtype for p in model.parameters()} == {F32}
