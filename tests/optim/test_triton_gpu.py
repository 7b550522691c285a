"""What only a GPU can show of the CUDA kernels; skipped, loudly, without one."""

import contextlib
import copy
import math

import pytest
import torch

from halfstep.optim.kernels import cuda
from halfstep.optim.kernels.dispatch import kernel_for
from halfstep.optim.kernels.reference import Plan, run_torch
from halfstep.optim.on_device.scaler import DeviceScaler
from halfstep.optim.optimizers import AdamW
from halfstep.optim.rules import ADAMW, LION, SGD as SGD_RULE
from halfstep.optim.storage.moments import zeros
from halfstep.optim.storage.state import StepTask
from halfstep.precision.masters.rounding import ROUNDING
from halfstep.precision.scaling.loss_scale import LossScaleConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: nothing of CUDA was tested"),
    pytest.mark.skipif(isinstance(cuda.triton_kernels(), str), reason="NO TRITON on this GPU"),
]
DEVICE = torch.device("cuda", 0)
GROUPS = {
    "adamw": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-8},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "nesterov": False},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
}


@pytest.fixture(autouse=True)
def _no_error_is_left_behind():
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_tasks(rule, gradient, moments, update, sizes):
    """Tensors that do and do not begin at multiples of 16 bytes: the last is a slice."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tasks = []
    for i, (n, skip) in enumerate(sizes):
        weight = torch.randn(n + skip, generator=generator, device=DEVICE)[skip:]
        if update != "fp32":
            weight = weight.bfloat16()
        dtype = None if update == "fp32" else ROUNDING[update].remainder_dtype
        remainder = None if dtype is None else torch.zeros(n, dtype=dtype, device=DEVICE)
        held = [zeros(weight, moments) for _ in rule.moments]
        gradients = torch.empty(n + skip, dtype=gradient, device=DEVICE)[skip:]
        moment, tops = tuple(m for m, _ in held), tuple(t for _, t in held)
        tasks.append(StepTask(weight, remainder, moment, tops, gradients, 3 * i))
    return tasks


def tensors(task):
    found = [task.weight, *task.moments, *task.tops]
    return found if task.remainder is None else [*found, task.remainder]


def same(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("skip", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(
    ("rule", "gradient", "moments", "update"),
    [
        (ADAMW, torch.bfloat16, "fp32", "split"),
        (ADAMW, torch.bfloat16, "8bit", "split"),
        (ADAMW, torch.float32, "8bit", "split24"),
        (ADAMW, torch.float32, "fp32", "fp32"),
        (ADAMW, torch.float16, "bf16", "kahan"),
        (ADAMW, torch.bfloat16, "bf16", "stochastic"),
        (SGD_RULE, torch.bfloat16, "8bit", "stochastic"),
        (SGD_RULE, torch.float16, "fp32", "nearest"),
        (LION, torch.float32, "bf16", "split24"),
        (LION, torch.bfloat16, "8bit", "kahan"),
    ],
)
def test_same_bits_as_torch_operations(rule, gradient, moments, update, skip):
    sizes = [(n, skip) for n in (1, 127, 128, 129, 1000, 1024, 70001)]
    ours = make_tasks(rule, gradient, moments, update, sizes)
    theirs = copy.deepcopy(ours)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for step in (1, 2, 3):
        for a, b in zip(ours, theirs, strict=True):
            draw = torch.randn(2, a.gradient.numel(), generator=generator, device=DEVICE)
            # many binades, down to subnormal second moments, and some that are 0
            values = (draw[0] * (12 * draw[1]).exp()).clamp(-1e4, 1e4)
            a.gradient.copy_(torch.where(draw[1] > 2, 0, values))
            b.gradient.copy_(a.gradient)
        how = "nearest" if update == "fp32" else update
        plan = Plan(rule, rule.constants(GROUPS[rule.name], step), how, moments, 0.37, 7, step)
        cuda.run_cuda(ours, plan)
        run_torch(theirs, plan)
        for a, b in zip(ours, theirs, strict=True):
            for x, y in zip(tensors(a), tensors(b), strict=True):
                assert same(x, y), (step, x.numel(), x.dtype, (x != y).sum())


def test_the_optimizer_uses_one_launch_and_does_not_wait():
    assert kernel_for(DEVICE.type).name == "Triton kernels"
    parameters = [torch.nn.Parameter(torch.randn(300 + i, device=DEVICE)) for i in range(20)]
    optimizer = AdamW(parameters, lr=1e-2, moments="8bit")
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    with no_synchronisation():
        optimizer.step()
    events = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with events:
        optimizer.step()
        torch.cuda.synchronize()
    names = [event.name for event in events.events() if "update_kernel" in event.name]
    assert len(names) == 1


class Model(torch.nn.Module):
    """Elementwise, so that a captured and an eager pass give the same bits."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(300, 40, generator=generator)
        self.weight = torch.nn.Parameter(weight.bfloat16())
        self.scale = torch.nn.Parameter(torch.ones(40))
        self.shift = torch.nn.Parameter(torch.zeros(300, 1).half().float())

    def forward(self, x):
        return ((self.weight * x).float() * self.scale + self.shift).square().mean()


