"""Masters of 16-bit weights: written by the user, at construction, in an unknown mode, for ever."""

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.optim.kernels import reference as weights
from halfstep.optim.optimizers import AdamW
from halfstep.precision.masters.rounding import ROUNDING, random_bits, round_stochastic, split24
from reference import floats

N = 3000  # several chunks of the size that the tests set
MODES = [*ROUNDING]


@pytest.fixture
def _small_chunks(monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK", 1024)


def spread(count: int, seed: int) -> torch.Tensor:
    """fp32 of both signs and all magnitudes, subnormal ones included."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-140, 120, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), exponents)


# --- what the user writes -----------------------------------------------------------------------


def _mask(w: torch.Tensor) -> None:
    w.mul_((torch.arange(N) % 3 > 0).to(w.dtype))


def _infinite(w: torch.Tensor) -> None:
    w[::2] = torch.inf
    w[1::4] = -torch.inf
    w[3::8] = torch.nan


WRITES = {
    "nothing": lambda w: None,
    "zero": lambda w: w.zero_(),
    "-0": lambda w: w.fill_(-0.0),
    "a pruning mask": _mask,
    "infinities and NaN": _infinite,
    "subnormal": lambda w: w.copy_(torch.linspace(-1e-38, 1e-38, N)),
    "smaller": lambda w: w.copy_(spread(N, 7) * 2.0**-20),
    "larger": lambda w: w.copy_(spread(N, 8) * 2.0**8),
    "new, of size 1": lambda w: w.normal_(generator=torch.Generator().manual_seed(9)),
    "powers of two": lambda w: w.copy_(2.0 ** (torch.arange(N) % 200 - 100)),
    "clamped": lambda w: w.clamp_(-0.01, 0.01),
    "some": lambda w: w[: N // 3].mul_(1.7),
}


def oracle(weight: np.ndarray, remainder: np.ndarray, update: str) -> np.ndarray:
    """Where the remainder is of another weight, from the formats' definitions, in fp64.

    The master of split modes is read from integers, and lies beyond half a gap of the weight's
    only where it is not a number of the weight's sign at all; kahan's is an fp32 sum.
    """
    w = weight.astype(np.float64)
    bits = weight.view(np.uint32).astype(np.int64)
    if update == "kahan":
        with np.errstate(invalid="ignore"):
            joined = (weight + remainder.astype(np.float32)).astype(np.float64)
            other = floats.nearest(joined, floats.BF16, np.inf) != w
    else:
        integer = bits + remainder.astype(np.int64) * (256 if update == "split24" else 1)
        other = ((integer ^ bits) & 0x80000000 != 0) | ((integer & 0x7FFFFFFF) > 0x7F800000)
        other &= w == 0  # every other pair is a number that rounds to the weight
    return (remainder != 0) & other


@pytest.mark.covering
@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_what_the_user_writes_is_the_master(write, update):
    p = nn.Parameter(torch.zeros(30, 100, dtype=torch.bfloat16).t().contiguous().t())
    optimizer = AdamW([nn.Parameter(torch.zeros(3)), p], update=update)
    flat = p.detach().t().reshape(-1)  # in memory order, a view
    assert flat.data_ptr() == p.data_ptr()
    optimizer.write_master_(p, spread(N, 1).view(100, 30).t())
    WRITES[write](flat)
    visible = flat.clone()
    if update in ("stochastic", "nearest"):
        assert torch.equal(optimizer.read_master(p).t().reshape(-1), visible.float()) or (
            write == "infinities and NaN"
        )
        return
    remainder = optimizer.state[p]["remainder"].t().reshape(-1)
    before = remainder.float().numpy().copy()
    w = visible.float().numpy()
    written = oracle(w, before, update)
    # What the promise means: no master is farther from what is visible than half a gap of bf16.
    with np.errstate(invalid="ignore"):  # a NaN beside a remainder may be a signalling one
        master = optimizer.read_master(p).t().reshape(-1).numpy().astype(np.float64)
    finite = np.isfinite(w)
    assert (master[written & finite] == w[written & finite]).all()
    assert np.isfinite(master[finite]).all()
    half = floats.gap(w[finite].astype(np.float64), floats.BF16) / 2
    assert (np.abs(master[finite] - w[finite]) <= half).all()
    assert (np.abs(master[w == 0]) < 2.0**-134).all()  # half of the smallest bf16 number
    assert np.isnan(master[np.isnan(w)]).all()
    if write in ("zero", "-0"):
        assert written.sum() > 1000  # else the test looks at nothing


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
