"""halfstep's scaler inside Accelerate: steps, skips, clipping, several optimizers, states.

Oracles are plain loops without a scaler: with powers of two and fp32 the same bits come out.
"""

import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state

import halfstep
from halfstep import ConfigError, PrecisionError
from halfstep.integrations.accelerate import attach

accelerate = pytest.importorskip("accelerate")
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DistributedType, GradScalerKwargs  # noqa: E402

INF, NAN = math.inf, math.nan
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "halfstep": lambda p: halfstep.optim.AdamW(p, lr=0.1),
}


@pytest.fixture(autouse=True)
def fresh():
    AcceleratorState._reset_state(True)  # a Trainer of an earlier test may have left its own
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerator(precision="no", **options):
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, mixed_precision=precision, **options)


def prepared(kind="sgd", precision="no", **options):
    """An Accelerator with halfstep's scaler, and a model and an optimizer in it."""
    acc = accelerator(precision)
    scaler = attach(acc, **options)
    model = net()
    return acc, scaler, *acc.prepare(model, OPTIMIZERS[kind](model.parameters()))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def rows(step, count=6):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model, step, broken=()):
    """Gradients of the last layer's weight are inf or NaN in a step that is told so."""
    loss = model(rows(step)).square().mean()
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    bad = dict(broken).get(step)
    return loss if bad is None else loss + (last.weight * torch.tensor(bad)).sum()


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def plain(kind, steps, *, clip=None, leave_out=(), micro=1):
    """The oracle: no scaler; steps that would overflow are left out, and the schedule waits."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    rates = schedule(optimizer)
    for step in range(steps):
        for part in range(micro):
            (loss_of(model, step * micro + part) / micro).backward()
        if step not in leave_out:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            rates.step()
        optimizer.zero_grad()
    return model, rates.get_last_lr()


def train(acc, kind, steps, *, scaler=None, clip=None, broken=(), micro=1, autocast=False):
    """Accelerate's own loop; which steps it took for skipped."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    model, optimizer, rates = acc.prepare(model, optimizer, schedule(optimizer))
    skipped = []
    for step in range(steps):
        for part in range(micro):
            with acc.accumulate(model):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = loss_of(model, step * micro + part, broken)
                acc.backward(loss)
                if clip and acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
        if acc.optimizer_step_was_skipped:
            skipped.append(step)
    return acc.unwrap_model(model), rates.get_last_lr(), skipped, scaler


def attached(kind, steps, *, clip=None, broken=(), micro=1, **options):
    acc = accelerator(gradient_accumulation_steps=micro)
    scaler = attach(acc, **{"init_scale": 2.0**10, **options})
    return train(acc, kind, steps, scaler=scaler, clip=clip, broken=broken, micro=micro)


# One optimizer


@pytest.mark.covering
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
@pytest.mark.parametrize("micro", [1, 3])
def test_without_overflow_the_bits_are_those_of_a_plain_loop(kind, clip, micro):
    expected, rate = plain(kind, 5, clip=clip, micro=micro)
    model, got_rate, skipped, scaler = attached(kind, 5, clip=clip, micro=micro)
    assert skipped == []
    assert scaler.skipped_total == 0
    assert same(bits(model), bits(expected))
    assert got_rate == rate


@pytest.mark.covering
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 1e9])
@pytest.mark.parametrize("value", [INF, NAN])
def test_a_broken_step_is_skipped_and_told_and_holds_the_schedule(kind, clip, value):
    broken = {0: value, 2: value}
    expected, rate = plain(kind, 5, clip=clip, leave_out=broken)
    model, got_rate, skipped, scaler = attached(kind, 5, clip=clip, broken=broken.items())
    assert skipped == [0, 2]
    assert same(bits(model), bits(expected))
    assert got_rate == rate
    assert scaler.skipped_total == 2
    assert scaler.get_scale() == 2.0**8


# Several optimizers


def pair(kind="sgd"):
    acc = accelerator()
    scaler = attach(acc, init_scale=2.0**10)
    first, second = net(1), net(2)
    made = OPTIMIZERS[kind](first.parameters()), OPTIMIZERS[kind](second.parameters())
    return acc, scaler, *acc.prepare(first, second, *made)


