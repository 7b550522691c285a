"""Which device runs which policy, and the context that makes it so."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from every import every
from halfstep import POLICIES, Precision, PrecisionError, autocast, parse_policy, support
from halfstep.precision.casting.autocast import (
    Autocast,
    active_autocast,
    pinned,
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


def test_tf32_on_a_cpu_is_refused_naming_fp32():
    found, before = support(POLICIES["tf32"], CPU), switches()
    assert (found.status, found.nearest) == ("refused", "fp32")
    with pytest.raises(PrecisionError, match=r"precision tf32 cannot be honoured on cpu.*is fp32"):
        require_support(POLICIES["tf32"], CPU)
    with pytest.raises(PrecisionError, match="tf32 cannot be honoured on cpu"):
        autocast(POLICIES["tf32"], CPU)
    assert switches() == before


def test_what_is_offered_instead_can_be_honoured():
    def check(name, device):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            found = support(POLICIES[name], torch.device(device))
            assert found.status == "refused"
            assert ("no CUDA device" if device == "cuda" else device) in found.reason
            policy, on = found.nearest.split(" on --device ")
            assert on == "cpu"
            assert support(parse_policy(policy), CPU).status != "refused"
            with pytest.raises(PrecisionError, match="cannot be honoured on"):
                require_support(POLICIES[name], torch.device(device))

    every(itertools.product(POLICIES, ("cuda", "mps", "xpu", "meta")), check)


def pretend_gpu(monkeypatch, capability) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


# --- the context ----------------------------------------------------------------------------------


def context_of(name: str, model: nn.Module | None = None, device=CPU) -> Autocast:
    return Autocast(POLICIES[name], model, device)


def settings(names: list[str]) -> list[str]:
    return [getattr(torch.backends.mkldnn, name).fp32_precision for name in names]


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_a_wrong_switch_is_held_while_the_context_is_open_and_no_longer(name):
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    before = switches()
    with context_of(name):
        assert settings(["matmul", "conv"]) == ["ieee", "ieee"]
        with context_of("fp32"):  # as a submodule that is called by hand
            assert settings(["matmul", "conv"]) == ["ieee", "ieee"]
        assert settings(["matmul", "conv"]) == ["ieee", "ieee"]
        with pytest.raises(RuntimeError):
            _ = F.linear(torch.randn(4, 4), torch.randn(3, 3))  # shapes do not fit
        inside = switches()
        for key in before:
            if not key.startswith(("autocast", "dispatch", "mkldnn matmul", "mkldnn conv")):
                assert inside[key] == before[key]
    assert switches() == before


def test_a_backward_is_pinned_as_a_whole_within_the_context_too():
    torch.set_float32_matmul_precision("medium")
    before, seen = settings(["matmul"]), []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.extend(settings(["matmul"]))
            return grad

    x = torch.randn(3, requires_grad=True)
    with context_of("bf16-mixed"):
        Square.apply(x).sum().backward()
        torch.autograd.grad(Square.apply(x).sum(), x)
        torch.autograd.backward(Square.apply(x).sum())
    with context_of("fp32").arithmetic():
        Square.apply(x).sum().backward()
    assert seen == ["ieee"] * 4
    assert settings(["matmul"]) == before != ["ieee"]


def test_on_cuda_the_cuda_switches_are_pinned(monkeypatch):
    pretend_gpu(monkeypatch, (8, 0))
    before = switches()
    backends = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
    for tf32, means in ((True, {"tf32"}), (False, {"ieee", "none"})):
        context = context_of("tf32" if tf32 else "fp32", device=CUDA)
        with context:
            assert {backend.fp32_precision for backend in backends} <= means
            for name in BACKENDS:  # a CPU's own switches are none of a GPU's business
                backend = getattr(torch.backends.mkldnn, name)
                assert backend.fp32_precision == before[f"mkldnn {name}"]
        assert switches() == before


@pytest.mark.covering
@pytest.mark.parametrize("generic", ["none", "tf32", "ieee"])
@pytest.mark.parametrize("above", ["none", "tf32", "bf16"])
@pytest.mark.parametrize("own", ["none", "tf32", "bf16"])
def test_a_setting_is_restored_as_it_was_set_inherited_ones_too(generic, above, own):
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    tree = (("generic", "all"), ("mkldnn", "all"), ("mkldnn", "conv"))

    def probe() -> list[str]:
        # what each level follows shows when the ones above it move
        found = []
        for mover in ("ieee", "tf32", "bf16"):
            put(*tree[0], mover)
            found += [get(*tree[1]), get(*tree[2])]
        put(*tree[0], generic)
        return [*found, get(*tree[0])]

    try:
        for level, value in zip(tree, (generic, above, own), strict=True):
            put(*level, value)
        before, shown = probe(), get(*tree[2])
        inherits = own == "none" or own == get(*tree[1])  # what is as its parent follows it
        for _ in range(2):
            with context_of("fp32"):
                assert get(*tree[2]) in ("ieee", "none")
        assert get(*tree[2]) == shown
        assert inherits or probe() == before
        put(*tree[1], "ieee")
        assert get(*tree[2]) == ("ieee" if inherits else own)
    finally:
        for level in tree:
            put(*level, "none")


def test_threads_that_want_the_same_value_share_it_and_others_are_refused():
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    switch = (("mkldnn", "conv"),)
    inside, leave, seen = threading.Event(), threading.Event(), []

    def hold() -> None:
        with pinned(switch, "ieee"):
            inside.set()
            leave.wait(10)
            seen.append(settings(["conv"]))

    first = threading.Thread(target=hold)
    first.start()
    assert inside.wait(10)
    with pinned(switch, "ieee"):
        assert settings(["conv"]) == ["ieee"]
        with pytest.raises(PrecisionError, match="another thread runs a policy that rounds them"):
            pinned(switch, "tf32").__enter__()
        leave.set()
        first.join(10)
        assert settings(["conv"]) == seen[0] == ["ieee"]
    assert settings(["conv"]) == ["bf16"]


def test_overlapping_threads_and_a_suspended_generator_put_every_switch_back():
    torch.set_float32_matmul_precision("medium")
    before = switches()
    context = context_of("bf16-mixed")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with context:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with context:
        thread.start()
        assert entered.wait(10)
    assert settings(["matmul"]) == ["ieee"]  # the other thread's forward is still running
    leave.set()
    thread.join(10)
    assert switches() == before

    def numbers() -> Iterator[int]:
        with context_of("fp32"):
            yield 1

    suspended = numbers()
    next(suspended)
    assert settings(["matmul"]) == ["ieee"]
    suspended.close()
    assert switches() == before


# --- one context object ---------------------------------------------------------------------------


def test_one_context_is_entered_again_nested_and_as_a_decorator():
    before = switches()
    context = context_of("bf16-mixed")
    x = torch.randn(3, 3)
    for _ in range(3):
        with context:
            assert active_autocast() is context
            with context, context_of("fp32") as nothing:
                assert nothing is None
                assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16

    @context
    def product(a: torch.Tensor, times: int = 1) -> torch.Tensor:
        """Its own docstring."""
        return a @ a if times == 1 else product(a, times - 1)

    assert product(x, 3).dtype == torch.bfloat16
    assert product.__name__ == "product"
    with pytest.raises(KeyError), context:
        raise KeyError
    assert active_autocast() is None
    assert switches() == before


@pytest.mark.parametrize(
    "policy",
    ["bf16-mixed,keep_fp32=*norm", "bf16-master", "bf16-split", "fp16-pure", "bf16-module"],
)
def test_what_a_context_alone_cannot_honour_is_refused(policy):
    with pytest.raises(PrecisionError, match=r"more of a model.*use halfstep\.Precision"):
        autocast(policy, "cpu")


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


def outer() -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "around", [(outer, contextlib.nullcontext), (contextlib.nullcontext, outer)]
)
def test_an_outer_autocast_does_not_reach_into_an_fp32_forward_or_backward(around):
    x, y = batches(1, rows=64)[0]
    expected = gradients(contextlib.nullcontext, contextlib.nullcontext, mlp, x, y)
    got = gradients(*around, mlp, x, y)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", [*DYNAMIC, "bf16-mixed", "bf16-master", "bf16-pure"])
@pytest.mark.parametrize("instructions", [False, True])
def test_formats_without_instructions_are_simulated_in_forward_and_backward(
    name, instructions, monkeypatch
):
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: instructions)
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


# --- one context around a whole loop --------------------------------------------------------------


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_an_autocast_to_another_format_inside_of_ours_is_refused(name):
    model = mlp()
    precision = Precision(scaled(name), model, torch.optim.SGD(model.parameters()))
    low = precision.policy.compute_dtype
    other = torch.bfloat16 if low == torch.float16 else torch.float16
    (x, _), *_ = batches(1)
    plain = model.forward
    model.forward = torch.autocast("cpu", dtype=other)(plain)
    with precision.autocast(), pytest.raises(PrecisionError, match=r"a torch\.autocast to"):
        model(x)
    model.forward = torch.autocast("cpu", enabled=False)(plain)
    if low == torch.float32:
        with precision.autocast():
            model(x)


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_a_model_converted_afterwards_is_refused_where_the_context_is_entered(name):
    model = mlp()
    precision = Precision(scaled(name), model, torch.optim.SGD(model.parameters()))
    model.double()
    with pytest.raises(PrecisionError, match="another dtype or device"), precision.autocast():
        pass
    model.to(precision.policy.param_dtype)
    with precision.autocast():
        pass
