"""Precision in a training loop: what a good step does, and what it reports."""

import contextlib
import math

import pytest
import torch
from torch import Tensor, nn

from halfstep import Precision, StepResult
from halfstep.precision.casting.autocast import SimulatedProducts, cpu_has_bf16
from reference.training import (
    CPU_POLICIES,
    DYNAMIC,
    OPTIMIZERS,
    PURE,
    batches,
    differences,
    loss_of,
    mlp,
    mse,
    scaled,
)

U32 = 2.0**-24


def build(spec: str, optimizer: str = "adamw-loop", model: nn.Module | None = None):
    model = model or mlp()
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, Precision(spec, model, made)


def run(model, precision, data, **options) -> list[StepResult]:
    results = []
    for batch in data:
        results.append(precision.step(loss_of(model, precision, batch), **options))
    return results


def true_step(data) -> tuple[float, float, list[Tensor]]:
    """Loss, gradient norm and gradients of the mean over micro-batches, in fp64, by torch alone."""
    model = mlp().double()
    total = 0.0
    for x, y in data:
        loss = (model(x.double()) - y.double()).square().mean() / len(data)
        loss.backward()
        total += loss.item()
    grads = [p.grad for p in model.parameters()]
    return total, math.sqrt(sum(float(g.square().sum()) for g in grads)), grads


# How far a result of this small model (two products, a tanh) may be from fp64: some 20 roundings
# of the compute format, each half a gap relative to numbers of the result's own size.
NEAR = {"fp32": 20 * 2.0**-24, "bf16": 20 * 2.0**-9, "fp16": 20 * 2.0**-12}


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CPU_POLICIES)
def test_the_result_tells_the_truth(name, optimizer):
    model, _, precision = build(scaled(name, growth_interval=2), optimizer)
    data = batches(1)
    loss, norm, _ = true_step(data)
    before = {n: p.detach().clone() for n, p in precision.named_parameters().items()}
    first, second = run(model, precision, data * 2)
    near = NEAR[name[:4]]
    scale = 256.0 if name in DYNAMIC else 1.0
    grown = 512.0 if name in DYNAMIC else 1.0
    assert first.applied is True
    assert first.reason is None
    assert first.loss == pytest.approx(loss, rel=near, abs=0)
    assert first.grad_norm == pytest.approx(norm, rel=near, abs=0)
    assert (first.loss_scale, first.next_loss_scale) == (scale, scale)
    assert (second.loss_scale, second.next_loss_scale) == (scale, grown)
    for result in (first, second):
        assert (result.skipped_total, result.skipped_in_a_row) == (0, 0)
        assert result.nonfinite_parameters == ()
    for n, parameter in precision.named_parameters().items():
        assert not torch.equal(parameter, before[n])
    assert second.loss < first.loss