def make(**config):
    model = Model().to(DEVICE)
    groups = [
        {"params": [model.weight], "update": "split24", "moments": "8bit", "weight_decay": 0.1},
        {"params": [model.scale, model.shift], "moments": "fp32", "lr": 0.003},
    ]
    optimizer = AdamW(groups, lr=0.01, seed=5)
    scale = LossScaleConfig(kind="dynamic", init_scale=2.0**10, **config)
    return model, optimizer, DeviceScaler(scale, optimizer, names=names_of(model))


def names_of(model):
    return {p: name for name, p in model.named_parameters()}


def train(model, optimizer, scaler, x):
    optimizer.zero_grad(set_to_none=True)
    loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(max_norm=1.0)


def everything(model, optimizer):
    """Copies of all that a step may change, but step numbers."""
    found = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        found += [v.clone() for k, v in optimizer.state[p].items() if k != "step"]
    return found


def batches(count):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(300, 40, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(count)
    ]


def test_a_step_never_waits_for_the_device():
    model, optimizer, scaler = make()
    data = batches(4)
    train(model, optimizer, scaler, data[0])  # compiles and makes tables
    before = everything(model, optimizer)
    with no_synchronisation():
        for x in data[1:]:
            train(model, optimizer, scaler, x)
        optimizer.param_groups[0]["lr"] = 0.02  # a schedule
        train(model, optimizer, scaler, data[0])
        model.scale.grad[3] = math.inf
        scaler.step(max_norm=1.0)  # skipped
        model.scale.grad[3] = 0.0
        pending = scaler.async_result()
    result = pending.get()
    assert result == scaler.result()
    assert not result.applied
    assert result.reason == "overflow"
    assert result.nonfinite_parameters == ("scale",)
    assert (result.loss_scale, result.next_loss_scale) == (2.0**10, 2.0**9)
    assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [5, 5, 5]
    assert not same(before[0], model.weight.detach())


def test_the_norm_is_that_of_fp64():
    for dtype, value in ((torch.float32, 1e30), (torch.bfloat16, 3e38), (torch.float32, 1e-30)):
        p = torch.nn.Parameter(torch.ones(1_000_003, device=DEVICE, dtype=dtype))
        optimizer = AdamW([p], lr=0.1, update="split", moments="8bit")
        scaler = DeviceScaler(LossScaleConfig(), optimizer)
        p.grad = torch.full_like(p, value) * torch.rand_like(p)
        scaler.step(max_norm=1.0)
        result = scaler.result()
        assert result.applied
        # fp64 sums of a million terms in another order
        assert result.grad_norm == pytest.approx(float(p.grad.double().norm()), rel=1e-10)
        assert p.isfinite().all()


def test_a_whole_step_in_a_graph_skips_an_overflow_and_goes_on():
    data = batches(8)
    ours, theirs = make(growth_interval=4), make(growth_interval=4)
    x = data[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train(*ours, x)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        train(*theirs, data[0])
    graph = torch.cuda.CUDAGraph()
    ours[1].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = ours[0](x)
        ours[2].scale(loss).backward()
        ours[2].step(max_norm=1.0)
    torch.cuda.synchronize()
    for a, b in zip(everything(*ours[:2]), everything(*theirs[:2]), strict=True):
        assert same(a, b)  # a capture does nothing

    for number, batch in enumerate(data):
        poison = number in (2, 3)
        before = everything(*ours[:2])
        if number == 5:
            for _, optimizer, _ in (ours, theirs):
                optimizer.param_groups[0]["lr"] *= 0.5
            ours[2].write_options()
        good = x.copy_(batch)
        if poison:
            good[7, 5] = math.inf
        with no_synchronisation():
            graph.replay()
        result = ours[2].result()
        train(*theirs, x)
        expected = theirs[2].result()
        assert result.applied is not poison
        assert result.loss_scale == expected.loss_scale
        assert result.next_loss_scale == expected.next_loss_scale
        assert result.skipped_total == expected.skipped_total
        if poison:
            assert result.next_loss_scale == result.loss_scale / 2
            assert all(same(a, b) for a, b in zip(before, everything(*ours[:2]), strict=True))
        else:
            assert result.grad_norm == expected.grad_norm
            for a, b in zip(everything(*ours[:2]), everything(*theirs[:2]), strict=True):
                assert same(a, b), number
    steps = [[float(o.state[p]["step"]) for p in m.parameters()] for m, o, _ in (ours, theirs)]
    assert steps[0] == steps[1] == [9.0, 9.0, 9.0]


def test_the_device_agrees_with_the_host_path():
    model, optimizer, scaler = make()
    other, reference, _ = make()
    for x in batches(5):
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            b.grad = a.grad.clone()
        scaler.step()
        reference.step(multiplier=1 / scaler.result().loss_scale)
    for a, b in zip(everything(model, optimizer), everything(other, reference), strict=True):
        assert same(a, b)
