"""What a notebook shows of halfstep's objects."""

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import halfstep
from halfstep.shown import Text, bars


def shown(thing):
    """The text of the HTML that a notebook asks an object for."""
    text, _, figure = thing._repr_html_().partition("</pre>")
    assert text.startswith("<pre ")
    assert "white-space:pre;" in text  # a notebook's own style breaks the lines of tables
    assert not figure or figure.endswith(("</svg>", "</div>"))
    return text.partition(">")[2]


def figures(thing):
    """The figures below that text, as parsed elements."""
    _, _, figure = thing._repr_html_().partition("</pre>")
    svgs = re.findall(r"<svg.*?</svg>", figure, re.DOTALL)
    return [ElementTree.fromstring(svg) for svg in svgs]


def lengths(figure):
    """A figure's bars: the widths of its parts, row by row, by the parts' heights on it."""
    rows = {}
    for bar in figure.iter("rect"):
        if bar.get("height") == "15":
            rows.setdefault(float(bar.get("y")), []).append(float(bar.get("width")))
    return [rows[y] for y in sorted(rows)]


def test_text_is_a_string_with_its_lines():
    text = Text("one <b>\ntwo & three")
    assert text == "one <b>\ntwo & three"
    assert text.splitlines() == ["one <b>", "two & three"]
    assert shown(text) == "one &lt;b&gt;\ntwo &amp; three"


def test_policies_and_models_are_tables():
    assert len(shown(halfstep.explain("bf16-master")).splitlines()) > 5
    hostile = nn.ModuleDict({"<script>": nn.Linear(2, 2)})
    table = shown(halfstep.explain_model("bf16-mixed", hostile))
    assert "&lt;script&gt;" in table
    assert "<script>" not in table


def test_steps_meters_and_watches_are_tables():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    precision = halfstep.Precision("fp32", model, optimizer)
    meter = halfstep.LostUpdateMeter(precision, every=1)
    assert shown(meter) == "no step has been measured yet"
    with halfstep.watch(model, precision, every=1) as watch:
        result = precision.step(model(torch.ones(3, 4)).square().mean())
    lines = dict(line.split(None, 1) for line in shown(result).splitlines())
    assert lines["applied"] == "True"
    assert float(lines["loss"]) == result.loss
    assert "lost" in shown(meter)
    assert "weight" in shown(watch)
    assert shown(watch) == shown(watch.report())


def test_traces_memory_and_causes_are_tables():
    model = nn.Linear(4, 2)
    precision = halfstep.Precision("fp32", model, torch.optim.AdamW(model.parameters()))
    with halfstep.trace(model, precision) as ran, halfstep.MemoryMeter(precision) as meter:
        precision.step(model(torch.ones(3, 4)).square().mean())
    assert "addmm" in shown(ran)
    assert "weights" in shown(meter.memory)
    with halfstep.trace_nonfinite(model) as trace:
        torch.log(torch.zeros(2, requires_grad=True)) * 0
    assert "log" in shown(trace.first_cause)


# The figures below


def test_bars_are_as_long_as_their_values():
    (figure,) = figures(Text.with_figure("t", bars({"a": {"x": 1, "y": 3}, "b": {"x": 2}}, "MB")))
    assert lengths(figure) == [[110.0, 330.0], [220.0]]  # 440 for the longest
    (figure,) = figures(Text.with_figure("t", bars({"a": {"x": 0.25}}, "share", whole=1.0)))
    assert lengths(figure) == [[110.0]]


def test_formats_have_the_same_colour_in_every_figure():
    colour = re.compile(r'fill="(#\w+)"/><text[^>]*>bf16<')
    one, other = (bars(rows, "MB") for rows in ({"a": {"bf16": 1}}, {"a": {"x": 1, "bf16": 1}}))
    assert colour.search(one)[1] == colour.search(other)[1]


def test_names_are_no_tags_in_a_figure():
    hostile = "</svg><script>alert(1)</script>"
    text = bars({hostile: {hostile: 1.0}}, hostile)
    assert "<script" not in text
    ElementTree.fromstring(text)


def test_what_has_a_figure():
    model = nn.Linear(4, 2)
    precision = halfstep.Precision("fp32", model, torch.optim.AdamW(model.parameters()))
    meter = halfstep.LostUpdateMeter(precision, every=1)
    assert figures(meter) == []
    with halfstep.MemoryMeter(precision) as memory:
        precision.step(model(torch.ones(3, 4)).square().mean())
    with halfstep.trace(model, precision) as ran:
        precision.step(model(torch.ones(3, 4)).square().mean())
    (lost,) = figures(meter)
    (report,) = meter.report()
    assert sum(lengths(lost)[0]) == pytest.approx(440, abs=0.2)
    assert lengths(lost)[0][0] == pytest.approx(440 * (report.lost or 1), abs=0.1)
    products, stored = figures(ran)
    assert lengths(products) == [[440.0], [440.0]]  # a product forward and one backward
    assert len(lengths(stored)) == len(ran.holdings)
    (parts,) = figures(memory.memory)
    assert len(lengths(parts)) == sum(memory.memory.part(p) > 0 for p in memory.memory.bytes)
    (explained,) = figures(halfstep.explain("bf16-master"))
    assert lengths(explained) == [[110.0], [220.0], [220.0], [440.0]]  # 2, 4, 4 and 8 bytes
