"""The text, batches and training that experiments share."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from halfstep.lab import material
from halfstep.optim import AdamW


def test_a_batch_is_text_and_the_byte_that_follows_each():
    text = material.text()
    whole = bytes(text.tolist())
    assert len(whole) > 200_000
    assert b"expression" in whole
    cut = len(whole) * 9 // 10
    for held_out, part in ((False, whole[:cut]), (True, whole[cut:])):
        inputs, targets = next(material.batches(4, 32, seed=3, held_out=held_out))
        assert inputs.shape == targets.shape == (4, 32)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert all(bytes([*row.tolist(), int(last)]) in part
                   for row, last in zip(inputs, targets[:, -1], strict=True))  # fmt: skip


def test_batches_follow_from_their_seed_and_differ():
    first, second = islice(material.batches(2, 16, seed=0), 2)
    again, other = next(material.batches(2, 16, seed=0)), next(material.batches(2, 16, seed=1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])


def test_it_trains_with_a_warm_up_and_says_what_each_step_did():
    torch.manual_seed(0)
    model = material.gpt(layers=1, width=32, length=16)
    optimizer = AdamW(model.parameters(), lr=4e-3)
    rates, losses = [], []

    def look(step, precision):
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(material.validation(precision, model, 16))

    data = material.batches(8, 16, seed=0)
    results = material.train("fp32", model, optimizer, data, 30, warmup=10, after=look)
    assert rates[:10] == pytest.approx([4e-4 * step for step in range(1, 11)])
    assert set(rates[10:]) == {4e-3}
    assert len(results) == 30
    assert all(result.applied for result in results)
    assert results[0].loss == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.1)
    assert losses[-1] < losses[0] - 0.5
