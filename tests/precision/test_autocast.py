"""Which device runs which policy, and the context that makes it so."""

import contextlib

import pytest
import torch
from torch import nn

from halfstep import POLICIES, Precision, PrecisionError, autocast, parse_policy, support
from halfstep.precision.autocast import (
    Support,
    arithmetic,
    cpu_has_bf16,
    float32_matmul,
    require_support,
)
from reference.training import CPU_POLICIES, DYNAMIC, batches, mlp, mse, scaled
from reference.witness import Witness

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKENDS = ("matmul", "conv", "rnn")


def switches() -> dict[str, object]:
    """Every global setting that this library may touch, as torch shows it."""
    seen = {
        "legacy": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "cuda matmul": torch.backends.cuda.matmul.fp32_precision,
        "cudnn conv": torch.backends.cudnn.conv.fp32_precision,
        "cudnn rnn": torch.backends.cudnn.rnn.fp32_precision,
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }
    for name in BACKENDS:
        seen[f"mkldnn {name}"] = getattr(torch.backends.mkldnn, name).fp32_precision
    return seen


@pytest.fixture(autouse=True)
def _global_settings_are_put_back():
    before = torch.get_float32_matmul_precision()
    backends = [getattr(torch.backends.mkldnn, name) for name in BACKENDS]
    backends += [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
    own = [backend.fp32_precision for backend in backends]
    overall = torch.backends.fp32_precision
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.fp32_precision = overall
    for backend, value in zip(backends, own, strict=True):
        backend.fp32_precision = value


# --- support --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_a_cpu_runs_every_policy_but_tf32(name):
    found = support(POLICIES[name], CPU)
    if name.startswith("fp16"):
        assert found.status == "simulated"
    elif name.startswith("bf16"):
        assert found.status == ("native" if cpu_has_bf16() else "simulated")
    else:
        assert found.status == "native"
    assert found.reason
    assert found.nearest == ""
    assert require_support(POLICIES[name], CPU) == found


@pytest.mark.parametrize(("flags", "status"), [(True, "native"), (False, "simulated")])
def test_bf16_on_a_cpu_says_whether_it_is_native(monkeypatch, flags, status):
    monkeypatch.setattr("halfstep.precision.autocast.cpu_has_bf16", lambda: flags)
    for name in ("bf16-mixed", "bf16-master", "bf16-pure"):
        assert support(POLICIES[name], CPU).status == status
    assert support(POLICIES["fp32"], CPU).status == "native"


def test_cpu_has_bf16_reads_the_flags_of_this_cpu():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.split(":")[0].strip() in ("flags", "Features")]
    except OSError:
        pytest.skip("no /proc/cpuinfo on this system")
    words = {word for line in lines for word in line.split(":")[1].split()}
    assert cpu_has_bf16() == bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def test_tf32_on_a_cpu_is_refused_naming_fp32():
    found = support(POLICIES["tf32"], CPU)
    assert (found.status, found.nearest) == ("refused", "fp32")
    with pytest.raises(PrecisionError, match=r"precision tf32 cannot be honoured on cpu.*is fp32"):
        require_support(POLICIES["tf32"], CPU)
    with (
        pytest.raises(PrecisionError, match="tf32 cannot be honoured on cpu"),
        autocast(POLICIES["tf32"], CPU),
    ):
        pass


def offered_on_cpu(nearest: str) -> Support:
    """How a CPU runs what a refusal offers as "<policy> on --device cpu"."""
    policy, device = nearest.split(" on --device ")
    assert device == "cpu"
    return support(parse_policy(policy), CPU)


