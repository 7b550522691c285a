"""The table of devices: which policy ``auto`` takes where, and how it reaches every door."""

import pytest
import torch
from torch import nn

import halfstep
from every import every
from halfstep.errors import PrecisionError
from halfstep.precision.policy import devices
from halfstep.precision.policy.devices import DEVICES, choose
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_later, parse_policy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# Name that torch gives to the device, its compute capability (NVIDIA, "CUDA GPUs"), the policy.
GPUS = [
    ("NVIDIA GeForce GTX 1080 Ti", (6, 1), "fp32"),
    ("Tesla V100-SXM2-16GB", (7, 0), "fp16-mixed"),
    ("Quadro RTX 5000", (7, 5), "fp16-mixed"),
    ("Tesla T4", (7, 5), "fp16-mixed"),
    ("Quadro RTX 6000", (7, 5), "fp16-mixed"),
    ("NVIDIA GeForce GTX 1650", (7, 5), "fp32"),
    ("NVIDIA GeForce GTX 1660 Ti", (7, 5), "fp32"),
    ("NVIDIA T1000", (7, 5), "fp32"),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "bf16-mixed"),
    ("NVIDIA A10G", (8, 6), "bf16-mixed"),
    ("NVIDIA L4", (8, 9), "bf16-mixed"),
    ("NVIDIA H100 80GB HBM3", (9, 0), "bf16-mixed"),
    ("NVIDIA B200", (10, 0), "bf16-mixed"),
    ("NVIDIA GeForce RTX 5090", (12, 0), "bf16-mixed"),
]
# The flags that Linux shows, and the policy.
CPUS = [
    ({"avx2"}, "fp32"),
    ({"avx2", "avx512f", "avx512_fp16"}, "fp32"),
    ({"avx512f", "avx512_bf16"}, "bf16-mixed"),
    ({"avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}, "bf16-mixed"),
    ({"asimd", "bf16", "i8mm"}, "bf16-mixed"),
    ({"asimd", "fphp", "asimdhp"}, "fp32"),
]


def pretend_gpu(monkeypatch, name, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)


def pretend_cpu(monkeypatch, flags):
    monkeypatch.setattr(devices, "cpu_instructions", lambda: frozenset(flags))
    for module in (devices, halfstep.precision.casting.autocast):
        monkeypatch.setattr(
            module, "cpu_has_bf16", lambda: bool({"bf16", "avx512_bf16", "amx_bf16"} & flags)
        )


def test_each_gpu_gets_what_it_multiplies_natively(monkeypatch):
    def check(name, capability, policy):
        pretend_gpu(monkeypatch, name, capability)
        chosen = choose(CUDA)
        assert chosen.policy == policy
        assert name in chosen.reason
        assert halfstep.support("auto", CUDA).status == "native"
        assert parse_policy("auto", "cuda") == POLICIES[policy]

    every(GPUS, check)


def test_a_cpu_takes_bf16_where_it_has_instructions(monkeypatch):
    def check(flags, policy):
        pretend_cpu(monkeypatch, flags)
        assert choose(CPU).policy == policy
        assert halfstep.support("auto", CPU).status == "native"

    every(CPUS, check)


def test_the_table_agrees_with_support(monkeypatch):
    """A row's policy runs natively on its devices, and its native 16-bit formats are honoured."""
    for row in DEVICES:
        assert row.policy in ("fp32", "bf16-mixed", "fp16-mixed")
        assert row.policy.partition("-")[0] in row.native.split(), row.family
        assert row.source, row.family
        if row.type != "cuda" or row.models:  # fp16 runs on a GTX 16, but not as what to take
            continue
        pretend_gpu(monkeypatch, "NVIDIA X", row.since)
        for form in ("bf16", "fp16", "tf32"):
            name = form if form == "tf32" else f"{form}-mixed"
            status = halfstep.support(name, CUDA).status
            assert (status == "native") == (form in row.native.split()), (row.family, form)


def test_auto_waits_for_its_device():
    assert parse_later(" AUTO ") == "AUTO"
    # a field that only one of auto's policies takes waits for the device too
    assert parse_later("auto,growth_interval=100") == "auto,growth_interval=100"
    assert parse_later("fp32") == POLICIES["fp32"]
    named = parse_policy(f"{choose(CPU).policy},moments=8bit")
    assert parse_policy("auto,moments=8bit", CPU) == named
    with pytest.raises(PrecisionError, match="depends on the device"):
        parse_policy("auto")
    with pytest.raises(PrecisionError, match="moment"):
        parse_policy("auto,momnts=8bit", CPU)


@pytest.mark.parametrize(("flags", "policy"), [({"avx2"}, "fp32"), ({"bf16"}, "bf16-mixed")])
def test_precision_takes_the_policy_of_the_models_device(monkeypatch, flags, policy):
    pretend_cpu(monkeypatch, flags)
    model = nn.Linear(4, 4)
    precision = halfstep.Precision("auto", model, torch.optim.AdamW(model.parameters()))
    assert str(precision.policy) == policy
    assert precision.state_dict()["policy"] == policy
    assert halfstep.explain("auto").splitlines()[0].split() == ["policy", policy]
