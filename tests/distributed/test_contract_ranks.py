"""The contract knows collectives by the axis of the mesh, and what they carry."""

from __future__ import annotations

import pytest

from distributed.contract_programs import many
from halfstep.diagnostics.contract import united

pytestmark = pytest.mark.distributed

TWO = {  # sound program, planted, and the row that differs
    "ddp_bf16": ("ddp", "backward  dp  all_reduce  gradients", "bf16"),
    "fsdp_reduce": ("fsdp", "backward  dp  reduce_scatter  gradients", "bf16"),
    "fsdp_fp32": ("fsdp", "any  dp  all_gather  parameters", "fp32"),
    "hand_bf16": ("hand", "outside  dp  all_reduce  values", "bf16"),
    "rank_1": ("hand", "forward  *.up  matmul", "bf16 -> bf16"),
    "ddp_zero_bf16": ("ddp_zero", "update  dp  broadcast  values", "bf16"),
}
FOUR = {
    "hsdp_bf16": ("hsdp", "backward  rep  all_reduce  gradients", "bf16"),
    "2d": ("2d_fp32", "backward  tp  all_reduce  gradients", "bf16"),
    "2d_norms": ("2d_fp32", "any  dp  all_gather  parameters", "bf16"),
}


def contracts(pool, kinds, **changes):
    cases = [{"kind": kind, **changes} for kind in kinds]
    by_rank = pool.run(many, cases=cases)
    return {kind: united(parts) for kind, *parts in zip(kinds, *by_rank, strict=True)}


def check(pool, planted):
    kinds = [*dict.fromkeys([*planted, *(base for base, *_ in planted.values())])]
    found = contracts(pool, kinds)
    again = contracts(pool, kinds, seed=5, batch=4, steps=3)
    for kind, (base, row, form) in planted.items():
        named = {one.values["row"]: one for one in found[base].differences(found[kind])}
        assert form in named[row].values["new"], (kind, named)
        assert kind != "rank_1" or "rank 1" in named[row].where
    for kind in kinds:
        assert found[kind].differences(again[kind]) == [], kind
    return found


def test_planted_collectives_are_found_on_two_ranks_and_sound_changes_are_not(pool2):
    found = check(pool2, TWO)
    assert [c.findings() for c in found.values()] == [[] for _ in found]


def test_a_reduction_below_what_fsdp_was_asked_for_is_found_by_axis_without_a_file(pool4):
    found = check(pool4, FOUR)
    (one,) = found["2d"].findings()
    assert one.values == {"axis": "tp", "dtype": "bf16", "asked": ["fp32"]}
    assert "gradients are reduced over tp in bf16" in one.what
    assert not any(found[kind].findings() for kind in ("2d_fp32", "2d_norms", "hsdp", "hsdp_bf16"))


def test_the_contract_of_two_ranks_is_that_of_four(pool2, pool4):
    kinds = ["ddp", "fsdp", "hand"]
    two, four = contracts(pool2, kinds), contracts(pool4, kinds)
    for kind in kinds:
        assert two[kind].differences(four[kind]) == four[kind].differences(two[kind]) == []