@pytest.mark.parametrize("name", POLICIES)
def test_cuda_without_a_device_is_refused_before_anything_runs(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = support(POLICIES[name], CUDA)
    assert found.status == "refused"
    assert "no CUDA device" in found.reason
    assert offered_on_cpu(found.nearest).status != "refused"
    with pytest.raises(PrecisionError, match=r"cannot be honoured on cuda.*no CUDA device"):
        require_support(POLICIES[name], CUDA)


def pretend_gpu(monkeypatch, capability) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


# CUDA C++ Programming Guide, "Compute Capabilities": tensor cores for fp16 from 7.0, for bf16 and
# tf32 from 8.0. Policy family: first capability that has it, and what is nearest below.
FIRST = {"fp32": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0)}


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("name", POLICIES)
def test_compute_capability_decides(monkeypatch, name, capability):
    pretend_gpu(monkeypatch, capability)
    found = support(POLICIES[name], CUDA)
    expected = "native" if capability >= FIRST[name.split("-")[0]] else "refused"
    assert found.status == expected
    assert f"{capability[0]}.{capability[1]}" in found.reason


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
@pytest.mark.parametrize(
    ("name", "nearest"), [("bf16-mixed", "fp16-mixed"), ("tf32", "fp32"), ("bf16", "fp16-mixed")]
)
def test_the_nearest_policy_on_volta_and_turing(monkeypatch, name, nearest, capability):
    pretend_gpu(monkeypatch, capability)
    assert support(parse_policy(name), CUDA).nearest == nearest
    with pytest.raises(PrecisionError, match=f"the nearest that can is {nearest}"):
        require_support(parse_policy(name), CUDA)


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0), (7, 5), (8, 0)])
@pytest.mark.parametrize("name", POLICIES)
def test_the_nearest_policy_can_itself_be_honoured(monkeypatch, name, capability):
    pretend_gpu(monkeypatch, capability)
    found = support(POLICIES[name], CUDA)
    if found.status == "refused":
        assert support(parse_policy(found.nearest), CUDA).status != "refused"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_devices_are_refused_and_what_is_offered_can_be_honoured(name, device):
    found = support(POLICIES[name], torch.device(device))
    assert found.status == "refused"
    assert device in found.reason
    assert offered_on_cpu(found.nearest).status != "refused"


# --- the context ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CPU_POLICIES)
@pytest.mark.parametrize("fails", [False, True])
def test_global_state_is_as_before_on_exit_and_on_exception(name, fails):
    torch.set_float32_matmul_precision("medium")
    for context in (autocast, arithmetic):
        before = switches()
        caught = pytest.raises(KeyError) if fails else contextlib.nullcontext()
        with caught, context(POLICIES[name], CPU):
            if fails:
                raise KeyError
        assert switches() == before


def test_a_refused_policy_changes_nothing():
    before = switches()
    with pytest.raises(PrecisionError), autocast(POLICIES["tf32"], CPU):
        pass
    assert switches() == before


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_inside_fp32_products_are_ieee_and_autocast_is_what_the_policy_says(name):
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast(POLICIES[name], CPU):
        for backend in BACKENDS:
            assert getattr(torch.backends.mkldnn, backend).fp32_precision == "ieee"
        assert torch.is_autocast_enabled("cpu") == name.endswith("-mixed")
        if name.endswith("-mixed"):
            assert torch.get_autocast_dtype("cpu") == POLICIES[name].compute_dtype
        a, b = torch.randn(4, 8), torch.randn(8, 3)
        expected = POLICIES[name].compute_dtype if name.endswith("-mixed") else torch.float32
        assert (a @ b).dtype == expected


def test_on_cuda_the_cuda_switches_are_pinned(monkeypatch):
    pretend_gpu(monkeypatch, (8, 0))
    before = switches()
    backends = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
    for tf32, value in ((True, "tf32"), (False, "ieee")):
        with float32_matmul(tf32, CUDA):
            assert [backend.fp32_precision for backend in backends] == [value] * 3
            for name in BACKENDS:  # a CPU's own switches are none of a GPU's business
                backend = getattr(torch.backends.mkldnn, name)
                assert backend.fp32_precision == before[f"mkldnn {name}"]
        assert switches() == before


def test_contexts_can_be_nested():
    before = switches()
    with autocast(POLICIES["bf16-mixed"], CPU):
        inside = switches()
        with autocast(POLICIES["fp32"], CPU):
            assert not torch.is_autocast_enabled("cpu")
        with autocast(POLICIES["fp16-mixed"], CPU):
            assert torch.get_autocast_dtype("cpu") == torch.float16
        assert switches() == inside
    assert switches() == before


