"""Figures and recommendations from rows that are made up, with the answers worked out by hand."""

import json
import math

import numpy as np
import pytest

from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.bench.figure import MISSING, draw
from halfstep.trainer.bench.report import BenchReport, Quartiles
from halfstep.trainer.bench.row import StepLine
from halfstep.trainer.bench.turns import Row

STEPS = 24


def losses(seed=0, above=0.0, noise=0.01):
    """A loss that falls from 9 to 7, with the noise of its batches."""
    drawn = np.random.default_rng(seed).normal(0, noise, STEPS)
    return [9 - 2 * n / (STEPS - 1) + x + above for n, x in enumerate(drawn)]


def row(policy, seconds=1.0, *, loss=None, peak=1e9, lost=0.0, why_not=""):
    loss = losses() if loss is None else loss
    steps = [
        StepLine(
            seconds=seconds * (1 + 0.01 * (n % 3)), rows=4, tokens=100, loss=value, applied=n != 1,
            peak_memory_bytes=int(peak), lost=lost if n % 8 == 7 else None,
        )
        for n, value in enumerate(loss)
    ]  # fmt: skip
    opened = {"summary": "a model", "support": "native: all of it", "threads": 2}
    return Row(parse_policy(policy), why_not, opened, [] if why_not else steps)


def report(*rows, unit="tokens", memory=4e9, together=True):
    return BenchReport(rows, "made-up", unit, "cpu", int(memory), together, 9.0, synthetic=True)


def test_quartiles_lie_between_values():
    assert Quartiles.of([4.0, 1.0, 2.0, 3.0, 5.0]) == (2, 3, 4)
    assert Quartiles.of([7.0]) == (7, 7, 7)


def test_rates_leave_out_the_warm_up_and_the_steps_that_the_meter_slowed():
    one = row("fp32")
    for n in (0, 1, 2, 7, 15, 23):  # three of warm-up, three of the meter
        one.steps[n] = StepLine(**{**steps_of(one, n), "seconds": 50.0})
    found = report(one)
    assert len(one.timed) == STEPS - 6
    assert found.seconds_of(one).high < 1.03
    assert found.rate(one).median == pytest.approx(100 / 1.01)
    assert report(one, unit="examples").rate(one).median == pytest.approx(4 / 1.01)


def steps_of(one, n):
    return {name: getattr(one.steps[n], name) for name in StepLine.__slots__}


def test_losses_are_compared_over_equal_steps():
    short = row("bf16-mixed", loss=losses()[:12])
    found = report(row("fp32"), short)
    assert found.steps == 12
    assert (
        found.loss(short) == found.loss(found.measured[0]) == pytest.approx(sum(losses()[9:12]) / 3)
    )


def test_the_noise_is_that_of_the_batches_and_not_of_the_slope():
    # two standard errors of a difference of means over 6 steps: 2 * 0.01 * sqrt(2 / 6) = 0.0115
    found = [report(row("fp32", loss=losses(seed))).noise for seed in range(40)]
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(
        2 * 0.01 * math.sqrt(2 / 6), rel=0.15
    )
    assert report(row("fp32", loss=losses(noise=0.0))).noise == pytest.approx(0, abs=1e-9)


def test_the_fastest_is_recommended_with_its_reason():
    found = report(row("fp32", 2.0), row("bf16-mixed", 0.8, peak=7e8), row("bf16-split", 1.0))
    assert str(found.best.policy) == "bf16-mixed"
    text = found.recommendation()
    assert text.startswith("Take bf16-mixed: 2.50 times the tokens per second of fp32, at a loss")
    assert "in 700 MB of 4 GB" in text


@pytest.mark.parametrize(
    ("fast", "against"),
    [
        ({"loss": losses(above=0.1)}, "its loss is 0.1000 higher"),
        ({"loss": [*losses()[:-1], math.nan]}, "its loss is not finite"),
        ({"lost": 0.31}, "31% of its updates are lost to rounding"),
        ({"lost": None}, "too few steps tell how many of its updates are lost"),
        ({"peak": 5e9}, "it takes 5.0 GB, more than there is"),
    ],
)
def test_what_is_fast_and_bad_is_not_recommended(fast, against):
    found = report(row("fp32", 2.0), row("bf16-pure", 0.5, **fast), row("bf16-mixed", 1.0))
    assert str(found.best.policy) == "bf16-mixed"
    assert f"bf16-pure is faster, but {against}." in found.recommendation()


