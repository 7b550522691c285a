"""``halfstep doctor`` about the machine that it runs on."""

import json

import torch

from halfstep.cli.main import main
from halfstep.precision.policy import devices
from halfstep.trainer.environment import diagnose

CPU = torch.device("cpu")


def pretend(monkeypatch, flags):
    monkeypatch.setattr(devices, "cpu_instructions", lambda: frozenset(flags))
    has = bool(set(flags) & {"bf16", "amx_bf16", "avx512_bf16"})
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: has)


def forms(found, key="here"):
    return {row["form"]: row[key] for row in found["forms"]}


def test_a_cpu_with_bf16(monkeypatch):
    pretend(monkeypatch, {"avx2", "avx512f", "avx512_bf16", "sse2"})
    found = diagnose(CPU)
    assert (found["policy"], found["family"]) == ("bf16-mixed", "CPU with bf16 instructions")
    assert forms(found, "status") == {
        "fp32": "native", "tf32": "absent", "bf16": "native", "fp16": "emulated", "fp8": "absent",
        "fp4": "absent",
    }  # fmt: skip
    assert forms(found) == {
        "fp32": "native", "tf32": "refused", "bf16": "native", "fp16": "simulated", "fp8": "",
        "fp4": "",
    }  # fmt: skip
    assert found["notes"] == []


def test_a_cpu_without_bf16_takes_fp32(monkeypatch):
    pretend(monkeypatch, {"avx2"})
    found = diagnose(CPU)
    assert found["policy"] == "fp32"
    assert forms(found)["bf16"] == "simulated"


def test_what_the_command_prints(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "fp32    native    native" in capsys.readouterr().out


def test_json(capsys):
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["device"] == "cpu"
    assert found["environment"]["precisions"]["fp32"]["status"] == "native"
