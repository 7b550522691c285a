"""Steps on the device, for triton_programs.py: beside the host's, and what is learned when.

Under Triton's interpreter a Precision over CPU tensors steps as on CUDA. One whose optimizer has a
hook of the user's leaves its decisions to the host: that is what the device is compared with.
"""

from __future__ import annotations

import copy
import math
import warnings
from unittest import mock

import torch
from oracles import fallen_back
from torch import nn
from triton_kernel_programs import OPTIONS, make_tasks, same

from halfstep.errors import PrecisionError
from halfstep.optim.kernels import cuda
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.optimizers import SGD, AdamW, Lion
from halfstep.optim.rules import LION
from halfstep.optim.state import Batch
from halfstep.precision.masters.stepping import decide_by_torch
from halfstep.precision.result import StepResult
from halfstep.precision.step import Precision

KINDS = {"adamw": AdamW, "sgd": SGD, "lion": Lion}
SCALED = "scale=dynamic,init_scale=256,growth_interval=2,hysteresis=2,max_scale=512"
POLICIES = (
    f"fp16-mixed,{SCALED}",
    f"fp16-master,{SCALED}",
    f"bf16-split24,{SCALED}",
    f"bf16-split,moments=8bit,{SCALED}",
    f"bf16-kahan,moments=bf16,{SCALED}",
    f"bf16-sr,{SCALED}",
    "bf16-mixed",
    "bf16-master",
)


def refused(call, kind=PrecisionError):
    """What the error said, or nothing."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


class Model(nn.Module):
    """Parameters of odd sizes, one of them stored in the order of its transpose."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(3, 50, generator=generator))
        self.turned = nn.Parameter(torch.randn(50, 2, generator=generator).t())
        self.gain = nn.Parameter(torch.ones(50))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        wide = (self.first @ (x * self.gain).t()).tanh()
        return (self.turned @ (x * self.gain).t()).tanh().sum(0) + wide.sum(0) + self.shift


class Run:
    """A Precision over a model, and one step of it."""

    def __init__(self, policy, kind=AdamW, *, host=False, options=None, **given):
        self.model = Model()
        parameters = [*self.model.parameters()]
        groups = [{"params": parameters[:2], "lr": 3e-3}, {"params": parameters[2:]}]
        self.optimizer = kind(groups, lr=0.01, seed=3, **(options or {}))
        if host:
            self.optimizer.register_step_pre_hook(users_hook)
        self.precision = Precision(policy, self.model, self.optimizer, **given)
        assert self.precision.path is not None

    def step(self, number, fault=None, micro_batches=1, **options):
        generator = torch.Generator().manual_seed(number)
        for _ in range(micro_batches):
            x = torch.randn(6, 50, generator=generator)
            with self.precision.autocast():
                loss = self.model(x).float().square().mean()
            self.precision.backward(loss)
        if fault is not None:
            name, value = fault
            gradient = dict(self.model.named_parameters())[name].grad
            gradient[(-1,) * gradient.ndim] = value
        return self.precision.step(**options)

    def everything(self):
        state = self.optimizer.state_dict()["state"]
        held = [(k, v) for entry in state.values() for k, v in entry.items()]
        masters = dict(self.precision.masters.items())
        return [*self.model.state_dict().items(), *held, *masters.items()]


def users_hook(*_):
    """A hook of the user's, which runs before each step that is applied."""


def alike(ours, theirs):
    for (name, a), (other, b) in zip(ours.everything(), theirs.everything(), strict=True):
        assert name == other
        assert same(a, b), name


def told_alike(a, b):
    """The norm alone is summed in another precision on the host: 4 tensors, fp32."""
    assert math.isclose(a.grad_norm, b.grad_norm, rel_tol=1e-6) or not a.applied
    for field in StepResult.__slots__:
        if field != "grad_norm":
            assert getattr(a, field) == getattr(b, field), (field, a, b)


