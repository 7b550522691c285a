"""Skipped steps and spikes, by what caused them."""

import pytest
from matplotlib.figure import Figure

from halfstep.report.page import CURVES, make_report
from halfstep.report.record import read_run
from report.conftest import line


@pytest.mark.parametrize(
    ("reason", "more", "kind"),
    [
        ("overflow", {}, "overflow"),
        ("nan_gradients", {}, "overflow"),
        ("overflow", {"calibrating": True}, "calibration"),
        ("nonfinite_loss", {}, "nonfinite"),
        ("forward", {}, "nonfinite"),
        ("loss_scale_floor", {}, "nonfinite"),
        ("loss_spike", {}, "spike"),
        ("gradient_spike", {}, "spike"),
        (["no", "text"], {}, "overflow"),
        (None, {}, "overflow"),
    ],
)
def test_kinds(folder, reason, more, kind):
    path = folder([line(1), line(2, applied=False, skip_reason=reason, **more)])
    assert [(event.step, event.kind) for event in read_run(path).events] == [(2, kind)]


def test_overflows_are_told_together_and_the_others_one_by_one(folder):
    lines = [line(1, applied=False, calibrating=True, skip_reason="overflow", loss_scale=2048.0)]
    lines += [line(s, applied=False, skip_reason="overflow", loss_scale=2.0**s) for s in (4, 8)]
    cause = "overflow in a matmul: aten.mm"
    lines += [line(9, applied=False, skip_reason="nonfinite_loss", first_cause=cause)]
    lines += [line(20, loss=300.0, applied=False, skip_reason="loss_spike")]
    run = read_run(folder([*lines, line(30)]))
    page = make_report([run]).to_html()
    assert "Loss scales from 16 to 256, steps 4 to 8" in page
    assert "searching for its level: 1<" in page
    assert f"<td>{cause}</td>" in page
    for mark in ("loss scale calibrating (1)", "gradient overflow (2)", "not finite (1)", "spike"):
        assert f">{mark}" in page or f": {mark}" in page  # in the legend of the loss curve
    assert "loss_spike" not in page


def test_many_events_fit_a_page(folder):
    lines = [line(s, applied=False, skip_reason="nonfinite_loss") for s in range(1, 500)]
    page = make_report([read_run(folder(lines))]).to_html()
    assert page.count("No cause was searched or found") == 12


def test_a_skipped_step_does_not_flatten_the_curve(folder):
    lines = [line(s) for s in range(1, 60)]
    spike = line(60, loss=1e6, applied=False, skip_reason="loss_spike")
    run = read_run(folder([*lines, spike, line(61)]))
    axes = Figure().subplots()
    assert CURVES["Loss"](axes, [run], "en")
    assert axes.get_ylim()[1] < 10
    marked = [each.get_offsets().tolist() for each in axes.collections]
    assert marked == [[[60.0, 0.97]]]


def test_the_mark_of_the_step_that_ended_a_run_lies_inside_the_axes(folder):
    end = line(4, loss=float("nan"), applied=False, skip_reason="nonfinite_loss")
    run = read_run(folder([*(line(s) for s in (1, 2, 3)), end]))
    axes = Figure().subplots()
    assert CURVES["Loss"](axes, [run], "en")
    assert axes.get_xlim()[1] >= 4


def test_the_axis_of_losses_has_a_unit_where_it_is_known(folder):
    path = folder([line(s, val_loss=3.0) for s in range(1, 30)], task="classify")
    axes = Figure().subplots()
    CURVES["Loss"](axes, [read_run(path)], "en")
    assert axes.get_legend_handles_labels()[1] == ["training", "validation"]
    assert axes.get_ylabel() == "loss (nats per target)"
    own = read_run(folder([line(s, val_loss=3.0) for s in (1, 2)], "own", task="module"))
    CURVES["Loss"](axes, [own], "en")
    assert axes.get_ylabel() == "loss"
