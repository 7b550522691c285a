"""The lab's experiment ``overflow``: fp16 fails where a layer's output passes its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfstep.lab.experiments.numbers import overflow
from halfstep.lab.material import batches, gpt, loss_of
from lab.drawn import assert_drawn, made


def require_claims(data) -> None:
    for size, *losses in zip(data["largest"], *data["losses"].values(), strict=True):
        found = dict(zip(data["losses"], losses, strict=True))
        # 65520 is halfway between 65504 and the 65536 that fp16 does not have. The largest output
        # is that of fp32; of fp16 operands it is off by a few units of 2^-11.
        if not 0.99 * 65520 < size < 1.01 * 65520:
            for scale in overflow.LOSS_SCALES:
                assert (found[f"fp16 {scale}"] is None) == (size > 65520), (size, scale)
        # bf16 operands are off by 2^-9, and the mean over 1024 tokens by much less.
        assert found["bf16"] == pytest.approx(found["fp32"], abs=0.02)
        assert found["fp32"] == pytest.approx(data["losses"]["fp32"][0], abs=0.02)
    gone = [loss is None for loss in data["losses"]["fp16 65536"]]
    assert gone == sorted(gone)
    assert any(gone)
    assert data["cause"]["module"].endswith(("mlp.down", "attn.proj"))


def test_fp16_fails_above_its_limit_whatever_the_loss_scale(tmp_path, monkeypatch):
    one = made("overflow", layers=1, steps=2, powers=20)
    require_claims(one.data)
    assert "halfstep names the first cause" in one.verdict("en")
    assert "with a loss scale of 65536 as with none" in one.verdict("en")
    assert_drawn(one, tmp_path, monkeypatch)


def test_scales_that_fail_at_different_sizes_are_told_apart():
    one = made("overflow", layers=1, steps=2, powers=20)
    losses = {name: list(found) for name, found in one.data["losses"].items()}
    last = next(step for step, loss in enumerate(losses["fp16 1"]) if loss is None)
    losses["fp16 1"][last] = losses["fp32"][last]
    other = replace(one, data=one.data | {"losses": losses})
    sizes = [f"{one.data['largest'][step]:,.0f}" for step in (last + 1, last)]
    assert f"{sizes[0]} on with a loss scale of 1, and of {sizes[1]} with" in other.verdict("en")


def test_without_an_overflow_the_sentence_says_so(tmp_path, monkeypatch):
    one = made("overflow", layers=1, steps=1, powers=2)
    assert "no format overflowed" in one.verdict("en")
    assert_drawn(one, tmp_path, monkeypatch)


def test_an_enlarged_model_computes_the_same_function():
    model, batch = gpt(2, 32, 16), next(batches(4, 16, seed=0))
    grown = overflow.enlarged(model, 1024.0)
    with torch.no_grad():
        for a, b in zip(model.parameters(), gpt(2, 32, 16).parameters(), strict=True):
            assert torch.equal(a, b), "the model itself is not changed"
        # LayerNorm's epsilon, 1e-5 beside a variance of about 2 * 0.02^2, is all that differs.
        assert float(loss_of(grown, batch)) == pytest.approx(float(loss_of(model, batch)), abs=0.01)
        ratio = overflow.largest_output(grown, batch) / overflow.largest_output(model, batch)
    assert ratio > 10


@pytest.mark.slow
def test_a_trained_gpt_fails_in_fp16_alone():
    require_claims(made("overflow").data)
