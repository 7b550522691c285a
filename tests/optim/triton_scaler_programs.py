"""DeviceScaler, for triton_programs.py: beside the host's scale and step, refusals, captures."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from triton_kernel_programs import OPTIONS, make_tasks, same

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.optim.kernels import cuda
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.on_device.buffer import Head, Row
from halfstep.optim.on_device.scaler import DeviceScaler
from halfstep.optim.optimizers import SGD, AdamW, Lion
from halfstep.optim.rules import LION
from halfstep.precision.scaling.loss_scale import LossScaleConfig, make_loss_scale


def refused(call):
    """What PrecisionError said, or nothing."""
    try:
        call()
    except PrecisionError as error:
        return str(error)
    return ""


def model_and_optimizer(kind, seed=0):
    """Three groups of different options, weights and moments."""
    generator = torch.Generator().manual_seed(seed)
    p = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in (
            ((3, 50), torch.bfloat16),
            ((7,), torch.float32),
            ((2, 70), torch.bfloat16),
            ((1,), torch.bfloat16),
        )
    ]
    groups = [
        {"params": p[:2], "update": "split", "moments": "8bit", "weight_decay": 0.1},
        {"params": p[2:3], "update": "stochastic", "moments": "bf16", "lr": 0.003},
        {"params": p[3:], "update": "kahan", "moments": "fp32"},
    ]
    return p, kind(groups, lr=0.01, seed=3)


def everything(parameters, optimizer):
    states = [optimizer.state[p] for p in parameters]
    return [
        *(p.detach() for p in parameters),
        *(v for state in states for k, v in state.items() if k != "step"),
    ]


def against_the_host(kind_name):
    """Random good steps, infinities and NaN, against DynamicLossScale and the host's step."""
    kind = {"adamw": AdamW, "sgd": SGD, "lion": Lion}[kind_name]
    config = LossScaleConfig(
        kind="dynamic", init_scale=256.0, growth_interval=2, hysteresis=2, max_scale=512.0
    )
    for seed in (0, 1) if kind is AdamW else (2,):
        ours, optimizer = model_and_optimizer(kind, seed)
        theirs, reference = model_and_optimizer(kind, seed)
        scaler, scale = DeviceScaler(config, optimizer), make_loss_scale(config)
        generator = torch.Generator().manual_seed(seed)
        skipped = in_a_row = 0
        for number in range(10):
            draw = int(torch.randint(6, (), generator=generator))
            fault = {0: math.inf, 1: math.nan, 2: -math.inf}.get(draw) if number else None
            max_norm = 0.5 if number % 3 == 2 else None
            if number == 6:  # a schedule
                for group in (*optimizer.param_groups, *reference.param_groups):
                    group["lr"] *= 0.5
            assert scaler.scale(torch.ones(())).item() == scale.value
            squares = 0.0
            for a, b in zip(ours, theirs, strict=True):
                a.grad = (torch.randn(a.shape, generator=generator) * scale.value).to(a.dtype)
                b.grad = a.grad.clone()
                squares += float(a.grad.double().square().sum())
            if fault is not None:
                victim = int(torch.randint(4, (), generator=generator))
                ours[victim].grad.view(-1)[-1] = fault
            gradients = [p.grad.clone() for p in ours]
            before = [t.clone() for t in everything(ours, optimizer)]
            scaler.step(max_norm)
            assert all(same(p.grad, g) for p, g in zip(ours, gradients, strict=True))
            result = scaler.result()
            buffer = scaler._buffer.tolist()
            assert result.loss_scale == scale.value
            assert result.loss == 1.0
            assert result.applied is (fault is None)
            if fault is None:
                in_a_row = 0
                norm = math.sqrt(squares) / scale.value
                # fp64 sums in another order
                assert math.isclose(result.grad_norm, norm, rel_tol=1e-12)
                clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
                multiplier = buffer[Head.MULTIPLIER]
                assert math.isclose(multiplier, clip / scale.value, rel_tol=1e-12)
                reference.step(multiplier=multiplier)
                for a, b in zip(
                    everything(ours, optimizer), everything(theirs, reference), strict=True
                ):
                    assert same(a, b), (number, a.dtype, a.shape)
                assert [float(optimizer.state[p]["step"]) for p in ours] == [
                    float(reference.state[p]["step"]) for p in theirs
                ]
            else:
                skipped, in_a_row = skipped + 1, in_a_row + 1
                assert result.reason == ("nan_gradients" if fault != fault else "overflow")
                assert result.nonfinite_parameters == (f"parameter {victim}",)
                assert not math.isfinite(result.grad_norm)
                after = everything(ours, optimizer)[: len(before)]
                assert all(same(a, b) for a, b in zip(before, after, strict=True))
            scale.update(found_nonfinite=fault is not None)
            assert result.next_loss_scale == scale.value
            assert (result.skipped_total, result.skipped_in_a_row) == (skipped, in_a_row)
            assert scaler.state_dict()["loss_scale"] == scale.state_dict()
        assert 0 < skipped < 10


