"""Masters of 16-bit weights: written by the user, at construction, in an unknown mode, for ever."""

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.optim.kernels import reference
from halfstep.optim.optimizers import AdamW
from halfstep.precision.masters.rounding import (
    ROUNDING,
    master as master_of,
    random_bits,
    round_stochastic,
    split24,
)
from reference import floats

N = 3000  # several chunks of the size that the tests set


@pytest.fixture
def _small_chunks(monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK", 1024)


# --- what the user writes -----------------------------------------------------------------------


@pytest.mark.parametrize("update", [mode.name for mode in ROUNDING.values() if mode.join])
def test_a_weight_is_its_master_within_half_a_gap_whatever_remainder_lies_beside_it(update):
    """Every bf16 number, as the user may write it, beside remainders of other weights."""
    weight = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, weight.shape, generator=generator).to(torch.int16)
    kept = ROUNDING[update].remainder_dtype
    remainder = bits.view(kept) if kept == torch.bfloat16 else bits.to(kept)
    master = master_of(weight, remainder).double().numpy()
    w = weight.double().numpy()
    finite = np.isfinite(w)
    half = floats.gap(w[finite], floats.BF16) / 2
    assert (np.abs(master[finite] - w[finite]) <= half).all()
    assert (np.abs(master[w == 0]) < 2.0**-134).all()  # half of the smallest bf16 number
    assert np.isnan(master[np.isnan(w)]).all()


# --- construction -------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("update", ["split24", "stochastic"])
def test_every_tensor_starts_from_its_own_random_bits(update):
    """Tensor k draws stream 2k of step 0; equal values in two tensors are rounded differently."""
    value = torch.rand(N, generator=torch.Generator().manual_seed(0))
    tensors = [nn.Parameter(torch.zeros(N, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = AdamW([{"params": tensors[:2]}, {"params": tensors[2:]}], update=update, seed=5)
    for k, p in enumerate(tensors):
        optimizer.write_master_(p, value)
        bits = random_bits(5, 0, N, stream=2 * k)
        if update == "split24":
            weight, remainder = split24(value, bits)
            assert torch.equal(optimizer.state[p]["remainder"], remainder)
        else:
            weight = round_stochastic(value, bits)
        assert torch.equal(p.detach(), weight)
    read = [optimizer.read_master(p) for p in tensors]
    assert not torch.equal(read[0], read[1])
    assert not torch.equal(read[1], read[2])


# --- modes, counters, formulas ------------------------------------------------------------------


@pytest.mark.usefixtures("each_kernel")
def test_steps_are_counted_beyond_what_fp32_holds():
    p = nn.Parameter(torch.full((400,), 1.0, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-3, update="stochastic")
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.tensor(2.0**24)  # fp32, as an older version saved it
    optimizer.load_state_dict(state)
    drawn = []
    for count in (1, 2, 3):
        with torch.no_grad():
            p.fill_(1.0)
        optimizer.step()
        assert int(optimizer.state[p]["step"]) == 2**24 + count
        drawn.append(p.detach().clone())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
