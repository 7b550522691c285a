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
from torch.optim.optimizer import register_optimizer_step_post_hook
from triton_kernel_programs import OPTIONS, make_tasks, same

from halfstep.errors import NonFiniteError, PrecisionError
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


def steps_of(optimizer, loss=0.0, max_norm=None):
    """One step on the device by hand; what it decided."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = {p: p.grad for p in every if p.grad is not None}
    decided = decide_by_torch(torch.tensor(loss), gradients, max_norm)
    optimizer.step(gradients=gradients, multiplier=decided)
    return decided, decided.read()


def huge_and_tiny():
    """Finite gradients whose squares leave fp32 are neither overflow nor 0; the clip is exact."""
    for size, value in ((1, 1e30), (70000, 3e38), (1, 1e-30), (70000, 1e-44)):
        p, rest = (nn.Parameter(torch.ones(n)) for n in (size, 3))
        optimizer = AdamW([p, rest], lr=0.1, moments="fp32")
        p.grad, rest.grad = torch.full((size,), value), torch.full((3,), value)
        decided, decision = steps_of(optimizer, max_norm=0.1)
        assert not decision.nonfinite
        norm = float(p.grad[0].double()) * math.sqrt(size + 3)
        assert math.isclose(decision.norm, norm, rel_tol=8 * 2.0**-24)
        # 0.1 is no fp32 number, in which Triton passes numbers to kernels
        clip = min(1.0, 0.1 / (decision.norm + 1e-6))
        assert math.isclose(float(decided.multiplier), clip, rel_tol=2.0**-52)
        assert p.isfinite().all()
        assert (p.detach() < 1).all() or value < 1e-7  # decayed at least, and moved but by 1e-44
    # many tiles and a rest
    ours, theirs = (nn.Parameter(torch.ones(3 * 8192 + 5)) for _ in range(2))
    device, host = (SGD([p], lr=0.1, moments="fp32", momentum=0.9) for p in (ours, theirs))
    ours.grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0))
    theirs.grad = ours.grad.clone()
    steps_of(device)
    host.step()
    assert same(ours.detach(), theirs.detach())


def learned_later():
    """A step's error comes with its result, the next step, a saved state, a count, or close()."""
    ways = {
        "result": lambda run, result: result.applied,
        "again": lambda run, result: (refused(lambda: result.loss, NonFiniteError), result.loss),
        "next step": lambda run, result: run.step(2),
        "count": lambda run, result: run.precision.progress.skipped_total,
        "scale": lambda run, result: run.precision.loss_scale,
        "optimizer": lambda run, result: run.optimizer.state_dict(),
        "load": lambda run, result: run.optimizer.load_state_dict({}),
        "state": lambda run, result: run.precision.state_dict(),
        "close": lambda run, result: run.precision.close(),
    }
    for way, learn in ways.items():
        run = Run("bf16-split")
        assert run.step(0).applied
        before = [t.clone() for _, t in run.everything()]
        result = run.step(1, ("gain", math.nan))
        said = refused(
            lambda run=run, result=result, learn=learn: learn(run, result), NonFiniteError
        )
        assert "NaN in the gradients of gain under a finite loss" in said, (way, said)
        if way == "close":
            continue
        assert all(same(a, b) for a, (_, b) in zip(before, run.everything(), strict=True))
        assert all(p.grad is None for p in run.model.parameters())
        assert run.precision.progress.skipped_total == 1  # it was told once
        assert run.step(3).applied
        assert run.precision.progress.applied_total == 2
    run = Run("bf16-split")
    run.model.shift.data.fill_(math.nan)
    result = run.step(0)
    assert "the weights shift are not finite" in refused(lambda: result.loss, NonFiniteError)
    assert run.optimizer.state_dict()["state"][0]["step"] == 0


def stops_and_guards():
    """The floor, the skip limit, skips and averages, as on the host."""
    small = "fp16-mixed,scale=dynamic,init_scale=2,hysteresis=2"
    few = "fp16-mixed,scale=static,init_scale=4,max_consecutive_skips=2"
    bad = {n: ("first", math.inf) for n in (1, 2, 3)}
    cases = (
        (small, {}, "loss_scale_floor"),
        (few, {}, "skip_limit"),
        (small, {"on_nonfinite": "skip:2"}, ""),
        ("bf16-split", {}, "gradients"),
    )
    for policy, given, cause in cases:
        told = []
        for host in (False, True):
            run, causes = Run(policy, host=host, **given), []
            for number in range(6):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a guard's, said once
                    try:
                        causes.append(run.step(number, bad.get(number)).applied)
                    except NonFiniteError as error:
                        causes.append((error.cause, error.parameters))
            told.append((causes, run.precision.state_dict()["loss_scale"], run.everything()))
        assert told[0][:2] == told[1][:2], (policy, told[0][:2], told[1][:2])
        assert not cause or (cause, ("first",)) in told[0][0]
        for (name, a), (_, b) in zip(told[0][2], told[1][2], strict=True):
            assert same(a, b), (policy, name)

    # a hook on every optimizer must not run on a skipped step either
    calls, run = [], Run(f"fp16-mixed,{SCALED}")
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        applied = [run.step(number, bad.get(number)).applied for number in range(5)]
    finally:
        handle.remove()
    assert applied == [True, False, False, False, True]
    assert len(calls) == 2


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
