"""A Mac's GPU: what a live probe finds right is honoured, all else refused; on patched devices."""

import pytest
import torch

import halfstep
from halfstep.errors import ConfigError, PrecisionError
from halfstep.precision.casting import autocast
from halfstep.precision.casting.op_casts import AutocastCasts
from halfstep.precision.policy import devices, probe
from halfstep.precision.policy.policy import POLICIES
from halfstep.trainer.environment import choose_device

MPS = torch.device("mps")


@pytest.fixture
def mac(monkeypatch):
    """A function that pretends to have a Mac's GPU that is wrong in some formats, or lists."""

    def pretend(wrong=(), lists=()):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for module in (autocast, devices):
            monkeypatch.setattr(
                module, "failed_probe", lambda d, t: "norm: off" if t in wrong else ""
            )
            monkeypatch.setattr(
                module, "failed_lists", lambda d, t: "autocast: softmax" if t in lists else ""
            )

    return pretend


@pytest.mark.parametrize("name", POLICIES)
def test_what_the_probe_finds_right_is_native(mac, name):
    mac()
    found = halfstep.support(name, MPS)
    assert found.status == ("refused" if name == "tf32" else "native")
    assert "probe" in found.reason or name == "tf32"


@pytest.mark.parametrize("name", POLICIES)
def test_what_it_finds_wrong_is_refused_with_what_was_wrong(mac, name):
    mac(wrong={POLICIES[name].compute_dtype})
    found = halfstep.support(name, MPS)
    assert found.status == "refused"
    if name != "tf32":
        assert "norm: off" in found.reason
        # what is offered instead can be honoured
        nearest, _, device = found.nearest.partition(" on --device ")
        assert halfstep.support(nearest, device or MPS).status != "refused"


def test_other_lists_refuse_what_is_cast_op_by_op_alone(mac):
    mac(lists={torch.bfloat16})
    assert "autocast: softmax" in halfstep.support("bf16-mixed", MPS).reason
    for name in ("bf16-master", "bf16-split", "fp16-mixed", "fp32"):
        assert halfstep.support(name, MPS).status == "native"


@pytest.mark.parametrize(
    ("wrong", "lists", "policy"),
    [((), (), "fp16-mixed"), ((torch.float16,), (), "fp32"), ((), (torch.float16,), "fp32")],
)
def test_auto_takes_what_is_right(mac, wrong, lists, policy):
    mac(set(wrong), set(lists))
    assert str(halfstep.parse_policy("auto", MPS)) == policy
    assert halfstep.support("auto", MPS).status == "native"


def test_without_a_mac():
    for name in POLICIES:
        found = halfstep.support(name, MPS)
        assert (found.status, found.reason) == ("refused", "torch sees no GPU of a Mac (mps)")
    with pytest.raises(ConfigError, match="torch sees no GPU of a Mac; use --device cpu"):
        choose_device("mps")
    with pytest.raises(PrecisionError, match="nearest that can is bf16-mixed on --device cpu"):
        halfstep.autocast("bf16-mixed", "mps")


def test_devices_by_name(mac):
    mac()
    assert choose_device("mps") == choose_device("auto") == MPS
    mac(wrong={torch.float32})
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="allowed: auto, cpu, mps, cuda, cuda:N"):
        choose_device("mps:1")


# The lists of torch's autocast on a CPU differ from CUDA's, and halfstep's are CUDA's: the one must
# fail and the other pass.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_lists_are_compared(dtype):
    cpu, lists = torch.device("cpu"), probe.failed_lists.__wrapped__
    assert lists(cpu, dtype) == f"autocast: softmax comes in {str(dtype).removeprefix('torch.')}"
    with AutocastCasts():
        assert lists(cpu, dtype) == ""


def test_every_entry_of_the_lists_can_fail(monkeypatch):
    cpu = torch.device("cpu")
    for name, (run, fp32) in probe._LISTS.items():
        wrong = (lambda x: x) if fp32 else (lambda x: x.float())
        monkeypatch.setattr(probe, "_LISTS", {name: (wrong, fp32)})
        assert name in probe.failed_lists.__wrapped__(cpu, torch.bfloat16), run