def device_constants():
    """Every rule's constants against the host's doubles, up to a million steps."""
    for kind, options in (
        (AdamW, {"lr": 0.3}),
        (AdamW, {"betas": (0.0, 0.999999), "weight_decay": 0.0}),
        (SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
        (SGD, {"momentum": 0.9, "nesterov": True}),
        (SGD, {"momentum": 0.0, "dampening": 0.5}),
        (Lion, {"weight_decay": 0.1}),
    ):
        for step in (1, 2, 3, 10, 1000, 123456, 1000000):
            p = torch.nn.Parameter(torch.zeros(7))
            p.grad = torch.zeros_like(p)
            optimizer = kind([p], **options)
            moments = {name: torch.zeros(7) for name in optimizer.algorithm.moments}
            optimizer.state[p] = {"step": torch.tensor(step - 1.0), **moments}
            scaler = DeviceScaler(LossScaleConfig(), optimizer)
            scaler.step()
            row = scaler._buffer[Head.SIZE + Row.CONSTANTS :].tolist()
            group = optimizer.param_groups[0]
            betas = group.get("betas", (0.0,)) if kind is AdamW else (0.0,)
            for i, wanted in enumerate(optimizer.algorithm.constants(group, step)):
                # triton_decide.py: n beta^n / (1 - beta^n) 2^-51 < 2^-51 / (1 - beta), and a few
                # roundings of 2^-53
                bound = 2.0**-51 / (1 - max(betas)) + 2.0**-50
                assert math.isclose(row[i], wanted, rel_tol=bound), (kind, options, step, i)
                assert np.float32(row[i]) == np.float32(wanted)
            assert float(optimizer.state_dict()["state"][0]["step"]) == step


def huge_and_tiny():
    """Finite gradients whose squares leave fp32 are neither overflow nor 0."""
    for size, value in ((1, 1e30), (70000, 3e38), (1, 1e-30), (70000, 1e-44)):
        p, rest = (torch.nn.Parameter(torch.ones(n)) for n in (size, 3))
        optimizer = AdamW([p, rest], lr=0.1, moments="fp32")
        scaler = DeviceScaler(LossScaleConfig(kind="static", init_scale=2.0), optimizer)
        p.grad, rest.grad = torch.full((size,), value), torch.full((3,), value)
        scaler.step(max_norm=1.0)
        result = scaler.result()
        assert result.applied
        norm = float(p.grad[0].double()) * math.sqrt(size + 3) / 2
        assert math.isclose(result.grad_norm, norm, rel_tol=1e-12)  # fp64 sums
        assert p.isfinite().all()
        assert (p.detach() < 1).all() or value < 1e-7  # decayed at least, and moved but by 1e-44


def kinds_and_stops():
    """Static and no scale, the floor, the skip limit; what is raised, when, and only then."""

    def run(config, faults):
        p = torch.nn.Parameter(torch.ones(5))
        scaler = DeviceScaler(config, Lion([p], lr=0.1), names={p: "head.bias"})
        results, named = [], []
        for fault in faults:
            p.grad = torch.ones(5)
            if fault:
                p.grad[1], p.grad[2] = math.inf, math.nan
            scaler.step()
            try:
                results.append(scaler.result())
            except NonFiniteError as error:
                results.append(error.cause)
                named.append(error.parameters)
        assert set(named) <= {("head.bias",)}
        return results, scaler, p

    results, scaler, p = run(LossScaleConfig(), (False, True, False))
    assert results[1] == "gradients"
    assert [r.loss_scale for r in results[::2]] == [1.0, 1.0]
    assert scaler.state_dict() == {"loss_scale": {}, "skipped_total": 1, "skipped_in_a_row": 0}
    assert torch.allclose(p.detach(), torch.tensor(0.8))  # two steps of 0.1, one left out

    config = LossScaleConfig(kind="static", init_scale=4.0, max_consecutive_skips=2)
    results, scaler, _ = run(config, (True, False, True, True, True))
    assert results[0].reason == "overflow"
    assert results[1].loss_scale == results[2].next_loss_scale == 4.0
    assert results[3:] == ["skip_limit", "skip_limit"]
    assert scaler.state_dict()["loss_scale"] == {"value": 4.0}

    config = LossScaleConfig(kind="dynamic", init_scale=2.0, hysteresis=2)
    results, scaler, _ = run(config, (True, True, True, False))
    assert [r.next_loss_scale for r in results[:2]] == [2.0, 1.0]
    assert results[2] == "loss_scale_floor"
    assert results[3].applied
    state = scaler.state_dict()
    assert state["loss_scale"] == {"value": 1.0, "good_steps": 1, "hysteresis_left": -1}

    results, _, _ = run(LossScaleConfig(kind="dynamic", init_scale=1.0), (True, False))
    assert results[0] == "loss_scale_floor"  # with nothing left to tolerate, at once
    assert results[1].applied

    # growth refills the hysteresis, up to the ceiling
    config = LossScaleConfig(
        kind="dynamic", init_scale=8.0, max_scale=16.0, hysteresis=2, growth_interval=2
    )
    faults = (True, False, False, True, True, False, False, False, False, True)
    results, scaler, _ = run(config, faults)
    scale = make_loss_scale(config)
    for result, fault in zip(results, faults, strict=True):
        scale.update(found_nonfinite=fault)
        assert result.next_loss_scale == scale.value
    state = scaler.state_dict()
    assert state["loss_scale"] == scale.state_dict()

    other = DeviceScaler(config, scaler.optimizer)
    other.load_state_dict(state)
    assert other.state_dict() == state
    for broken in (
        {},
        {**state, "loss_scale": {"value": 3.0, "good_steps": 0, "hysteresis_left": 1}},
    ):
        assert refused(lambda broken=broken: other.load_state_dict(broken))
        assert other.state_dict() == state


def resume_and_changes():
    """A saved optimizer continues bit for bit; gradients may come, go and lie in another order."""
    ours, optimizer = model_and_optimizer(AdamW)
    theirs, reference = model_and_optimizer(AdamW)
    config = LossScaleConfig(kind="dynamic", init_scale=4.0)
    scaler = DeviceScaler(config, optimizer)
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            grad = torch.randn(a.shape, generator=generator).to(a.dtype) * 4
            a.grad, b.grad = grad.clone(), grad.clone()
            if grad.ndim == 2 and number % 2:
                a.grad = grad.t().contiguous().t()  # same numbers, strides of a transposed matrix
            if number == 2 and i == 1:
                a.grad = b.grad = None
        scaler.step()
        reference.step(multiplier=0.25)
        if number == 3:
            saved = copy.deepcopy((optimizer.state_dict(), scaler.state_dict()))
            fresh, optimizer = model_and_optimizer(AdamW)
            for a, b in zip(fresh, ours, strict=True):
                a.data.copy_(b.data)
            ours = fresh
            optimizer.load_state_dict(saved[0])
            scaler = DeviceScaler(config, optimizer)
            scaler.load_state_dict(saved[1])
        if number == 1:  # another scaler continues where this one is
            scaler = DeviceScaler(config, optimizer)
        if number == 4:  # an optimizer that is loaded under a running scaler
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for a, b in zip(everything(ours, optimizer), everything(theirs, reference), strict=True):
            assert same(a, b), number
    optimizer.state_dict()
    assert [float(optimizer.state[p]["step"]) for p in ours] == [6, 5, 6, 6]
    assert scaler.result().skipped_total == 0


def refusals():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    scaler = DeviceScaler(LossScaleConfig(), AdamW([p]))
    assert "gradient" in refused(scaler.step)
    assert "before the first step" in refused(scaler.result)
    p.grad = torch.ones_like(p)
    assert "update='split'" in refused(scaler.step)
    looking = LossScaleConfig(kind="dynamic", calibrate=True)
    assert "init_scale=auto" in refused(lambda: DeviceScaler(looking, AdamW([p])))
    elsewhere = torch.nn.Parameter(torch.ones(3, device="meta"))
    assert "one CUDA device" in refused(
        lambda: DeviceScaler(LossScaleConfig(), AdamW([p, elsewhere]))
    )


def captures():
    """The host's side of a CUDA graph capture, which is_capturing alone tells of."""
    p = torch.nn.Parameter(torch.ones(200))
    q = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([p, q], lr=0.1, moments="fp32")
    scaler = DeviceScaler(LossScaleConfig(), optimizer)
    on_the_way = cuda.is_capturing

    alive = []

    def elsewhere():  # as in the memory of a graph: at an address that was never seen
        alive.append(torch.ones(200))
        return alive[-1]

    p.grad = elsewhere()
    try:
        cuda.is_capturing = lambda device: True
        assert refused(scaler.step)
        tasks = make_tasks(LION, torch.float32, "fp32", "fp32", (3,), torch.Generator())
        plan = Plan(LION, LION.constants(OPTIONS["lion"], 1), "nearest", "fp32", 1.0, 0, 1)
        assert refused(lambda: cuda.run_cuda(tasks, plan))
        cuda.is_capturing = on_the_way
        scaler.step()
        for _ in range(2):
            tables = [pair[1] for pair in scaler._bundle._tables._held.values()]
            cuda.is_capturing = lambda device: True
            p.grad = elsewhere()
            scaler.step()
            scaler.step()
            assert all(scaler._bundle.table is not table for table in tables)
            kept = scaler._bundle.table
            p.grad = elsewhere()
            assert refused(scaler.step)  # there is one spare, as a capture takes one step
            p.grad = None
            cuda.is_capturing = on_the_way
            for _ in range(9):  # more than are kept
                p.grad = elsewhere()
                scaler.step()
            assert any(pair[1] is kept for pair in scaler._bundle._tables._captured)
        optimizer.param_groups[0]["lr"] = 0.2
        cuda.is_capturing = lambda device: True
        assert refused(scaler.step)
        cuda.is_capturing = on_the_way
        scaler.write_options()
        cuda.is_capturing = lambda device: True
        scaler.step()
        cuda.is_capturing = on_the_way
        q.grad = torch.ones(3)
        assert refused(scaler.step)  # a graph holds the launches of p alone
        q.grad = None
        scaler.step()
    finally:
        cuda.is_capturing = on_the_way
    assert scaler.result().applied
    assert float(optimizer.state[p]["step"]) == 1 + 2 * (2 + 9) + 2