def against_the_host(kind_name):
    """Good steps, infinities and NaN, micro-batches and schedules, in every way to keep weights."""
    for policy in POLICIES if kind_name == "adamw" else POLICIES[1:5:2]:
        ours, theirs = Run(policy, KINDS[kind_name]), Run(policy, KINDS[kind_name], host=True)
        generator, results = torch.Generator().manual_seed(7), []
        for number in range(8):
            fault, draw = None, int(torch.randint(5, (), generator=generator))
            if "dynamic" in policy and number and draw < 3:
                names = ("first", "turned", "gain", "shift")
                value = (math.inf, math.nan, -math.inf)[draw]
                fault = names[int(torch.randint(4, (), generator=generator))], value
            for run in (ours, theirs):
                if number == 6:
                    for group in run.optimizer.param_groups:
                        group["lr"] *= 0.5
                micro = 1 + number % 2
                # large enough to leave the gradients as they are, so that bits can be compared
                results.append(run.step(number, fault, micro, max_norm=1e6))
            if number % 3 == 2:  # otherwise the host learns of it at the next step
                alike(ours, theirs)
        for a, b in zip(results[::2], results[1::2], strict=True):
            told_alike(a, b)
        assert results[-1].skipped_total == ours.precision.progress.skipped_total
        assert ("dynamic" in policy) is (ours.precision.progress.skipped_total > 0)
        assert ours.precision.state_dict().keys() == theirs.precision.state_dict().keys()
        alike(ours, theirs)


def many_tiles():
    """A decided step of many tiles and a rest is the host's."""
    ours, theirs = (nn.Parameter(torch.ones(3 * 8192 + 5)) for _ in range(2))
    device, host = (SGD([p], lr=0.1, moments="fp32", momentum=0.9) for p in (ours, theirs))
    ours.grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0))
    theirs.grad = ours.grad.clone()
    decided = decide_by_torch(torch.tensor(0.0), {ours: ours.grad}, None)
    device.step(gradients={ours: ours.grad}, multiplier=decided)
    host.step()
    assert same(ours.detach(), theirs.detach())


def changes_between_steps():
    """Loaded states, other gradients, parts of tensors, and moments that fall back."""
    runs = Run(f"fp16-mixed,{SCALED}"), Run(f"fp16-mixed,{SCALED}", host=True)
    for run in runs:
        run.step(0)
        saved = copy.deepcopy((run.optimizer.state_dict(), run.precision.state_dict()))
        weights = copy.deepcopy(run.model.state_dict())
        run.step(1)
        run.step(2, ("gain", math.inf))
        run.optimizer.load_state_dict(saved[0])
        run.precision.load_state_dict(saved[1])
        run.model.load_state_dict(weights)
        run.model.gain.requires_grad_(False)
        run.step(3)
        run.model.gain.requires_grad_(True)
        run.precision.loss_scale.load_state_dict(
            {"value": 1.0, "good_steps": 1, "hysteresis_left": 1}
        )
        assert run.step(4).loss_scale == 1.0
        with torch.no_grad():
            run.model.first.zero_()
        told = run.step(5)
        run.step(6)
        assert run.precision.loss_scale.value > 1
    told_alike(told, told)
    alike(*runs)
    steps = [float(s["step"]) for s in runs[0].optimizer.state_dict()["state"].values()]
    assert steps == [5, 5, 4, 5]

    # 8-bit moments are compared with their gradients in step 8 of each tensor, once it is applied
    for policy in (f"bf16-split,moments=8bit,{SCALED}",):
        told = []
        for host in (False, True):
            run = Run(policy, host=host)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for number in range(11):
                    run.precision.backward((run.model.gain * torch.logspace(0, -12, 50)).sum())
                    if number == 7:
                        run.model.gain.grad[0] = math.inf
                    run.precision.step()
            assert any("spread over more than 8 bits" in str(w.message) for w in said)
            told.append((fallen_back(run.optimizer), run))
        assert told[0][0] == told[1][0] != ()
        alike(told[0][1], told[1][1])

    # a weight that is part of a larger tensor is stepped in a copy
    model = nn.Linear(4, 3)
    whole = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    pairs = []
    for host in (False, True):
        made = copy.deepcopy(model)
        made.weight.data = whole.clone()[:, ::2]
        optimizer = AdamW(made.parameters(), lr=0.1)
        if host:
            optimizer.register_step_pre_hook(users_hook)
        precision = Precision("fp32", made, optimizer)
        for _ in range(2):
            precision.step(made(torch.ones(2, 4)).square().mean())
        pairs.append(made)
    assert not pairs[0].weight.is_contiguous()
    for a, b in zip(*(made.parameters() for made in pairs), strict=True):
        assert same(a.detach(), b.detach())


def captures():
    """A step in a CUDA graph is refused: its replays would repeat constants and random bits."""
    tasks = make_tasks(LION, torch.float32, "fp32", "fp32", (3,), torch.Generator())
    plan = Plan(LION, LION.constants(OPTIONS["lion"], 1), "nearest", "fp32", 1.0, 0, 1)
    with mock.patch.object(cuda, "is_capturing", return_value=True):
        assert "inside a CUDA graph" in refused(lambda: cuda.run_cuda(Batch(tasks), plan))
