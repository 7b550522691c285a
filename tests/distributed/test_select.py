"""The table of policies and layouts: every cell trains, or is refused with a way out that works."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from distributed import parity
from every import every
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import choose_strategy, refusal
from halfstep.errors import PrecisionError
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_policy

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
ON_CPU = [name for name in POLICIES if name != "tf32"]  # a GPU's format
MORE = ("bf16-master,keep_fp32=*norm*", "bf16-mixed,keep_fp32=*norm*",
        "bf16-mixed,reduce=bf16", "fp16-mixed,reduce=fp16", "bf16-split,moments=8bit",
        "fp32,moments=8bit")  # fmt: skip
TABLE_LAYOUTS = ("data=1", "data=2", "shard=2", "tensor=2", "data=2,tensor=2", "data=2,shard=2")
EVERY_LAYOUT = (*TABLE_LAYOUTS, "shard=2,tensor=2", "data=2,shard=2,tensor=2")


def trains(rank, layout, policy):
    """Two steps; whether both were applied, the losses, and whether ranks agree."""
    result = parity.run(rank, layout, policy, steps=2)
    return result["applied"], result["losses"]


def all_refusals():
    for policy, layout in itertools.product((*POLICIES, *MORE), EVERY_LAYOUT):
        if refusal(parse_policy(policy), Layout.parse(layout)):
            yield policy, layout


CELLS = [
    (policy, layout)
    for layout in ("data=2", "shard=2", "tensor=2", "data=2,tensor=2", "data=2,shard=2")
    for policy in (*ON_CPU, *MORE)
    if not refusal(parse_policy(policy), Layout.parse(layout))
]
# In the short set of tests: those that test_parity does not run, on two ranks.
SHORT = {(p, t) for p, t in CELLS if p in MORE and Layout.parse(t).size == 2}


@pytest.mark.covering(ends=True)
@pytest.mark.parametrize(
    ("policy", "layout"),
    [pytest.param(*c, marks=() if c in SHORT else pytest.mark.slow) for c in CELLS],
)
def test_a_cell_that_is_not_refused_trains(request, policy, layout):
    pool = request.getfixturevalue(f"pool{Layout.parse(layout).size}")
    found = pool.run(trains, layout=layout, policy=policy)
    assert all(result == found[0] for result in found)
    applied, losses = found[0]
    assert applied == [True, True]
    assert losses[1] < losses[0]


def test_the_pages_table_refuses_what_is_refused():
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([^`]+)` \| (.*) \|$", page.split("<!-- table -->")[1].split("<!-- end -->")[0], re.M
    )
    shown = {name: cells.split(" | ") for name, cells in rows}
    assert shown.keys() == POLICIES.keys()
    for name, policy in POLICIES.items():
        refused = [bool(refusal(policy, Layout.parse(text))) for text in TABLE_LAYOUTS]
        assert [cell == "refused" for cell in shown[name]] == refused, name


def test_every_refusal_names_policy_layout_and_a_way_out_that_is_none():
    every(all_refusals(), names_a_way_out)


def names_a_way_out(policy, layout):
    value, place = parse_policy(policy), Layout.parse(layout)
    with pytest.raises(PrecisionError) as error:
        choose_strategy(place, value, CPU)  # before any process group is needed
    text = str(error.value)
    assert f"precision {value} " in text
    assert f"parallel={place}:" in text
    nearest = text.rpartition("; use ")[2]
    ways = re.findall(r"(parallel|precision)=([^ ]+)", nearest)
    assert ways
    for key, way in ways:
        way = way.rstrip(",").replace("N", str(max(place.size, 2)))
        if key == "parallel":
            other = Layout.parse(way)
            assert place.size in (1, other.size), "another number of ranks"
            assert not refusal(value, other), way
        else:
            assert not refusal(parse_policy(way), place), way
