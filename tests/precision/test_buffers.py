"""Buffers in 16 bits: what they are recognised by, and what is refused."""

import pytest
import torch
from torch import nn

from halfstep import Precision, PrecisionError
from halfstep.precision.checks import check_buffers

B16, F16 = torch.bfloat16, torch.float16


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


BY_NAME = {
    "rope": "inv_freq original_inv_freq rope_cache freqs cos_cached sin_cached cos rotary_table",
    "running statistics": "running_mean running_var e_score_correction_bias router_bias gate_bias "
    "expert_bias",
    "positions": "position_ids pos_ids relative_position_index positions pos",
    "": "scale weight_ema cost single sinew frequency_penalty opposite compose attn_mask causal "
    "masked_bias tril",
}


@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for k, names in BY_NAME.items() for n in names.split()]
)
@pytest.mark.parametrize("dtype", [B16, F16])
def test_kinds_by_name(name, kind, dtype):
    values = torch.arange(4096.0) if kind == "positions" else torch.rand(3)
    model = nn.Sequential(Holder(**{name: values}))
    check_buffers(model)
    model.to(dtype)
    if not kind:
        check_buffers(model)
        return
    message = rf"buffer 0.{name} \({kind}\).*let the policy cast it"
    with pytest.raises(PrecisionError, match=message):
        check_buffers(model)
    with pytest.raises(PrecisionError, match=message):
        Precision("bf16-pure", model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("dtype", "whole"), [(B16, 256), (F16, 2048)])
def test_whole_numbers_that_16_bits_hold_are_no_damage(dtype, whole):
    check_buffers(Holder(position_ids=torch.arange(float(whole))).to(dtype))
    check_buffers(Holder(position_ids=torch.arange(whole + 1.0)).to(dtype))
    with pytest.raises(PrecisionError, match="positions"):
        check_buffers(Holder(position_ids=torch.arange(whole + 2.0)).to(dtype))


def test_other_buffers_and_exact_ones_are_left_in_peace():
    model = Holder(
        inv_freq=torch.rand(3),
        running_mean=torch.rand(3),
        num_batches_tracked=torch.tensor(3),
        position_ids=torch.arange(4096),
    )
    check_buffers(model)
    Precision("bf16-mixed", model, torch.optim.SGD(model.parameters(), lr=0.1))
    check_buffers(Holder(position_table=torch.rand(3)).to(B16))
    check_buffers(nn.Linear(2, 2).to(B16))
    with torch.device("meta"):
        meta = Holder().to(B16)
        meta.register_buffer("inv_freq", torch.ones(3, dtype=B16))
    with pytest.raises(PrecisionError, match="inv_freq"):
        check_buffers(meta)
