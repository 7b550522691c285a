"""Accelerate in bf16, and with an autocast of one's own: no scale, the same bits, nothing unseen.

Oracles are Accelerate's own loops without attach.
"""

import math

import pytest
import torch

from halfstep import NonFiniteError, PrecisionError
from halfstep.integrations.accelerate import attach

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from integrations.test_accelerate import (  # noqa: F401 - the fixture resets Accelerate
    OPTIMIZERS,
    accelerator,
    bits,
    fresh,
    loss_of,
    net,
    prepared,
    rows,
    same,
    schedule,
    train,
)

INF, NAN = math.inf, math.nan


def train_bf16(kind, steps, *, ours=True, own=False, micro=1, clip=None, broken=(), **options):
    """A loop in bf16, by Accelerate's autocast or by hand."""
    acc = accelerator("no" if own else "bf16", gradient_accumulation_steps=micro)
    if own:
        options["scaler"] = False
    scaler = attach(acc, **options) if ours else None
    loop = {"clip": clip, "broken": broken, "micro": micro, "autocast": own}
    return train(acc, kind, steps, scaler=scaler, **loop)


@pytest.mark.covering
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("own", [False, True])
def test_where_nothing_is_broken_the_bits_are_accelerates(kind, clip, micro, own):
    theirs = train_bf16(kind, 4, ours=False, clip=clip, micro=micro, own=own)
    model, rate, skipped, scaler = train_bf16(kind, 4, clip=clip, micro=micro, own=own)
    assert same(bits(model), bits(theirs[0]))
    assert (rate, skipped) == (theirs[1], [])
    result = scaler.last_step
    assert (result.applied, result.loss_scale, result.next_loss_scale) == (True, 1.0, 1.0)
    assert scaler.skipped_total == 0


@pytest.mark.covering
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 1e9])
@pytest.mark.parametrize("value", [INF, NAN])
def test_broken_gradients_stop_the_run_with_their_names(kind, clip, value):
    """Of a finite loss: through a hook."""
    acc, scaler, model, optimizer = prepared(kind, "bf16")
    acc.unwrap_model(model)[2].weight.register_hook(lambda g: g * value)
    before = bits(model)
    acc.backward(loss_of(model, 0))
    if clip:
        acc.clip_grad_norm_(model.parameters(), clip)
    with pytest.raises(NonFiniteError, match=r"in the gradients of 2\.weight under a finite") as c:
        optimizer.step()
    assert (c.value.cause, c.value.parameters) == ("gradients", ("2.weight",))
    assert same(bits(model), before)
    result = scaler.last_step
    assert (result.applied, result.next_loss_scale) == (False, 1.0)
    assert result.reason == ("overflow" if value == INF else "nan_gradients")


class Finite(torch.autograd.Function):
    """A loss that is not finite, with gradients that are."""

    @staticmethod
    def forward(ctx, loss, value):
        return loss * value

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["sgd", "fused", "halfstep"])
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_broken_loss_of_any_micro_batch_stops_the_run_even_with_finite_gradients(
    kind, value, bad
):
    acc = accelerator("bf16", gradient_accumulation_steps=2)
    attach(acc)
    model = net()
    model, optimizer = acc.prepare(model, OPTIMIZERS[kind](model.parameters()))
    before = bits(model)
    for part in range(2):
        with acc.accumulate(model):
            acc.backward(Finite.apply(loss_of(model, part), value if part == bad else 1.0))
            if part == 0:
                optimizer.step()  # not yet
                continue
            with pytest.raises(NonFiniteError, match=r"the loss is (inf|nan): the forw") as caught:
                optimizer.step()
    assert (caught.value.cause, caught.value.parameters) == ("forward", ())
    assert same(bits(model), before)


# Accidental pure 16-bit weights


@pytest.mark.parametrize(
    ("precision", "form", "together"),
    [("bf16", "bf16", False), ("no", "bf16", True), ("no", "fp16", False), ("no", "fp16", True)],
)
def test_accidental_16_bit_weights_are_refused_at_prepare(precision, form, together):
    acc = accelerator(precision)
    attach(acc)
    model = net().bfloat16() if form == "bf16" else net().half()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    # 32 + 8 + 8 + 1 weights, 2 bytes more each
    text = rf"4 of 4 tensors of \w+ are trained in {form}.*: 0\.weight.*98 bytes more"
    if not together:
        acc.prepare(model)
    with pytest.raises(PrecisionError, match=text):
        acc.prepare(*([model, optimizer] if together else [optimizer]))
    assert acc._optimizers == []
    model.float()
    acc.prepare(optimizer)


# On a GPU, where Accelerate's fp16 is fp16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: nothing of it was run here")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_on_a_gpu_steps_and_skips_are_told(kind):
    AcceleratorState._reset_state(True)
    acc = Accelerator(mixed_precision="fp16")
    scaler = attach(acc, init_scale=2.0**8)
    model = net()
    model, optimizer = acc.prepare(model, OPTIMIZERS[kind](model.parameters()))
    for step in range(4):
        loss = model(rows(step).to(acc.device)).square().mean()
        acc.backward(loss * (INF if step == 1 else 1.0))
        acc.clip_grad_norm_(model.parameters(), 1.0)
        before = bits(model)
        optimizer.step()
        optimizer.zero_grad()
        assert acc.optimizer_step_was_skipped is (step == 1)
        assert same(before, bits(model)) is (step == 1)
    assert scaler.skipped_total == 1
    assert scaler.get_scale() == 2.0**7


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_batch_that_the_loop_has_dropped_does_not_stop_the_next_step(value):
    acc, scaler, model, optimizer = prepared(precision="bf16")
    acc.backward(loss_of(model, 0) * value)
    optimizer.zero_grad()
    loss = loss_of(model, 1)
    acc.backward(loss)
    optimizer.step()
    assert scaler.last_step.applied
    acc.backward(loss_of(model, 0) * value)  # of an accumulation: it stays, and counts
    acc.backward(loss_of(model, 1))
    with pytest.raises(NonFiniteError, match=r"the loss is (nan|inf)"):
        optimizer.step()