def test_a_setting_that_was_inherited_is_inherited_again_afterwards():
    # torch's settings form a tree: while a backend has none of its own, it follows the one above.
    torch.backends.fp32_precision = "tf32"
    assert torch.backends.mkldnn.conv.fp32_precision == "tf32"
    with autocast(POLICIES["fp32"], CPU):
        pass
    torch.backends.fp32_precision = "ieee"
    try:
        assert torch.backends.mkldnn.conv.fp32_precision == "ieee"
    finally:
        for name in BACKENDS:
            getattr(torch.backends.mkldnn, name).fp32_precision = "none"


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Linear(16 * 14 * 14, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).relu().flatten(1))


def gradients(outer_forward, outer_backward, model_type, x, y) -> list[torch.Tensor]:
    """Output and gradients of one step under policy fp32, inside somebody's outer contexts."""
    model = model_type()
    precision = Precision("fp32", model, torch.optim.SGD(model.parameters(), lr=0.1))
    with outer_forward():
        with precision.autocast():
            output = model(x)
            loss = mse(output, y)
        assert output.dtype == torch.float32
    with outer_backward():
        precision.backward(loss)
    return [output.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("model_type", [mlp, ConvNet])
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_fp32_is_fp32_although_the_process_allows_less(model_type, precision):
    generator = torch.Generator().manual_seed(0)
    x, y = batches(1, rows=512)[0]
    if model_type is ConvNet:
        x = torch.randn(8, 3, 16, 16, generator=generator)
        y = torch.randn(8, 8, generator=generator)
    torch.set_float32_matmul_precision("highest")
    expected = gradients(contextlib.nullcontext, contextlib.nullcontext, model_type, x, y)
    torch.set_float32_matmul_precision(precision)
    if precision == "medium":
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
    got = gradients(contextlib.nullcontext, contextlib.nullcontext, model_type, x, y)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def outer() -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_an_outer_autocast_does_not_reach_into_an_fp32_forward():
    x, y = batches(1, rows=64)[0]
    expected = gradients(contextlib.nullcontext, contextlib.nullcontext, mlp, x, y)
    got = gradients(outer, contextlib.nullcontext, mlp, x, y)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_outer_autocast_does_not_reach_into_an_fp32_backward():
    x, y = batches(1, rows=64)[0]
    expected = gradients(contextlib.nullcontext, contextlib.nullcontext, mlp, x, y)
    got = gradients(contextlib.nullcontext, outer, mlp, x, y)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_backward_inside_the_autocast_block_is_the_same_backward(name):
    # Against torch's advice, and in half of all loops: backward() written inside the with-block.
    x, y = batches(1, rows=64)[0]
    results = []
    for inside in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision = Precision(name, model, optimizer)
        with precision.autocast():
            loss = mse(model(x), y)
            if inside:
                precision.backward(loss)
        if not inside:
            precision.backward(loss)
        results.append([p.grad.clone() for p in precision.named_parameters().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mixed_products_really_run_in_the_compute_dtype():
    # 1 + 2^-9 is no bf16 and 1 + 2^-12 no fp16 number: if operands are rounded, the product is 1.
    for name, beyond in (("bf16-mixed", 2.0**-9), ("fp16-mixed", 2.0**-12)):
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1 + beyond)
        precision = Precision(name, model, torch.optim.SGD(model.parameters(), lr=0.1))
        with precision.autocast():
            assert model(torch.ones(1, 1)).item() == 1.0
        assert model.weight.item() == 1 + beyond


@pytest.mark.parametrize("name", [*DYNAMIC, "bf16-mixed", "bf16-master", "bf16-pure"])
@pytest.mark.parametrize("instructions", [False, True])
def test_formats_without_instructions_are_simulated_in_forward_and_backward(
    name, instructions, monkeypatch
):
    monkeypatch.setattr("halfstep.precision.autocast.cpu_has_bf16", lambda: instructions)
    model = ConvNet()
    precision = Precision(scaled(name), model, torch.optim.SGD(model.parameters(), lr=0.1))
    low = precision.policy.compute_dtype
    simulated = low == torch.float16 or not instructions
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with Witness() as witness, precision.autocast():
        loss = model(x).float().square().mean()
    assert bool(witness.products_in(low)) != simulated
    with Witness() as witness:
        precision.backward(loss)
    assert any("convolution_backward" in op for op, _ in witness.seen)
    assert bool(witness.products_in(low)) != simulated
