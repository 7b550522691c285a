"""The lab's experiment ``underflow`` against gradients of a plain loop and NumPy's fp16."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from halfstep.lab.experiments.numbers import underflow
from halfstep.lab.material import batches, gpt, loss_of
from lab.drawn import assert_drawn, made


def exponents(values: torch.Tensor) -> list[int]:
    """floor(log2 |x|) of the numbers that are not 0."""
    magnitudes = values.double().abs().flatten()
    return (torch.frexp(magnitudes[magnitudes > 0]).exponent - 1).tolist()


def test_what_becomes_zero_is_what_fp16_rounds_to_zero():
    generator = torch.Generator().manual_seed(0)
    spread = torch.empty(5000).uniform_(-45, -1, generator=generator)
    values = torch.exp2(spread.double()).float()
    counts = Counter(exponents(values))
    for scale in (0, 7, 16):
        zeros = np.float16(values.numpy() * np.float32(2.0**scale)) == 0
        share = underflow.share_below(counts, underflow.LEAST - scale)
        assert share == pytest.approx(zeros.mean(), abs=1e-12)
    # the boundary itself is a tie, which goes to the even number 0; what follows it survives
    edge = np.float32(2.0**underflow.LEAST)
    assert np.float16(edge) == 0
    assert np.float16(np.nextafter(edge, np.float32(1))) == np.float16(2.0**-24)


def test_the_gradients_are_those_of_a_plain_loop():
    model, batch = gpt(1, 32, 16), next(batches(3, 16, seed=1))
    found = underflow.gradients(model, batch)
    seen = []

    def look(module, inputs, output):
        output.register_hook(seen.append)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(look)
    loss_of(model, batch).backward()
    weights = Counter(e for p in model.parameters() for e in exponents(p.grad))
    # Sums are made in another order where modules are watched: a number beside a power of two may
    # go to the next exponent.
    moved = (weights - found["gradient"]).total() + (found["gradient"] - weights).total()
    assert moved < 0.001 * weights.total()
    linear = Counter(e for gradient in seen for e in exponents(gradient))
    assert linear.total() > 0
    assert (linear - found["activation_gradient"]).total() < 0.001 * linear.total()


def require_claims(data, small: int, large: int) -> None:
    for lost in data["lost"].values():
        assert lost == sorted(lost, reverse=True)
        assert lost[-1] < 1e-3
    assert data["lost"][str(small)][0] < data["lost"][str(large)][0]
    for name, counts in data["histogram"].items():
        total = sum(counts.values())
        below = sum(count for e, count in counts.items() if int(e) < -25)
        assert data["lost"][name][0] == below / total
        # k times the tokens make every gradient about k times smaller
    mean = {
        name: sum(int(e) * count for e, count in counts.items()) / sum(counts.values())
        for name, counts in data["histogram"].items()
    }
    # within half a power of two: other sequences have other gradients
    assert mean[str(small)] - mean[str(large)] == pytest.approx(np.log2(large / small), abs=0.5)


def test_a_larger_batch_loses_more(tmp_path, monkeypatch):
    one = made("underflow", small=2, large=16, steps=2)
    require_claims(one.data, 2, 16)
    assert_drawn(one, tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_trained_gpt_loses_a_share_that_grows_with_its_batch():
    data = made("underflow").data
    require_claims(data, 16, 96)
    assert 0.02 < data["lost"]["16"][0] < 0.15
    assert 0.15 < data["lost"]["96"][0] < 0.4
