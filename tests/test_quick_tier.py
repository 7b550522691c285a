"""Which tests the quick tier takes, and which of them begin first."""

from __future__ import annotations

from itertools import product

from conftest import covering


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
