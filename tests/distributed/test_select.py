"""The table of policies and layouts: every cell trains, or is refused with a way out that works."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from distributed import parity
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import choose_strategy, refusal
from halfstep.errors import PrecisionError
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_policy

pytestmark = pytest.mark.distributed

ON_CPU = [name for name in POLICIES if name != "tf32"]  # a GPU's format
MORE = ("bf16-master,keep_fp32=*norm*", "bf16-mixed,keep_fp32=*norm*",
        "bf16-mixed,reduce=bf16", "fp16-mixed,reduce=fp16", "bf16-split,moments=8bit",
        "fp32,moments=8bit")  # fmt: skip
TABLE_LAYOUTS = ("data=1", "data=2", "shard=2", "tensor=2", "data=2,tensor=2", "data=2,shard=2")
EVERY_LAYOUT = (*TABLE_LAYOUTS, "shard=2,tensor=2")


def trains(rank, layout, policy):
    """Two steps; whether both were applied, the losses, and whether ranks agree."""
    result = parity.run(rank, layout, policy, steps=2)
    return result["applied"], result["losses"]


CELLS = [
    (policy, layout)
    for layout in EVERY_LAYOUT[1:]
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


def test_every_refusal_names_a_way_out_that_is_none():
    for policy, layout in itertools.product((*POLICIES, "mxfp8,simulate=yes"), EVERY_LAYOUT):
        value, place = parse_policy(policy), Layout.parse(layout)
        if not refusal(value, place):
            continue
        with pytest.raises(PrecisionError, match=f"parallel={place}:") as error:
            choose_strategy(place, value, torch.device("cpu"))  # before any group is needed
        ways = re.findall(r"(parallel|precision)=([^ ]+)", str(error.value).rpartition("; use ")[2])
        assert ways
        for key, way in ways:
            way = way.rstrip(",").replace("N", str(max(place.size, 2)))
            other = (value, Layout.parse(way)) if key == "parallel" else (parse_policy(way), place)
            assert not refusal(*other), way
