"""halfstep inside Lightning Fabric, against halfstep's own loop and plain torch."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.errors import ConfigError, NonFiniteError, PrecisionError
from halfstep.optim import AdamW
from halfstep.precision.step import Precision

pytest.importorskip("lightning.fabric")

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy

from halfstep.integrations.fabric import HalfstepPrecision

POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-split",
            "bf16-kahan", "bf16-sr")  # fmt: skip
RECIPE = "bf16-mixed,recipe=bf16/bf16/nvfp4,simulate=yes"
STATIC = "fp32,scale=static,init_scale=1024"
STEPS, OVERFLOW, WIDTH = 6, 3, 8


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))


def batch(step):
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :2].sum(dim=1, keepdim=True)


def mse(output, targets):
    # An eighth, so that fp16 gradients fit at the scale 2^16 and all overflows are planted ones.
    return nn.functional.mse_loss(output, targets) / 8


def spoilt(tensor, value):
    """The tensor itself; its gradient becomes ``value``."""
    tensor.register_hook(lambda gradient: torch.full_like(gradient, value))
    return tensor


def fabric(plugin, **options):
    return Fabric(accelerator="cpu", plugins=[plugin], **options)


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[k], second[k]) and first[k].dtype == second[k].dtype for k in first
    )


def moments(optimizer):
    """Their bits, to be compared."""
    return [
        {
            k: (v.dtype, v.reshape(-1).view(torch.uint8).tolist())
            for k, v in state.items()
            if isinstance(v, torch.Tensor)
        }
        for state in optimizer.state.values()
    ]


def started(policy, make=AdamW):
    precision = HalfstepPrecision(policy)
    net = network()
    run = fabric(precision)
    model, optimizer = precision.setup(run, net, make(net.parameters(), lr=0.01))
    return precision, run, model, optimizer


def losses(model, steps, *, bad=(), value=math.inf):
    for step in steps:
        inputs, targets = batch(step)
        output = model(inputs)
        yield step, mse(spoilt(output, value) if step in bad else output, targets)


@pytest.mark.parametrize("policy", [*POLICIES, RECIPE])
def test_a_policy_in_fabric_is_halfsteps_own_loop_bit_for_bit(policy):
    bad = (OVERFLOW,) if policy.startswith("fp16") else ()
    precision, run, model, optimizer = started(policy)
    for step, loss in losses(model, range(STEPS), bad=bad):
        run.backward(loss / 2)
        if step % 2 == 1:
            norm = run.clip_gradients(model, optimizer, max_norm=0.05)
            optimizer.step()
            assert math.isfinite(norm) == precision.last_step.applied
            if precision.last_step.applied:  # summed over parameters in another order
                assert norm.item() == pytest.approx(precision.last_step.grad_norm, rel=1e-5)
    net = network()
    own = Precision(policy, net, AdamW(net.parameters(), lr=0.01))
    for step in range(STEPS):
        with own.autocast():
            inputs, targets = batch(step)
            output = net(inputs)
            output = spoilt(output, math.inf) if step in bad else output
        own.backward(mse(output, targets) / 2)
        if step % 2 == 1:
            result = own.step(max_norm=0.05)
    assert same(weights(model.module), weights(net))
    assert same(dict(precision.engine.masters.items()), dict(own.masters.items()))
    assert precision.last_step == result
    assert result.skipped_total == len(bad)


@pytest.mark.covering
@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("policy", ["fp32", STATIC])
def test_fp32_is_plain_torch_bit_for_bit_with_a_scale_and_without(policy, make):
    # A power of two times fp32 gradients that stay in range is exact.
    _, run, model, optimizer = started(policy, make)
    for _, loss in losses(model, range(STEPS)):
        run.backward(loss)
        run.clip_gradients(model, optimizer, clip_val=0.02)
        optimizer.step()
    net = network()
    plain = make(net.parameters(), lr=0.01)
    for _, loss in losses(net, range(STEPS)):
        plain.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.02)
        plain.step()
    assert same(weights(model.module), weights(net))


@pytest.mark.covering
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.1}, {"clip_val": 0.1}])
@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-master", "fp32,scale=dynamic"])
def test_an_overflow_at_a_chosen_step_changes_nothing(name, clip):
    precision, run, model, optimizer = started(name)
    for step, loss in losses(model, range(STEPS), bad=(OVERFLOW,)):
        before = weights(model), moments(optimizer)
        optimizer.zero_grad()
        run.backward(loss)
        if clip is not None:
            run.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        stood = same(before[0], weights(model)) and before[1] == moments(optimizer)
        assert stood == (step == OVERFLOW) != precision.last_step.applied
    assert precision.last_step.skipped_total == 1


@pytest.mark.parametrize(("value", "reason"), [(math.inf, "overflow"), (math.nan, "nan_gradients")])
def test_clipping_by_value_hides_no_overflow(value, reason):
    precision, run, model, optimizer = started("fp32,scale=dynamic")
    for _, loss in losses(model, range(1)):
        run.backward(loss)
    weight = model.module[3].weight
    weight.grad[0, 1] = value
    wanted = weight.grad.clamp(-0.1, 0.1)
    wanted[0, 1] = value
    assert (weight.grad.abs() > 0.1).sum() > 1
    run.clip_gradients(model, optimizer, clip_val=0.1)
    torch.testing.assert_close(weight.grad, wanted, rtol=0, atol=0, equal_nan=True)
    optimizer.step()
    assert precision.last_step.reason == reason
    assert precision.last_step.nonfinite_parameters == ("3.weight",)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-master"])
def test_a_loss_that_is_nan_stops_with_its_cause(policy):
    _, run, model, optimizer = started(policy)
    start = weights(model)
    for _, loss in losses(model, range(1)):
        run.backward(loss * math.nan)
        with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
            optimizer.step()
    assert caught.value.cause == "forward"
    assert same(weights(model), start)


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp16-master", "bf16-split", "bf16-kahan"])
def test_a_resumed_run_is_the_same_run_bit_for_bit(policy, tmp_path):
    bad = () if policy.startswith("bf16") else (1, 4)

    def train(parts, steps):
        _, run, model, optimizer = parts
        for _, loss in losses(model, steps, bad=bad):
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        return parts

    def state(parts):
        return {"precision": parts[0], "model": parts[2], "optimizer": parts[3]}

    whole = train(started(policy), range(STEPS))
    half, rest = train(started(policy), range(3)), started(policy)
    half[1].save(tmp_path / "half.ckpt", state(half))
    rest[1].load(tmp_path / "half.ckpt", state(rest), weights_only=True)
    train(rest, range(3, STEPS))
    assert same(weights(rest[2]), weights(whole[2]))
    assert rest[0].last_step.skipped_total == whole[0].last_step.skipped_total
    assert rest[0].last_step.next_loss_scale == whole[0].last_step.next_loss_scale
    masters = dict(whole[0].engine.masters.items())
    assert same(dict(rest[0].engine.masters.items()), masters)


def test_a_model_that_is_only_evaluated_gets_its_weights_back():
    precision, net = HalfstepPrecision("bf16-master"), network()
    start = weights(net)
    model = precision.setup(fabric(precision), net)
    assert model(batch(0)[0]).dtype == torch.float32
    assert net[0].weight.dtype == torch.bfloat16
    precision.teardown()
    assert same(weights(net), start)


def test_one_model_and_two_optimizers():
    precision = HalfstepPrecision("fp32")
    run, net, twin = fabric(precision), network(), network()

    def make(model):
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[0], model[3])]

    model, one, two = precision.setup(run, net, *make(net))
    plain = make(twin)
    for step in range(STEPS):
        inputs, targets = batch(step)
        run.backward(mse(model(inputs), targets), retain_graph=True)
        mse(twin(inputs), targets).backward()
        for ours, theirs in zip((one, two), plain, strict=True):
            ours.step()
            theirs.step()
            theirs.zero_grad()
    for (name, weight), other in zip(weights(net).items(), weights(twin).values(), strict=True):
        if not name.startswith("1."):  # of the norm between them, which nobody steps
            assert torch.equal(weight, other), name


def test_the_example_learns(capsys):
    example = Path(__file__).parents[2] / "examples" / "fabric_loop.py"
    losses = runpy.run_path(str(example))["main"]()
    assert sum(losses[-30:]) / 30 < 0.7 * sum(losses[:10]) / 10
    assert "steps skipped" in capsys.readouterr().out


# Refusals -------------------------------------------------------------------------------------


def test_a_model_that_was_not_set_up_is_refused():
    precision, net = HalfstepPrecision("bf16-mixed"), network()
    run = fabric(precision)
    model, _ = run.setup(net, AdamW(net.parameters()))
    with pytest.raises(PrecisionError, match=r"precision\.setup\(fabric, model, optimizer\)"):
        model(batch(0)[0])


def test_a_forward_past_the_policy_is_refused():
    _, run, model, _ = started("bf16-mixed")
    with pytest.raises(PrecisionError, match=r"forward outside of precision\.autocast"):
        run.backward(mse(model.module(batch(0)[0]), batch(0)[1]))
    with run.autocast():
        loss = mse(model.module(batch(0)[0]), batch(0)[1])
    run.backward(loss)


def test_other_setups_are_refused():
    precision, net = HalfstepPrecision("bf16-mixed"), network()
    with pytest.raises(ConfigError, match="this Fabric does not have"):
        precision.setup(fabric(HalfstepPrecision("fp32")), net)
    other = HalfstepPrecision("fp32")
    run = fabric(other)
    model, optimizer = other.setup(run, net, AdamW(net.parameters()))
    with pytest.raises(ConfigError, match=r"was called already.*one nn\.Module"):
        other.setup(run, network(), AdamW(network().parameters()))
    with pytest.raises(PrecisionError, match="without backward"):
        optimizer.step()
    with pytest.raises(PrecisionError, match="norm_type=1"):
        run.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1)
    two = HalfstepPrecision("fp32", on_spike="skip")
    with pytest.raises(PrecisionError, match="on_spike='skip' with 2 optimizers"):
        two.setup(fabric(two), net, AdamW(net[0].parameters()), AdamW(net[3].parameters()))


def test_sharding_strategies_are_refused_by_name():
    precision = HalfstepPrecision("bf16-mixed")

    class Stub:
        strategy = FSDPStrategy.__new__(FSDPStrategy)

    with pytest.raises(PrecisionError, match="FSDPStrategy shards weights"):
        precision.setup(Stub(), network())


def two_ranks(run, folder):
    precision = run.strategy.precision
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer = precision.setup(run, net, optimizer)
    bad = (OVERFLOW,) if run.global_rank == 1 else ()
    for _, loss in losses(model, range(STEPS), bad=bad):
        optimizer.zero_grad()
        run.backward(loss)
        optimizer.step()
    step = precision.last_step
    state = [weights(net), step.skipped_total, step.next_loss_scale]
    torch.save(state, folder / f"{run.global_rank}.pt")


@pytest.mark.distributed
def test_two_ddp_processes_step_and_skip_together(tmp_path):
    plugin = HalfstepPrecision("fp16-mixed")
    run = fabric(plugin, strategy=DDPStrategy(start_method="fork"), devices=2)
    run.launch(two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{i}.pt", weights_only=True) for i in range(2))
    assert same(first[0], second[0])
    assert first[1:] == second[1:]
    assert first[1] == 1
    assert not same(first[0], weights(network()))
