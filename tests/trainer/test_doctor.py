"""``halfstep doctor`` about machines: the one it runs on, and those that are only named."""

import json

import pytest
import torch

from halfstep.cli.main import main
from halfstep.errors import ConfigError
from halfstep.precision.policy import devices
from halfstep.precision.policy.devices import DEVICES
from halfstep.trainer import doctor as machine
from halfstep.trainer.doctor import diagnose, diagnose_named, read_product

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Rates that depend on format and product alone."""
    rates = {"fp32": 1e9, "bf16-mixed": 4e9, "fp16-mixed": 5e8}

    def rate(policy, device, size=0, repeats=5, shape=None):
        return rates[str(policy)] * (1 if shape is None or shape[0] > 100 else 0.1)

    monkeypatch.setattr("halfstep.trainer.environment.gemm_flops_per_second", rate)
    return rates


def pretend(monkeypatch, flags):
    monkeypatch.setattr(devices, "cpu_instructions", lambda: frozenset(flags))
    monkeypatch.setattr(machine, "cpu_instructions", lambda: frozenset(flags))
    has = bool(set(flags) & {"bf16", "amx_bf16", "avx512_bf16"})
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: has)


def test_a_cpu_with_bf16(monkeypatch):
    pretend(monkeypatch, {"avx2", "avx512f", "avx512_bf16", "sse2"})
    found = diagnose(CPU, ((512, 8, 8), (64, 8, 8)))
    assert (found.policy, found.family) == ("bf16-mixed", "CPU with AVX512-BF16")
    assert found.instructions == ("avx512_bf16", "avx512f", "avx2")
    here = {row.form: (row.status, row.here) for row in found.forms}
    assert here == {
        "fp32": ("native", "native"), "tf32": ("absent", "refused"), "bf16": ("native", "native"),
        "fp16": ("emulated", "simulated"), "fp8": ("absent", ""), "fp4": ("absent", ""),
    }  # fmt: skip
    assert found.forms[2].rates == {"512x8x8": 4e9, "64x8x8": 4e8}
    # every product is four times as fast, so all of them are
    assert found.product_times == 0.25
    assert found.bytes_per_parameter == {
        "fp32": 16, "bf16-mixed": 16, "bf16-split,moments=8bit": 8.015625,
    }  # fmt: skip
    assert found.notes == ()


def test_a_cpu_without_bf16_takes_fp32(monkeypatch):
    pretend(monkeypatch, {"avx2"})
    found = diagnose(CPU)
    assert (found.policy, found.product_times) == ("fp32", None)
    assert {row.form: row.here for row in found.forms}["bf16"] == "simulated"


def test_slow_products_are_told(monkeypatch, quick):
    pretend(monkeypatch, {"amx_bf16"})
    quick["bf16-mixed"] = 5e8
    found = diagnose(CPU)
    assert found.product_times == 2
    assert any("2.00 times as long as in fp32" in note for note in found.notes)


def test_a_torch_without_kernels_for_the_gpu_is_told(monkeypatch):
    for name, value in {
        "is_available": True, "device_count": 1, "get_device_capability": (7, 0),
        "get_device_name": "Tesla V100-SXM2-16GB", "get_arch_list": ["sm_75", "sm_80", "sm_90"],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = diagnose(torch.device("cuda", 0))
    assert found.policy == "fp16-mixed"
    assert {row.form: row.here for row in found.forms}["bf16"] == "refused"
    assert any("no kernels for compute capability 7.0" in note for note in found.notes)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_80"])
    assert not any("no kernels" in n for n in diagnose(torch.device("cuda", 0)).notes)


@pytest.mark.parametrize("kind", DEVICES, ids=lambda kind: kind.family)
def test_a_named_device_is_answered_from_the_table(kind, monkeypatch):
    monkeypatch.setattr(machine, "gemm_table", None)  # nothing may be measured
    found = diagnose_named(kind.examples[0])
    assert (found.family, found.policy, found.measured) == (kind.family, kind.policy, False)
    assert "nothing was measured" in found.notes[0]
    here = {row.form: row.here for row in found.forms}
    assert here[kind.policy.partition("-")[0]] == "native"
    # what is recommended to save memory must run there
    needed = "bf16" if found.smallest.startswith("bf16") else kind.policy.partition("-")[0]
    assert needed in kind.native


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "T4"], "take fp16-mixed: T4 (Turing) has tensor cores for fp16"),
        (["--device", "V100"], "take fp16-mixed: V100 (Volta)"),
        (["--device", "RTX 3090"], "take bf16-mixed: RTX 3090 (Ampere)"),
        (["--device", "M2"], "take fp32: M2 (Apple M)"),
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
    assert main(["doctor", "--json", "--device", "cpu", "--shapes", "64x8x8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is True
    assert found["environment"]["device"] == "cpu"
    assert found["environment"]["precisions"]["fp32"]["status"] == "native"
    assert list(found["forms"][0]["rates"]) == ["64x8x8"]


def test_shapes():
    assert read_product("2048x384X1536") == (2048, 384, 1536)
    for text in ("", "1x2", "0x1x1", "axbxc", "1x2x3x4", "-1x2x3", "100000x100000x1"):
        with pytest.raises(ConfigError, match="--shapes"):
            read_product(text)
