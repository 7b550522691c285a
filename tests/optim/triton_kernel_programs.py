"""The update kernels, for triton_programs.py: bit by bit, and against fp64 AdamW."""

from __future__ import annotations

import copy
import itertools
import math

import torch

from halfstep.optim.kernels import cuda, reference
from halfstep.optim.kernels.reference import Plan, run_torch
from halfstep.optim.moments import zeros
from halfstep.optim.rules import ADAMW, DIRECTED, LION, SET, SGD as SGD_RULE
from halfstep.optim.state import Batch, StepTask
from halfstep.precision.masters.rounding import ROUNDING

OPTIONS = {
    "adamw": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-8},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "nesterov": False},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "directed": {"lr": 1e-3, "weight_decay": 0.1},
}
RULES = (ADAMW, SGD_RULE, LION)  # of optimizers whose whole step can be taken on the device
KERNELS = (*RULES, DIRECTED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = ("fp32", "bf16", "8bit")
UPDATES = ("fp32", *ROUNDING)


def make_tasks(rule, gradient, moments, update, sizes, generator):
    tasks = []
    for i, n in enumerate(sizes):
        weight = torch.randn(n, generator=generator)
        remainder = None if update == "fp32" else ROUNDING[update].remainder_dtype
        held = [zeros(weight, moments) for _ in rule.moments]
        tasks.append(
            StepTask(
                weight if update == "fp32" else weight.bfloat16(),
                None if remainder is None else torch.zeros(n, dtype=remainder),
                tuple(values for values, _ in held),
                tuple(tops for _, tops in held),
                torch.empty(n, dtype=gradient),
                3 * i,
            )
        )
    return tasks


def tensors(task):
    found = [task.weight, *task.moments, *task.tops]
    return found if task.remainder is None else [*found, task.remainder]


def same(a, b):
    """Bit by bit; which bits a NaN has is left open."""
    if a.is_floating_point():
        a, b = (torch.where(x.isnan(), math.nan, x) for x in (a, b))
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def spread(n, generator):
    """Numbers of many binades, some of them 0."""
    values = torch.randn(n, generator=generator) * (6 * torch.randn(n, generator=generator)).exp()
    return values.clamp(-1e4, 1e4) * (torch.rand(n, generator=generator) > 0.05)


def bits_of_every_pair(rule_name):
    """Any two of gradient, moments and update meet under each rule, and any three under one."""
    rule = next(rule for rule in KERNELS if rule.name == rule_name)
    shift = KERNELS.index(rule)
    for number, (moments, update) in enumerate(itertools.product(MOMENTS, UPDATES)):
        gradient = DTYPES[(number + number // 6 + shift) % 3]
        generator = torch.Generator().manual_seed(0)
        # a block or a neighbour of it (each way meets all three), a full program and a rest
        sizes = (1, 127 + (number // 6 + shift) % 3, 1100)
        ours = make_tasks(rule, gradient, moments, update, sizes, generator)
        theirs = copy.deepcopy(ours)
        for step in (1, 2):
            for a, b in zip(ours, theirs, strict=True):
                n = b.gradient.numel()
                # every block of 128 has a top of its own
                b.gradient.copy_(spread(n, generator) * 0.5 ** (torch.arange(n) // 128))
                if step == 2:  # from a state that is not 0
                    for x, y in zip(
                        (*tensors(a), a.gradient), (*tensors(b), b.gradient), strict=True
                    ):
                        x.copy_(y)
            how = "nearest" if update == "fp32" else update
            plan = Plan(
                rule, rule.constants(OPTIONS[rule.name], step), how, moments, 0.37, -5, step
            )
            run_torch(Batch(theirs), plan)
        cuda.run_cuda(Batch(ours), plan)
        for a, b in zip(ours, theirs, strict=True):
            for x, y in zip(tensors(a), tensors(b), strict=True):
                assert same(x, y), (rule.name, gradient, moments, update, x.numel(), x.dtype)


def extremes():
    """Infinite, subnormal and huge masters and moments; SGD with nesterov."""
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.17e-38, 3.4e38, -3.4e38, math.inf, 1e-20])
    # moments and masters are encoded by themselves: each way of either, not each pair
    for moments, update in zip(itertools.cycle(MOMENTS), UPDATES, strict=False):
        generator = torch.Generator().manual_seed(1)
        tasks = make_tasks(SGD_RULE, torch.float32, moments, update, (128, 9), generator)
        theirs = copy.deepcopy(tasks)
        group = {**OPTIONS["sgd"], "dampening": 0.0, "nesterov": True}
        for step in (1, 2):
            for a, b in zip(tasks, theirs, strict=True):
                a.gradient.copy_(values.repeat(15)[: a.gradient.numel()])
                b.gradient.copy_(a.gradient)
                if step == 2:  # weights that somebody has written beside older remainders
                    a.weight[::2] = b.weight[::2] = 0.0
            constants = SGD_RULE.constants(group, step)
            how = "nearest" if update == "fp32" else update
            plan = Plan(SGD_RULE, constants, how, moments, 1.0, 1 << 40, step)
            cuda.run_cuda(Batch(tasks), plan)
            run_torch(Batch(theirs), plan)
            for a, b in zip(tasks, theirs, strict=True):
                for x, y in zip(tensors(a), tensors(b), strict=True):
                    assert same(x, y), (moments, update, x.dtype, step)


def masters():
    """Masters read and written, by one launch for all tensors."""
    generator = torch.Generator().manual_seed(2)
    for update in UPDATES:
        tasks = make_tasks(SET, torch.bfloat16, "fp32", update, (1, 129, 8192, 8300), generator)
        how, theirs = "nearest" if update == "fp32" else update, copy.deepcopy(tasks)
        values = [spread(t.weight.numel(), generator) for t in tasks]
        values[-1][:3] = torch.tensor([math.nan, math.inf, -0.0])
        for some, run in ((tasks, cuda.run_cuda), (theirs, run_torch)):
            for task, value in zip(some, values, strict=True):
                task.gradient = value
            run(Batch(some), Plan(SET, (), how, "fp32", 1.0, -5, 0))
        read = [[torch.empty_like(v) for v in values] for _ in range(2)]
        cuda.read_masters(Batch(tasks), read[0], how)
        reference.read_masters(Batch(theirs), read[1], how)
        for a, b, x, y in zip(tasks, theirs, *read, strict=True):
            assert same(x, y), (update, x.numel())
            assert all(same(v, w) for v, w in zip(tensors(a), tensors(b), strict=True))
