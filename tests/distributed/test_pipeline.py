"""A model in pipeline stages trains as in one process, under the schedules of torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn

import halfstep
from halfstep import ManyRanks, OneRank, Precision, PrecisionError, Stages

MICRO, STEPS = 4, 3
NAMES = "ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"
POLICIES = "fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split"


def layers(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)]


def loss_fn(output, target):
    return (output.float() - target).square().mean()


def precision_of(model, policy, ranks):
    kind = halfstep.optim.AdamW if "split" in policy else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    return Precision(policy, model, optimizer, ranks=ranks, on_nonfinite="skip:1")


def train(rank, name, policy):
    """Steps of a pipeline and of one process; in the last, a gradient of stage 0 is inf."""
    ranks, kind, schedule = dist.get_world_size(), getattr(pipelining, name), None
    count = 2 * ranks if "Interleaved" in name else ranks
    whole, mine = nn.Sequential(*layers(count)), layers(count)[rank::ranks]
    one = precision_of(whole, policy, OneRank())
    many = precision_of(nn.ModuleList(mine), policy, Stages(dist.group.WORLD))
    same = [q for i in range(rank, count, ranks) for q in whole[i].parameters()]
    cpu, numbers = torch.device("cpu"), range(rank, count, ranks)
    stages = [pipelining.PipelineStage(*one, count, cpu) for one in zip(mine, numbers, strict=True)]
    for step in range(STEPS):
        torch.manual_seed(step)
        inputs, target = torch.randn(2, 8, 16)
        for x, t in zip(inputs.chunk(MICRO), target.chunk(MICRO), strict=True):
            with one.autocast():
                loss = loss_fn(whole(x), t) / MICRO
            one.backward(loss)
        with many.scheduled(MICRO) as scaled:
            own = stages if count > ranks else stages[0]
            schedule = schedule or kind(own, MICRO, loss_fn=scaled(loss_fn))
            schedule.step(*[inputs] * (rank == 0), target=target if rank == ranks - 1 else None)
        last = step == STEPS - 1
        if last and rank == 0:
            mine[0][0].bias.grad[1] = math.inf
        found, wanted = many.step(max_norm=0.5), one.step(max_norm=0.5)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
        if last:
            assert found.reason == "overflow"
            assert found.nonfinite_parameters == (("another stage",) if rank else ("0.0.bias",))
        else:
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
            for p, q in zip(many.model.parameters(), same, strict=True):
                assert torch.allclose(p, q, rtol=0, atol=1e-7)  # norms add up in another order


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.covering(ends=True)
def test_stages_train_as_one_process(pool2, name, policy):
    pool2.run(train, name=name, policy=policy)


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


def test_a_schedule_gets_losses_as_they_are_and_scales_gradients():
    seen = []
    for policy in ("fp32", "fp16-mixed"):
        torch.manual_seed(0)
        precision = precision_of(nn.Linear(2, 2), policy, None)
        with precision.scheduled(1) as loss:
            value = loss(loss_fn)(precision.model(torch.ones(1, 2)), torch.ones(1, 2))
            gradient = torch.autograd.grad(value, precision.model.bias, retain_graph=True)[0]
            value.backward()
        seen.append((value.item(), gradient[0] / precision.model.bias.grad[0]))
    (plain, one), (value, scale) = seen
    assert value == pytest.approx(plain, rel=1e-2)
    assert (one, scale) == (1, 2.0**16)


def refused(rank):
    precision = precision_of(nn.Linear(2, 2), "fp32", Stages(dist.group.WORLD))
    run(precision, scaled=False)
    with pytest.raises(PrecisionError, match="no stage computed a scaled loss"):
        precision.step()
    with pytest.raises(PrecisionError, match=r"scheduled\(2\): the loss was computed 1 times"):
        run(precision, micro_batches=2)
    precision.discard()
    used = run(precision) if rank else None
    with pytest.raises(PrecisionError, match="rank 0: .*without backward" if rank else "step"):
        precision.step()
    if rank:
        with pytest.raises(PrecisionError, match="run the schedule inside"):
            used(torch.ones(1), torch.ones(1))


def parted(rank):
    """One stage on two ranks, whose copies are no longer alike."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    alone = [dist.new_group([0]), dist.new_group([1])]
    stages = Stages(alone[rank], copies=ManyRanks("cpu"))
    precision = precision_of(model, "fp32", stages)
    with torch.no_grad():
        model.bias += rank
    try:
        precision.ranks.agree()
    except PrecisionError as error:
        return str(error)


def test_copies_of_a_stage_that_have_parted_are_told_when_asked(pool2):
    for text in pool2.run(parted):
        assert "rank 1 differs from rank 0 in bias" in text


def test_a_schedule_without_the_scaled_loss_is_refused_on_all_stages(pool2):
    pool2.run(refused)
