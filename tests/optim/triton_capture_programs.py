"""What DeviceScaler refuses, and its part in a CUDA graph capture, for triton_programs.py."""

from __future__ import annotations

import torch
from triton_kernel_programs import OPTIONS, make_tasks
from triton_scaler_programs import refused

from halfstep.optim.kernels import cuda
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.on_device.scaler import DeviceScaler
from halfstep.optim.optimizers import AdamW
from halfstep.optim.rules import LION
from halfstep.precision.scaling.loss_scale import LossScaleConfig


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
        assert refused(lambda: cuda.run(tasks, plan))
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
            for _ in range(20):
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
    assert float(optimizer.state[p]["step"]) == 1 + 2 * (2 + 20) + 2
