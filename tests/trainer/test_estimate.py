"""``halfstep estimate``: the memory of a configuration, or of a number of parameters."""

import json
import sys

import pytest
import torch
from torch import nn

from halfstep.cli.main import main
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.run import OptimizerConfig
from halfstep.trainer.environment import count_peak_from_here, peak_memory_bytes
from halfstep.trainer.estimate import averages, estimate_config, estimate_count, read_count


def answer(capsys, *words):
    assert main(["estimate", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_parameters_alone(capsys):
    """16, 18 and 8.02 bytes a parameter: docs/policies.md, checked against real steps elsewhere."""
    words = ["--params", "1.3B", "--memory", "20GB"]
    found = {row["policy"]: row["total"] for row in answer(capsys, *words)["policies"]}
    assert found["fp32"] == found["bf16-mixed"] == found["fp16-mixed"] == 16 * 1.3e9
    assert found["bf16-master"] == 18 * 1.3e9
    assert found["bf16-split,moments=8bit"] == pytest.approx(8.015625 * 1.3e9)
    assert main(["estimate", *words]) == 0
    said = capsys.readouterr().out
    assert "20.8 GB    no" in said
    assert "10.4 GB   yes" in said
    assert "fits: in 20 GB; without activations." in said


def test_optimizers_of_matrices(capsys):
    words = ["--params", "1B", "--optimizer"]
    muon = {
        row["policy"]: row["bytes"]["moments"] for row in answer(capsys, *words, "muon")["policies"]
    }
    assert muon["bf16-mixed"] == {"fp32": 4e9}
    assert muon["bf16-split,moments=8bit"] == {"8bit": 1e9 * (1 + 1 / 128)}
    config = ["--config", "gpt-tiny", "--precision", "fp32", "--optimizer"]
    moments = [answer(capsys, *config, name)["policies"][0]["bytes"]["moments"]["fp32"]
               for name in ("adamw", "muon")]  # fmt: skip
    assert moments == sorted(moments, reverse=True)


def test_a_configuration_with_its_batch(capsys):
    words = ["--config", "gpt-tiny", "--precision", "fp32", "--memory", "1GB"]
    (one,) = answer(capsys, *words, "--batch-size", "2")["policies"]
    (two,) = answer(capsys, *words, "--batch-size", "4")["policies"]
    assert one["bytes"]["moments"] == two["bytes"]["moments"]
    # everything that is saved grows with the rows
    assert sum(two["bytes"]["activations"].values()) == pytest.approx(
        2 * sum(one["bytes"]["activations"].values()), rel=0.02
    )
    assert one["largest_batch"] == pytest.approx(two["largest_batch"], rel=0.02)
    assert main(["estimate", *words]) == 0
    assert "a micro-batch of 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.3B", 1_300_000_000), ("124M", 124_000_000), ("16GB", 16 * 10**9), ("7e9", 7 * 10**9),
     ("350_000", 350_000), ("2k", 2000), ("1T", 10**12)],
)  # fmt: skip
def test_numbers(text, count):
    assert read_count(text, "--params") == count


@pytest.mark.parametrize("text", ["", "B", "-1", "0", "nan", "inf", "1e30", "1.3 billion", "x"])
def test_what_is_no_number(text):
    with pytest.raises(ConfigError, match=r"--params .*allowed: a number from 1"):
        read_count(text, "--params")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--params", "1B", "--config", "gpt2"], "give one of them"),
        (["--config", "lm-lora"], "halfstep.estimate(model, policy, batch) answers"),
        (["--optimizer", "muo"], "'muo'; allowed: adadelta, adagrad"),
        (["--batch-size", "-1"], "--batch-size -1; allowed: integers >= 0"),
        (["--parallel", "pipe=2"], "allowed axes: data, shard, tensor"),
    ],
)
def test_what_is_refused(capsys, words, said):
    assert main(["estimate", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kept"),
    [("adamw", 2), ("sgd", 1), ("lion", 1), ("rmsprop", 2),
     ("muon", {"weight": 1, "bias": 2})],
)  # fmt: skip
def test_the_averages_that_an_optimizer_keeps(name, kept):
    found = averages(OptimizerConfig(name=name), nn.Linear(64, 64))
    assert found == pytest.approx(kept, rel=0.01)


def test_a_recipe_changes_nothing_of_what_a_number_of_parameters_takes():
    names = ("bf16-mixed", "nvfp4,simulate=yes", "bf16-mixed,recipe=mxfp8/bf16/bf16")
    policies = [parse_policy(name) for name in names]
    found = estimate_count(1000, policies, Layout())
    assert [memory.bytes for memory in found] == [found[0].bytes] * 3
    assert [memory.policy for memory in found] == [str(policy) for policy in policies]


def test_each_rank_of_a_layout():
    def of(layout):
        policies = [POLICIES["bf16-mixed"]]
        (found,) = estimate_config("gpt-small-cpu", policies, 8, Layout.parse(layout))
        return found

    one, data, shard = map(of, ("", "data=2", "shard=2"))
    assert (one.ranks, data.ranks) == (1, 2)
    assert data.bytes == one.bytes  # but for sums on their way
    for part in ("weights", "gradients", "moments"):
        assert shard.part(part) == pytest.approx(one.part(part) / 2, rel=1e-4)
    assert shard.saved == one.saved


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is that of the process")
def test_the_peak_begins_anew():
    """What was freed before is not in it; the tenths are for what else the process does."""
    large = 200_000_000
    count_peak_from_here()
    begin = peak_memory_bytes(torch.device("cpu"))
    torch.ones(large, dtype=torch.uint8)
    assert peak_memory_bytes(torch.device("cpu")) > begin + 0.9 * large
    count_peak_from_here()
    assert peak_memory_bytes(torch.device("cpu")) < begin + 0.1 * large
