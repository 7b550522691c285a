"""What only a GPU can show of the CUDA kernels; skipped, loudly, without one."""

import copy
import math

import pytest
import torch

from halfstep.optim.kernels import cuda, kernel_for
from halfstep.optim.kernels.reference import Plan, run_torch
from halfstep.optim.moments import zeros
from halfstep.optim.optimizers import AdamW
from halfstep.optim.rules import ADAMW, DIRECTED, LION, SGD as SGD_RULE
from halfstep.optim.state import Batch, StepTask, elements_below
from halfstep.precision.masters.rounding import ROUNDING, master
from halfstep.precision.step import Precision
from optim.triton_kernel_programs import OPTIONS, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: nothing of CUDA was tested"),
    pytest.mark.skipif(isinstance(cuda.triton_kernels(), str), reason="NO TRITON on this GPU"),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_error_is_left_behind():
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
        (DIRECTED, torch.bfloat16, "fp32", "split"),
        (DIRECTED, torch.float32, "fp32", "stochastic"),
    ],
)
def test_same_bits_as_torch_operations(rule, gradient, moments, update, skip):
    sizes = [(n, skip) for n in (1, 127, 128, 129, 1000, 1024, 8191, 8192, 8193, 70001)]
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
        plan = Plan(rule, rule.constants(OPTIONS[rule.name], step), how, moments, 0.37, 7, step)
        cuda.run_cuda(Batch(ours), plan)
        run_torch(Batch(theirs), plan)
        for a, b in zip(ours, theirs, strict=True):
            for x, y in zip(tensors(a), tensors(b), strict=True):
                assert same(x, y), (step, x.numel(), x.dtype, (x != y).sum())
    values = [torch.empty(task.weight.shape, device=DEVICE) for task in ours]
    cuda.read_masters(Batch(ours), values, how)
    for value, task in zip(values, theirs, strict=True):
        assert same(value, master(task.weight, task.remainder))
    if len(rule.moments) == 2 and moments == "8bit":
        assert torch.equal(cuda.elements_below(Batch(ours)), elements_below(Batch(theirs)))


def test_the_optimizer_uses_one_launch_and_does_not_wait(no_synchronisation):
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
    """Elementwise, so that two passes give the same bits."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(300, 40, generator=generator))
        self.scale = torch.nn.Parameter(torch.ones(40))
        self.shift = torch.nn.Parameter(torch.zeros(300, 1))

    def forward(self, x):
        return ((self.weight * x).float() * self.scale + self.shift).square().mean()


POLICIES = ("bf16-split24,moments=bf16", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master")
DYNAMIC = "scale=dynamic,init_scale=1024,growth_interval=4"


def make(policy=f"bf16-split24,moments=bf16,{DYNAMIC}"):
    model = Model().to(DEVICE)
    groups = [
        {"params": [model.weight], "weight_decay": 0.1},
        {"params": [model.scale, model.shift], "lr": 0.003},
    ]
    optimizer = AdamW(groups, lr=0.01, seed=5)
    return model, optimizer, Precision(policy, model, optimizer)


def train(model, precision, x, poison=None):
    with precision.autocast():
        loss = model(x)
    precision.backward(loss)
    if poison is not None:
        model.weight.grad[3].fill_(poison)  # the largest: smaller ones say that none was cleared
    return precision.step(max_norm=1.0)


def everything(model, optimizer):
    """Copies of all that a step may change, but step numbers."""
    found = [p.detach().clone() for p in model.parameters()]
    for state in optimizer.state_dict()["state"].values():
        found += [v.clone() for k, v in state.items() if k != "step"]
    return found


def batches(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(300, 40, generator=generator).to(DEVICE) for _ in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_and_step_never_wait_for_the_device(policy, no_synchronisation):
    model, optimizer, precision = make(policy)
    data = batches(5)
    assert train(model, precision, data[0]).applied  # compiles and makes tables
    with no_synchronisation():
        results = [train(model, precision, x) for x in data[1:4]]
        optimizer.param_groups[0]["lr"] = 0.02  # a schedule
        results.append(train(model, precision, data[4]))
    assert all(result.applied for result in results)
    assert precision.progress.applied_total == 5
    steps = [float(s["step"]) for s in optimizer.state_dict()["state"].values()]
    assert steps == [5.0, 5.0, 5.0]


def test_an_overflow_is_skipped_without_waiting_and_told_later(no_synchronisation):
    model, optimizer, precision = make()
    data = batches(4)
    train(model, precision, data[0])
    before = everything(model, optimizer)
    poison = torch.tensor(math.inf, device=DEVICE)
    with no_synchronisation():
        result = train(model, precision, data[1], poison)
        following = train(model, precision, data[2])
    assert not result.applied
    assert result.reason == "overflow"
    assert result.nonfinite_parameters == ("weight",)
    assert (result.loss_scale, result.next_loss_scale) == (1024.0, 512.0)
    assert following.applied
    assert following.loss_scale == 512.0
    assert precision.progress.skipped_total == 1
    assert not all(same(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))


def test_gradients_of_a_step_are_not_kept_alive():
    model, _, precision = make("bf16-split")
    (x,) = batches(1)
    for _ in range(3):
        train(model, precision, x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    with precision.autocast():
        loss = model(x)
    precision.backward(loss)
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters())
    precision.step()
    del loss
    precision.settle()
    assert torch.cuda.memory_allocated() < held + gradients
