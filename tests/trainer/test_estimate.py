"""``halfstep estimate``: the memory of a configuration, or of a number of parameters."""

import pytest

from halfstep.cli.main import main
from halfstep.distributed.layout import Layout
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.estimate import estimate_count, read_count


def test_parameters_alone(capsys):
    """16 (2 more for casts), 18 and 8.02 bytes a parameter: docs/policies.md, and real steps."""
    names = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split,moments=8bit"]
    policies = [parse_policy(name) for name in names]
    found = [each.total / 1.3e9 for each in estimate_count(1_300_000_000, policies, Layout())]
    assert found == [16, 18, 18, 18, pytest.approx(8.015625)]
    assert main(["estimate", "--params", "1.3B", "--memory", "20GB"]) == 0
    said = capsys.readouterr().out
    assert "20.8 GB    no  800 MB short" in said
    assert "10.4 GB   yes       9.58 GB" in said
    assert "fits: state only, in 20 GB; what is left is for activations." in said


def test_numbers_have_units(capsys):
    texts = ("7e9", "1_300M", "24 GB", "24GiB", "1000000", "2TB")
    found = [read_count(text, "--memory") for text in texts]
    assert found == [7e9, 1.3e9, 24e9, 24 * 2**30, 1e6, 2e12]
    for words, says in (
        (["--params", "1.3"], "--params '1.3'; allowed: a number with its unit, such as 1.3B"),
        (["--memory", "24"], "--memory '24'; allowed: a number with its unit, such as 24GB"),
    ):
        assert main(["estimate", *words]) == 2
        assert says in capsys.readouterr().err


def test_a_recipe_changes_nothing_of_what_a_number_of_parameters_takes():
    names = ("bf16-mixed", "nvfp4,simulate=yes", "bf16-mixed,recipe=mxfp8/bf16/bf16")
    policies = [parse_policy(name) for name in names]
    found = estimate_count(1000, policies, Layout())
    assert [memory.bytes for memory in found] == [found[0].bytes] * 3
    assert [memory.policy for memory in found] == [str(policy) for policy in policies]


def test_each_rank_of_a_layout():
    def of(layout):
        (found,) = estimate_count(1000, [POLICIES["bf16-mixed"]], Layout.parse(layout))
        return found

    one, data, shard = map(of, ("", "data=2", "shard=2"))
    assert (one.ranks, data.ranks, shard.ranks) == (1, 2, 2)
    assert data.bytes == one.bytes
    assert {name: 2 * shard.part(name) for name in ("weights", "gradients", "moments")} == {
        name: one.part(name) for name in ("weights", "gradients", "moments")
    }
