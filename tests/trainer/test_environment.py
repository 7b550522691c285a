"""``halfstep doctor`` about machines: the one it runs on, and those that are only named."""

import json

import pytest
import torch

from halfstep.cli.main import main
from halfstep.precision.policy import devices
from halfstep.precision.policy.devices import DEVICES
from halfstep.precision.policy.policy import POLICIES
from halfstep.trainer import environment
from halfstep.trainer.environment import diagnose, diagnose_named

CPU, RATE = torch.device("cpu"), environment.matmul_flops_per_second


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Rates that depend on the format alone."""
    rates = {"fp32": 1e9, "bf16-mixed": 4e9, "fp16-mixed": 5e8}

    monkeypatch.setattr(
        environment, "matmul_flops_per_second", lambda policy, device: rates[str(policy)]
    )
    return rates


def pretend(monkeypatch, flags):
    monkeypatch.setattr(devices, "cpu_instructions", lambda: frozenset(flags))
    has = bool(set(flags) & {"bf16", "amx_bf16", "avx512_bf16"})
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: has)


def forms(found, key="here"):
    return {row["form"]: row[key] for row in found["forms"]}


def test_a_cpu_with_bf16(monkeypatch):
    pretend(monkeypatch, {"avx2", "avx512f", "avx512_bf16", "sse2"})
    found = diagnose(CPU)
    assert (found["policy"], found["family"]) == ("bf16-mixed", "CPU with AVX512-BF16")
    assert forms(found, "status") == {
        "fp32": "native", "tf32": "absent", "bf16": "native", "fp16": "emulated", "fp8": "absent",
        "fp4": "absent",
    }  # fmt: skip
    assert forms(found) == {
        "fp32": "native", "tf32": "refused", "bf16": "native", "fp16": "simulated", "fp8": "",
        "fp4": "",
    }  # fmt: skip
    assert forms(found, "flops_per_second")["bf16"] == 4e9
    assert found["notes"] == []


def test_a_cpu_without_bf16_takes_fp32(monkeypatch):
    pretend(monkeypatch, {"avx2"})
    found = diagnose(CPU)
    assert found["policy"] == "fp32"
    assert forms(found)["bf16"] == "simulated"


def test_slow_matmuls_are_told(monkeypatch, quick):
    pretend(monkeypatch, {"amx_bf16"})
    quick["bf16-mixed"] = 5e8
    assert any("2.00 times as long as in fp32" in note for note in diagnose(CPU)["notes"])


@pytest.mark.parametrize("kind", DEVICES, ids=lambda kind: kind.family)
def test_a_named_device_is_answered_from_the_table(kind, monkeypatch):
    monkeypatch.setattr(environment, "matmul_flops_per_second", None)  # nothing may be measured
    found = diagnose_named(kind.examples[0])
    told = (found["family"], found["policy"], found["measured"])
    assert told == (kind.family, kind.policy, False)
    assert "nothing was measured" in found["notes"][0]
    assert forms(found)[kind.policy.partition("-")[0]] == "native"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "T4"], "take fp16-mixed: T4 (Turing) has tensor cores for fp16"),
        (["--device", "cpu"], "fp32    native    native"),
        (["--device", "mps"], "take fp32: mps (Apple M)"),  # where there is no Mac
        (["--device", "T4", "A100"], "T4      fp16-mixed  T4 (Turing)"),
        ([], "take "),
    ],
)
def test_what_the_command_prints(capsys, words, said):
    assert main(["doctor", *words]) == 0
    assert said in capsys.readouterr().out


def test_json(capsys):
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is True
    assert found["environment"]["device"] == "cpu"
    assert found["environment"]["precisions"]["fp32"]["status"] == "native"
    assert found["forms"][0]["flops_per_second"] == 1e9


def test_the_rate_is_that_of_the_fastest_matmul_after_the_first(monkeypatch):
    # the first matmul of a process may wait for imports and page faults, however fast it is
    durations = iter([7.0, 0.5, 0.25, 0.5, 0.5, 0.5])
    clock = [0.0]

    def now():
        clock.append(clock[-1] + (next(durations) if len(clock) % 2 == 0 else 0.0))
        return clock[-1]

    monkeypatch.setattr(environment.time, "perf_counter", now)
    found = RATE(POLICIES["fp32"], CPU, size=8)
    assert found == 2 * 8**3 / 0.25
