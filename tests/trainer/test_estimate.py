"""``halfstep estimate``: the memory of a configuration, or of a number of parameters."""

import json

import pytest
import torch

import halfstep
from halfstep.cli.main import main
from halfstep.distributed.layout import Layout
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.estimate import estimate_count, read_count


def answer(capsys, *words):
    assert main(["estimate", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_parameters_alone(capsys):
    """16 (2 more for casts), 18 and 8.02 bytes a parameter: docs/policies.md, and real steps."""
    words = ["--params", "1.3B", "--memory", "20GB"]
    found = {row["policy"]: row["total"] for row in answer(capsys, *words)["policies"]}
    assert found["fp32"] == 16 * 1.3e9
    assert found["bf16-mixed"] == found["fp16-mixed"] == found["bf16-master"] == 18 * 1.3e9
    assert found["bf16-split,moments=8bit"] == pytest.approx(8.015625 * 1.3e9)
    assert main(["estimate", *words]) == 0
    said = capsys.readouterr().out
    assert "20.8 GB    no  800 MB short" in said
    assert "10.4 GB   yes       9.58 GB" in said
    assert "fits: state only, in 20 GB; what is left is for activations." in said


def test_adapters_on_a_frozen_base(capsys):
    """A 7B base: 4 or 2 bytes a weight; 40M adapters as any parameters."""
    words = ["--params", "7B", "--lora", "40M", "--memory", "24GB"]
    names = ["--precision", "fp32", "bf16-mixed", "bf16-split"]
    found = [row["total"] for row in answer(capsys, *words, *names)["policies"]]
    assert found == [28e9 + 16 * 40e6, 14e9 + 18 * 40e6, 14e9 + 14 * 40e6]


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master", "bf16-split"])
def test_adapters_take_what_a_step_measures(policy):
    base = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    model = torch.nn.Sequential(base, torch.nn.Linear(64, 16, bias=False))
    trained = [model[1].weight]
    kind = halfstep.optim.AdamW if policy == "bf16-split" else torch.optim.AdamW
    precision = halfstep.Precision(policy, model, kind(trained))
    with halfstep.MemoryMeter(precision) as meter:
        with precision.autocast():
            loss = model(torch.ones(3, 64)).float().sum()
        precision.step(loss)
    (guess,) = estimate_count(64 * 64, [POLICIES[policy]], Layout(), adapters=64 * 16)
    for part in ("weights", "masters", "gradients", "moments"):
        assert guess.part(part) == meter.memory.part(part), part


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
    (lion,) = estimate_count(1000, [POLICIES["bf16-mixed"]], Layout(), "lion")
    assert 2 * lion.part("moments") == one.part("moments")
