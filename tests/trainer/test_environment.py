"""``halfstep doctor`` about the machine that it runs on."""

import json

import torch

from halfstep.cli.main import main
from halfstep.precision.policy import devices

CPU = torch.device("cpu")


def pretend(monkeypatch, flags):
    monkeypatch.setattr(devices, "cpu_instructions", lambda: frozenset(flags))
    has = bool(set(flags) & {"bf16", "amx_bf16", "avx512_bf16"})
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: has)


def test_each_cpu_gets_its_policy_and_why(monkeypatch, capsys):
    for flags, policy, why in (
        ({"avx2", "avx512f", "avx512_bf16"}, "bf16-mixed", "multiplies bf16 in hardware"),
        ({"avx2"}, "fp32", "has no instructions for bf16"),
    ):
        pretend(monkeypatch, flags)
        assert devices.choose(CPU).policy == policy
        assert main(["doctor", "--device", "cpu"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"take {policy}: ")
        assert why in said


def test_json(capsys):
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["device"] == "cpu"
