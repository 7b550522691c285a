"""What a notebook shows of halfstep's objects."""

import torch
from torch import nn

import halfstep
from halfstep.shown import Text, aligned


def shown(thing):
    """The text of the HTML that a notebook asks an object for."""
    text, _, rest = thing._repr_html_().partition("</pre>")
    assert text.startswith("<pre ")
    assert "white-space:pre;" in text  # a notebook's own style breaks the lines of tables
    assert rest == ""
    return text.partition(">")[2]


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


def test_columns_are_aligned():
    assert aligned([("a", "long", "c"), ("bb", "x", "")], {1}) == "a   long  c\nbb     x"