@pytest.mark.parametrize("optimizer", ["sgd", "adamw-loop"])
def test_bf16_mixed_is_torch_autocast_bit_for_bit(optimizer):
    data = batches(4)
    model, made, precision = build("bf16-mixed", optimizer)
    run(model, precision, data)
    plain = mlp()
    own = OPTIMIZERS[optimizer](plain.parameters())
    for x, y in data:
        own.zero_grad()
        # Where bf16 has no instructions, products are simulated: in torch's loop here too.
        with contextlib.nullcontext() if cpu_has_bf16() else SimulatedProducts(torch.bfloat16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse(plain(x), y)
            loss.backward()
        own.step()
    assert differences(model.state_dict(), plain.state_dict()) == []
    assert differences(made.state_dict()["state"], own.state_dict()["state"]) == []


# --- micro-batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_losses_of_micro_batches_add_up_and_gradients_too(name):
    data = batches(4)
    loss, norm, grads = true_step(data)
    model, _, precision = build(scaled(name))
    for x, y in data:
        with precision.autocast():
            part = mse(model(x), y) / len(data)
        precision.backward(part)
    held = [p.grad.double() for p in model.parameters()]
    near = NEAR[name[:4]]
    if name not in PURE:  # whose sums are 16 bit too
        for got, want in zip(held, grads, strict=True):
            assert (got - want).abs().max() <= near * want.abs().max()
    result = precision.step()
    assert result.loss == pytest.approx(loss, rel=near, abs=0)
    assert result.grad_norm == pytest.approx(norm, rel=2 * near, abs=0)


class Weighted(nn.Module):
    """loss = sum(c * (x W')): the weight's gradient is the plain sum c' x over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.covering
@pytest.mark.parametrize("parts", [2, 4, 32])
@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16-master", "fp16-master"])
def test_k_micro_batches_equal_one_batch_of_k(name, parts):
    g = torch.Generator().manual_seed(5)
    low = {"b": torch.bfloat16, "f": torch.float16}[name[0]] if name != "fp32" else torch.float32
    x = torch.randn(32, 16, generator=g).to(low).float()
    c = torch.randn(32, 3, generator=g).to(low).float()

    def gradient(count: int) -> Tensor:
        model = Weighted()
        precision = Precision(
            scaled(name, init_scale=1), model, torch.optim.SGD(model.parameters(), lr=1.0)
        )
        for xs, cs in zip(x.chunk(count), c.chunk(count), strict=True):
            with precision.autocast():
                loss = (model(xs).float() * cs).sum()
            precision.backward(loss)
        return model.linear.weight.grad.double()

    one, many = gradient(1), gradient(parts)
    exact = c.double().T @ x.double()
    sums = c.double().abs().T @ x.double().abs()
    # Bounds: 32 exact products (16-bit operands; fp32: one rounding each) added up in fp32 errs by
    # at most 33 u32 sum|c x|; each finished micro-batch is rounded once to the compute format.
    half_gap = 0.0 if name == "fp32" else torch.finfo(low).eps / 2
    per_part = sum(
        (cs.double().T @ xs.double()).abs()
        for xs, cs in zip(x.chunk(parts), c.chunk(parts), strict=True)
    )
    slack = 33 * U32 * sums
    assert ((one - exact).abs() <= slack + half_gap * exact.abs() * 1.01).all()
    assert ((many - exact).abs() <= slack + half_gap * per_part * 1.01).all()
    if name == "fp32":
        assert ((one - many).abs() <= 2 * slack).all()


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_gradients_from_before_precision_was_made_do_not_enter_the_first_step(name):
    x, y = batches(1)[0]
    results = []
    for stale in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if stale:
            (100 * mse(model(x), y)).backward()
        precision = Precision(scaled(name), model, optimizer)
        results.append(precision.step(loss_of(model, precision, (x, y))))
    assert results[1] == results[0]


# --- clipping -------------------------------------------------------------------------------------


def test_huge_finite_gradients_are_clipped_and_not_skipped():
    # 1e30 squared overflows fp32; the gradients are finite, so the step is a good one.
    for name in ("fp32", "bf16-mixed", "bf16-master"):
        model = Weighted()
        precision = Precision(name, model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = precision.named_parameters()["linear.weight"].detach().clone()
        with precision.autocast():
            loss = model(torch.full((1, 16), 1e15)).float().sum() * 1e15
        result = precision.step(loss, max_norm=1.0)
        assert result.applied
        # 48 equal elements of 1e30, up to two bf16 roundings
        assert result.grad_norm == pytest.approx(math.sqrt(48) * 1e30, rel=2.0**-7, abs=0)
        moved = precision.named_parameters()["linear.weight"].detach() - before
        # weights below 0.25 round at 2^-26; factor and product at 2^-24 relative
        assert (moved + 1 / math.sqrt(48)).abs().max() <= 2.0**-22


# --- scaling is exact -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DYNAMIC)
def test_gradients_do_not_depend_on_the_scale_where_fp16_holds_them(name):
    data = batches(2)

    def gradients(scale: int) -> list[Tensor]:
        model, _, precision = build(scaled(name, init_scale=scale))
        kinds = []
        for p in model.parameters():  # hooks see what p.grad gets: unscaled
            p.register_hook(lambda g: kinds.append(g.detach().abs().float() * scale))
        for batch in data:
            loss = loss_of(model, precision, batch)
            precision.backward(loss)
        if name != "fp16-pure":  # no underflow and no overflow: else the test would prove nothing
            values = torch.cat([k.flatten() for k in kinds])
            assert values[values > 0].min() >= 2.0**-14
            assert values.max() <= 65504
        return [p.grad.double() for p in model.parameters()]

    for a, b in zip(gradients(2**8), gradients(2**12), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-master"])
def test_scaling_saves_what_fp16_would_flush_to_zero(name):
    # Gradients of 2^-27 are 0 in fp16; times 2^8 they are not.
    def weight_gradient(scale: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        precision = Precision(
            scaled(name, init_scale=scale), model, torch.optim.SGD(model.parameters(), lr=1.0)
        )
        with precision.autocast():
            loss = model(torch.ones(1, 1)).float().sum() * 2.0**-27
        precision.backward(loss)
        return model.weight.grad.item()

    assert weight_gradient(1) == 0.0
    assert weight_gradient(2**8) == 2.0**-27