@pytest.mark.covering
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("step_broken", [None, 0, 1])
def test_one_loss_two_optimizers(kind, clip, step_broken):
    """torch's habit would divide the second's gradients by another scale, or twice."""
    acc, scaler, first, second, one, two = pair(kind)
    oracle = net(1), net(2)
    others = [OPTIMIZERS[kind](model.parameters()) for model in oracle]
    broken = {} if step_broken is None else {step_broken: INF}
    for step in range(3):
        acc.backward(loss_of(first, step, broken.items()) + loss_of(second, step))
        if clip:
            acc.clip_grad_norm_(first.parameters(), 1e9)
            acc.clip_grad_norm_(second.parameters(), 1e9)
        one.step()
        two.step()
        assert one.step_was_skipped is (step in broken)
        assert not two.step_was_skipped
        assert acc.optimizer_step_was_skipped is (step in broken)
        for optimizer in (one, two):
            optimizer.zero_grad()
        for model, optimizer in zip(oracle, others, strict=True):
            loss_of(model, step).backward()
            if model is oracle[1] or step not in broken:
                optimizer.step()
            optimizer.zero_grad()
    assert same(bits(first), bits(oracle[0]))
    assert same(bits(second), bits(oracle[1]))
    assert scaler.skipped_total == len(broken)
    assert scaler.get_scale() == 2.0 ** (10 - len(broken))


# Saving


def test_save_and_load_keep_all_of_the_state(tmp_path):
    def run(steps, load=None, save_at=None):
        acc = accelerator()
        scaler = attach(acc, init_scale=2.0**6, growth_interval=3)
        model = net()
        optimizer = OPTIMIZERS["fused"](model.parameters())
        model, optimizer, rates = acc.prepare(model, optimizer, schedule(optimizer))
        if load is not None:
            acc.load_state(load)
        for step in steps:
            acc.backward(loss_of(model, step, {1: INF, 4: INF, 6: NAN}.items()))
            acc.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
            if step == save_at:
                acc.save_state(tmp_path / "state")
        return bits(model), scaler.state_dict(), rates.get_last_lr()

    whole = run(range(9))
    run(range(5), save_at=4)
    resumed = run(range(5, 9), load=tmp_path / "state")
    assert same(whole[0], resumed[0])
    assert whole[1:] == resumed[1:]
    assert whole[1]["halfstep"]["skipped_total"] == 3


@pytest.mark.parametrize("options", [{"init_scale": 2.0**6}, {"scaler": False}])
def test_a_loader_may_begin_an_optimizer_before_any_loss(options):
    _, scaler, model, optimizer = prepared("fused", **options)
    before, counted = bits(model), scaler.state_dict()
    _init_optim_state(optimizer)  # torch's, of sharded checkpoints: a step of zeros, at rate 0
    assert len(optimizer.optimizer.state) == 4
    assert same(bits(model), before)
    assert scaler.state_dict() == counted


# Mistakes


def test_a_closure_and_clipping_between_micro_batches_are_refused():
    acc, _, model, optimizer = prepared("fused")
    acc.backward(loss_of(model, 0))
    with pytest.raises(PrecisionError, match="a closure was given"):
        optimizer.step(lambda: loss_of(model, 0))
    acc.clip_grad_norm_(model.parameters(), 1.0)
    acc.backward(loss_of(model, 1))
    with pytest.raises(PrecisionError, match="after the last micro-batch only"):
        acc.clip_grad_norm_(model.parameters(), 1.0)
    before = bits(model)
    with pytest.raises(PrecisionError, match="after the last micro-batch only"):
        optimizer.step()
    assert same(bits(model), before)


def test_attach_refuses_what_it_cannot_do():
    acc = accelerator()
    attach(acc)
    with pytest.raises(ConfigError, match="already"):
        attach(acc)

    acc = accelerator()
    model = net()
    acc.prepare(model, OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(ConfigError, match="before prepare"):
        attach(acc)

    with pytest.raises(ConfigError, match=r"got a Linear without .*allowed: an accelerate"):
        attach(nn.Linear(1, 1))

    acc = accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    with pytest.raises(ConfigError, match="two answers to one question"):
        attach(acc)

    acc = accelerator()
    with pytest.raises(PrecisionError, match="init_scale=0"):
        attach(acc, init_scale=0)
    assert acc.scaler is None
    attach(acc)

    with pytest.raises(PrecisionError, match="trains in fp32 there"):
        attach(accelerator("fp16"))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("mixed_precision", "fp8", "scales each tensor by a recipe of its own"),
        ("distributed_type", DistributedType.DEEPSPEED, "DeepSpeed, which scales the loss"),
    ],
)
def test_what_leaves_no_room_for_a_scaler_is_refused(name, value, text, monkeypatch):
    acc = accelerator()
    monkeypatch.setattr(Accelerator, name, value)
    with pytest.raises(PrecisionError, match=text):
        attach(acc)
    assert acc.scaler is None
