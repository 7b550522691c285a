"""The lab's experiment ``loss-scale``: what it claims, and the rule that the scale follows."""

from __future__ import annotations

from statistics import fmean

import pytest

from halfstep.lab.experiments.numbers import loss_scale
from halfstep.lab.material import gpt
from lab.drawn import assert_drawn, made
from reference.loss_scale import exponents


def require_rule(data) -> None:
    """Every trace of the scale is what the rule makes of its overflows."""
    for batch in data["batches"].values():
        flags = [step in batch["skipped"] for step in range(1, len(batch["scales"]) + 1)]
        following = exponents(flags, start=16, interval=data["growth"])
        assert batch["scales"] == [2.0**e for e in [16, *following[:-1]]]


def test_the_scale_follows_its_rule_and_the_large_batch_loses_more(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "STEPS", 12)
    one = made("loss-scale", growth=1, seeds=1)
    require_rule(one.data)
    small, large = one.data["batches"].values()
    assert small["skipped"], "a scale that doubles at every step overflows within twelve"
    assert small["zeros"] < large["zeros"]
    for batch in (small, large):
        assert batch["losses"]["none"] != batch["losses"]["static"], "a scale rescues something"
    first = [runs[0][0] for batch in (small, large) for runs in batch["losses"].values()]
    # The same weights and tokens: they differ by the rounding of fp16 alone, 2^-11 of each number.
    assert first == pytest.approx([one.data["fp32"][0][0]] * len(first), rel=1e-3)
    assert_drawn(one, tmp_path, monkeypatch)


def test_a_part_of_a_large_batch_trains_as_the_batch_itself(monkeypatch):
    monkeypatch.setattr(loss_scale, "STEPS", 3)
    whole, part = (loss_scale._train("fp32", 0, share, gpt(2, 64, 64)) for share in (1, 512))
    # Powers of two are exact in fp32.
    assert [result.loss for result in whole] == [512 * result.loss for result in part]
    assert [r.grad_norm for r in whole] == pytest.approx([r.grad_norm for r in part], rel=1e-6)


def require_claims(data) -> None:
    """Only the large batch needs a scale, and then it does not matter which."""
    require_rule(data)
    small, large = data["batches"].values()

    def end(runs) -> float:
        return fmean(loss for run in runs for loss in run[-loss_scale.LAST :])

    fp32 = end(data["fp32"])
    for batch in (small, large):
        for name in ("static", "dynamic"):
            # Skipped steps and rounding leave 0.05 at most on the author's machine.
            assert end(batch["losses"][name]) == pytest.approx(fp32, abs=0.12), name
    assert end(small["losses"]["none"]) == pytest.approx(fp32, abs=0.12)
    assert end(large["losses"]["none"]) > fp32 + 0.25
    assert small["zeros"] < 0.1 < 0.5 < large["zeros"]
    assert small["skipped"]


@pytest.mark.slow
def test_only_the_large_batch_needs_a_scale(tmp_path, monkeypatch):
    one = made("loss-scale")
    require_claims(one.data)
    assert_drawn(one, tmp_path, monkeypatch)
