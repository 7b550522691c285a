"""A model in pipeline stages trains as in one process, under the schedules of torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn

import halfstep
from halfstep import OneRank, Precision, PrecisionError, Stages

MICRO = 4


def layers(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)]


def loss_fn(output, target):
    return (output.float() - target).square().mean()


def precision_of(model, policy, ranks):
    own = "split" in policy
    kind = halfstep.optim.AdamW if own else torch.optim.AdamW
    return Precision(
        policy, model, kind(model.parameters(), lr=1e-2), ranks=ranks, on_nonfinite="skip:1"
    )


def train(rank, name, policy, steps=3):
    """Steps of a pipeline and of one process; then one with an inf in a gradient of stage 0."""
    ranks = dist.get_world_size()
    count = 2 * ranks if "Interleaved" in name else ranks
    whole, mine = nn.Sequential(*layers(count)), layers(count)[rank::ranks]
    one = precision_of(whole, policy, OneRank())
    many = precision_of(nn.ModuleList(mine), policy, Stages(dist.group.WORLD))
    kind, schedule = getattr(pipelining, name), None
    stages = [
        pipelining.PipelineStage(m, rank + i * ranks, count, torch.device("cpu"))
        for i, m in enumerate(mine)
    ]
    for step in range(steps):
        torch.manual_seed(step)
        inputs, target = torch.randn(2, 8, 16)
        for x, t in zip(inputs.chunk(MICRO), target.chunk(MICRO), strict=True):
            with one.autocast():
                loss = loss_fn(whole(x), t) / MICRO
            one.backward(loss)
        with many.scheduled(MICRO) as scaled:
            schedule = schedule or kind(
                stages if count > ranks else stages[0], MICRO, loss_fn=scaled(loss_fn)
            )
            schedule.step(*[inputs] * (rank == 0), target=target if rank == ranks - 1 else None)
        last = step == steps - 1
        if last and rank == 0:
            mine[0][0].bias.grad[1] = math.inf
        found, wanted = many.step(max_norm=0.5), one.step(max_norm=0.5)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
        if last:
            names = found.nonfinite_parameters
            assert (found.reason, names) == (
                "overflow",
                ("0.0.bias",) if rank == 0 else ("stage 0",),
            )
        else:
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
            for i, module in enumerate(mine):
                for p, q in zip(
                    module.parameters(), whole[rank + i * ranks].parameters(), strict=True
                ):
                    assert torch.allclose(p, q, rtol=0, atol=1e-7)  # adding up in another order


NAMES = "ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"
POLICIES = "fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split"


@pytest.mark.parametrize(("name", "policy"), [(NAMES[1], "fp16-mixed"), *(
    pytest.param(name, policy, marks=pytest.mark.slow) for name in NAMES for policy in POLICIES
)])  # fmt: skip
def test_stages_train_as_one_process(pool2, name, policy):
    pool2.run(train, name=name, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_stages_train_as_one_process(pool4, name):
    for policy in POLICIES:
        pool4.run(train, name=name, policy=policy)


def run(precision, scaled=True, micro_batches=1):
    """A schedule of one micro-batch, whose loss function may not be scaled."""
    with precision.scheduled(micro_batches) as loss:
        used = loss(loss_fn) if scaled else loss_fn
        used(precision.model(torch.ones(1, 2)), torch.ones(1, 2)).backward()
    return used


def refused(rank):
    precision = precision_of(nn.Linear(2, 2), "fp32", Stages(dist.group.WORLD))
    run(precision, scaled=False)
    with pytest.raises(PrecisionError, match="no stage computed a scaled loss"):
        precision.step()
    with pytest.raises(PrecisionError, match=r"scheduled\(2\): the loss was computed 1 times"):
        run(precision, micro_batches=2)
    precision.discard()
    used = run(precision) if rank else None
    with pytest.raises(PrecisionError, match="1 of 2 pipeline stages" if rank else "backward"):
        precision.step()
    if rank:
        with pytest.raises(PrecisionError, match="run the schedule inside"):
            used(torch.ones(1), torch.ones(1))


def test_a_schedule_without_the_scaled_loss_is_refused_on_all_stages(pool2):
    pool2.run(refused)
