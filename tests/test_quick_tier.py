"""Which tests the quick tier takes, and which of them begin first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import product

from xdist.scheduler import LoadScopeScheduling

from conftest import RANKS, Rooms, covering


def product_of(**parameters):
    return [dict(zip(parameters, values, strict=True)) for values in product(*parameters.values())]


def test_each_value_is_kept_in_few_cases():
    for parameters, most in (
        ({"layout": ["data", "shard"], "policy": ["fp32", "bf16", "fp16"]}, 3),
        ({"one": [1, 2, 3, 4], "other": [1, 2, 3, 4], "flag": [False, True]}, 4),
        ({"only": ["a"]}, 1),
    ):
        cases = product_of(**parameters)
        kept = [cases[number] for number in covering(cases)]
        assert len(kept) <= most
        for name, values in parameters.items():
            assert {case[name] for case in kept} == set(values)


def test_of_two_parameters_with_the_same_values_no_case_has_one_value_twice():
    for count in (2, 3, 12):
        policies = [f"policy {number}" for number in range(count)]
        cases = product_of(before=policies, after=policies)
        kept = [cases[number] for number in covering(cases)]
        assert all(case["before"] != case["after"] for case in kept)
        assert len(kept) <= count + 1


def test_what_takes_longest_begins_first(monkeypatch):
    order = []
    monkeypatch.setattr(
        LoadScopeScheduling,
        "_assign_work_unit",
        lambda self, node: order.append(self.workqueue.popitem(last=False)[0]),
    )
    rooms = Rooms.__new__(Rooms)
    many, other, command = (
        "tests/test_formats.py",
        "tests/optim/test_sgd.py",
        "tests/cli/test_cli.py",
    )
    rooms.workqueue = OrderedDict.fromkeys([many, other, command, RANKS], {})
    for _ in range(4):
        rooms._assign_work_unit(None)
    assert order == [RANKS, command, many, other]
    assert rooms._split_scope("tests/distributed/test_world.py::test_a[b]") == RANKS
    assert rooms._split_scope("tests/cli/test_cli.py::test_a[b::c]") == command
