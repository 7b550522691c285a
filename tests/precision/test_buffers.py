"""Buffers in 16 bits: what they are recognised by, and what is refused."""

import math

import pytest
import torch
from torch import nn

from every import every
from halfstep import Precision, PrecisionError
from halfstep.precision.casting.buffers import check_buffers, kind_of_buffer

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


def test_kinds_by_name():
    def check(name, kind):
        values = (
            torch.tensor([3.0, 7.0, 11.0]) if kind == "positions" else torch.tensor([0.3, 7.1, 2.5])
        )
        assert kind_of_buffer(name, values, PLAIN) == kind

    every([(n, k) for k, ns in BY_NAME.items() for n in ns.split()], check)


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


def test_kinds_by_value():
    def check(kind, values):
        assert kind_of_buffer("thing", values, PLAIN) == kind

    every(BY_VALUE, check)


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
    with pytest.raises(PrecisionError, match=f"buffer 0.{message}.*let the policy cast it"):
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
