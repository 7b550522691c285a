"""What only a GPU can show of the CUDA kernels; skipped, loudly, without one."""

import copy

import pytest
import torch

from halfstep.optim.kernels import cuda
from halfstep.optim.kernels.reference import Plan, run_torch
from halfstep.optim.moments import zeros
from halfstep.optim.optimizers import AdamW
from halfstep.optim.rules import ADAMW, DIRECTED, LION, SGD as SGD_RULE
from halfstep.optim.state import Batch, StepTask
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


def test_gradients_of_a_step_are_not_kept_alive():
    model = torch.nn.Linear(300, 40, device=DEVICE)
    precision = Precision("bf16-split", model, AdamW(model.parameters(), lr=0.01))
    x = torch.randn(8, 300, device=DEVICE)
    for _ in range(3):
        precision.step(model(x).square().mean())
    precision.settle()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    loss = model(x).square().mean()
    precision.backward(loss)
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters())
    precision.step()
    del loss
    precision.settle()
    assert torch.cuda.memory_allocated() < held + gradients