def test_a_loss_within_the_noise_or_below_is_no_reason():
    less = report(row("fp32", 2.0), row("bf16-mixed", 1.0, loss=losses(above=-0.5)))
    assert str(less.best.policy) == "bf16-mixed"
    within = report(row("fp32", 2.0), row("bf16-mixed", 1.0, loss=losses(above=0.003)))
    assert str(within.best.policy) == "bf16-mixed"


def test_where_nothing_is_faster_the_reference_is_recommended():
    found = report(row("fp32", 1.0), row("fp16-mixed", 3.0))
    assert found.recommendation().startswith("Take fp32: nothing as good as it is faster here.")


def test_what_is_as_fast_in_less_memory_is_named():
    lean = row("bf16-split", 0.505, peak=6e8)
    text = report(row("fp32", 2.0), row("bf16-mixed", 0.5), lean).recommendation()
    assert "bf16-split is as fast within the spread, in 400 MB less." in text
    slow = row("bf16-split", 0.6, peak=6e8)
    assert "as fast" not in report(row("fp32"), row("bf16-mixed", 0.5), slow).recommendation()


def test_doubts_are_told():
    flat = [7.0 + x for x in np.random.default_rng(0).normal(0, 0.01, STEPS)]
    assert "cannot tell policies apart" in report(row("fp32", loss=flat)).recommendation()
    few = report(row("fp32", loss=losses()[:6]))
    assert "Steps counted: only 3; raise --seconds." in few.recommendation()
    alone = report(row("fp32"), together=False)
    assert "not all took turns" in alone.recommendation()
    other = report(row("fp32", why_not="too slow"), row("bf16-mixed"), row("bf16-split", 0.5))
    assert "fp32 was not measured, so that nothing is compared with it" in other.recommendation()
    assert "of bf16-mixed" in other.recommendation()


def test_with_a_broken_reference_nothing_is_recommended():
    found = report(row("fp32", loss=[math.nan] * STEPS), row("bf16-mixed", 0.5))
    assert (
        found.recommendation()
        == "No recommendation: fp32 is the measure, and its loss is not finite."
    )


def test_too_few_steps_give_no_recommendation():
    found = report(row("fp32", loss=losses()[:4]), row("bf16-mixed", 0.5, loss=losses()[:4]))
    assert found.recommendation() == (
        "No recommendation: 4 steps are too few to compare losses. Steps counted: only 1; "
        "raise --seconds."
    )


def test_nothing_measured_is_nothing_recommended():
    found = report(row("tf32", why_not="a CPU has no tf32"))
    assert found.recommendation() == "No policy could be measured."
    assert found.to_json()["recommended"] is None


def test_the_file_holds_everything_as_json(tmp_path):
    found = report(
        row("fp32"), row("bf16-pure", loss=[math.nan] * STEPS), row("tf32", why_not="no tf32")
    )
    path = found.write(tmp_path / "new" / "folder")
    table = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert table["recommended"] == "fp32"
    assert table["recommendation"] == found.recommendation()
    fp32, pure, tf32 = table["rows"]
    assert fp32["per_second"]["median"] == pytest.approx(100 / 1.01)
    assert (len(fp32["losses"]), fp32["skipped"], fp32["lost_updates"]) == (STEPS, 1, 0.0)
    assert (pure["loss"], pure["losses"][0]) == (None, None)
    assert tf32 == {"policy": "tf32", "measured": False, "why_not": "no tf32"}


# matplotlib's own parser warns of pyparsing's names
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "begin"), [("b.png", b"\x89PNG"), ("b.svg", b"<?xml")])
def test_the_figure_is_drawn(tmp_path, name, begin):
    rows = [row("fp32"), row("bf16-mixed", 0.5), row("tf32", why_not="no tf32")]
    assert draw(report(*rows), tmp_path / name) == ""
    assert (tmp_path / name).read_bytes().startswith(begin)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert draw(report(row("fp32")), tmp_path / "b.png") == MISSING
    assert "halfstep[plot]" in MISSING
    assert not list(tmp_path.iterdir())
