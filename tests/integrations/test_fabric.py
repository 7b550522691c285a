"""halfstep inside Lightning Fabric: held against halfstep's own loop and Fabric's own plugins."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.errors import ConfigError, NonFiniteError, PrecisionError
from halfstep.integrations.grad_scaler import GradScaler
from halfstep.optim import AdamW, Lion
from halfstep.precision.step import Precision

pytest.importorskip("lightning.fabric")

from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy

from halfstep.integrations.fabric import HalfstepPrecision, ScaledPrecision

POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-split",
            "bf16-kahan", "bf16-sr")  # fmt: skip
RECIPES = ("fp8,simulate=yes", "bf16-mixed,recipe=bf16/bf16/nvfp4,simulate=yes")
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


@pytest.mark.parametrize("policy", [*POLICIES, *RECIPES])
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


@pytest.mark.parametrize("clip", [{"max_norm": 1e9}, {"clip_val": 1e9}])
def test_looking_at_small_16_bit_gradients_loses_none(clip):
    policy, trained = "bf16-split,scale=static,init_scale=65536", []
    for clips in (False, True):
        precision, run, model, optimizer = started(policy, Lion)  # takes steps of any gradient
        for _, loss in losses(model, range(STEPS)):
            run.backward(loss * 2**-26)
            held = list(precision.engine.masters.gradients(model.parameters()).values())
            before = [gradient.clone() for gradient in held]
            # without the scale they are below half of fp16's smallest number, 2^-24
            assert 0 < max(g.float().abs().max() for g in held) < 2**-25
            if clips:
                norm = run.clip_gradients(model, optimizer, **clip)
            after = precision.engine.masters.gradients(model.parameters()).values()
            for gradient, kept, old in zip(after, held, before, strict=True):
                assert gradient is kept
                assert gradient.dtype == old.dtype
                assert torch.equal(gradient, old)
            optimizer.step()
            if clips and "max_norm" in clip:  # summed in another order
                assert norm.item() == pytest.approx(precision.last_step.grad_norm, rel=1e-5)
        trained.append(weights(model.module))
    assert same(*trained)
    assert not same(trained[0], weights(network().to(next(model.parameters()).dtype)))


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_16_bit_gradients_are_clipped_by_value_without_their_scale(value):
    precision, run, model, optimizer = started("fp16-pure,moments=fp32", Lion)
    for _, loss in losses(model, range(1)):
        run.backward(loss)
    grads = [p.grad for p in model.parameters()]
    grads[0][0, 0] *= value
    limit = 2**-6
    wanted = [g.clamp(-limit, limit) if g.isfinite().all() else torch.full_like(g, value)
              for g in grads]  # fmt: skip
    assert any((g.abs() > limit).any() for g in grads)
    run.clip_gradients(model, optimizer, clip_val=limit)
    for gradient, expected in zip(grads, wanted, strict=True):
        assert torch.equal(gradient.nan_to_num(), expected.nan_to_num())
    optimizer.step()
    assert precision.last_step.applied == math.isfinite(value)


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


def scaled():
    precision = ScaledPrecision(device="cpu")
    net = network()
    run = fabric(precision)
    return precision, run, *run.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))


@pytest.mark.covering
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.1}, {"clip_val": 0.1}])
@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-master", "fp32,scale=dynamic", "scaler"])
def test_an_overflow_at_a_chosen_step_changes_nothing(name, clip):
    precision, run, model, optimizer = scaled() if name == "scaler" else started(name)
    for step, loss in losses(model, range(STEPS), bad=(OVERFLOW,)):
        before = weights(model), moments(optimizer)
        optimizer.zero_grad()
        run.backward(loss)
        if clip is not None:
            lenient = {"error_if_nonfinite": False} if name == "scaler" else {}
            run.clip_gradients(model, optimizer, **clip, **lenient)
        optimizer.step()
        stood = same(before[0], weights(model)) and before[1] == moments(optimizer)
        assert stood == (step == OVERFLOW) != precision.last_step.applied
    assert precision.last_step.skipped_total == 1


@pytest.mark.parametrize(("value", "reason"), [(math.inf, "overflow"), (math.nan, "nan_gradients")])
def test_clipping_by_value_hides_no_overflow(value, reason):
    precision, run, model, optimizer = started("fp32,scale=dynamic")
    for _, loss in losses(model, range(1)):
        run.backward(loss)
    model.module[3].weight.grad[0, 1] = value
    run.clip_gradients(model, optimizer, clip_val=0.1)
    optimizer.step()
    assert precision.last_step.reason == reason
    assert precision.last_step.nonfinite_parameters == ("3.weight",)


@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "fp16-master", "scaler"])
def test_a_loss_that_is_nan_stops_with_its_cause(name):
    _, run, model, optimizer = scaled() if name == "scaler" else started(name)
    start = weights(model)
    for _, loss in losses(model, range(1)):
        run.backward(loss * math.nan)
        with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
            optimizer.step()
    assert caught.value.cause == "forward"
    assert same(weights(model), start)


@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-master", "bf16-split", "bf16-kahan",
                                  "scaler"])  # fmt: skip
def test_a_resumed_run_is_the_same_run_bit_for_bit(name, tmp_path):
    bad = () if name.startswith("bf16") else (1, 4)
    start = scaled if name == "scaler" else lambda: started(name)

    def train(parts, steps):
        _, run, model, optimizer = parts
        for _, loss in losses(model, steps, bad=bad):
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        return parts

    def state(parts):
        return {"precision": parts[0], "model": parts[2], "optimizer": parts[3]}

    whole = train(start(), range(STEPS))
    half, rest = train(start(), range(3)), start()
    half[1].save(tmp_path / "half.ckpt", state(half))
    rest[1].load(tmp_path / "half.ckpt", state(rest), weights_only=True)
    train(rest, range(3, STEPS))
    assert same(weights(rest[2]), weights(whole[2]))
    assert rest[0].last_step.skipped_total == whole[0].last_step.skipped_total
    assert rest[0].last_step.next_loss_scale == whole[0].last_step.next_loss_scale
    if name != "scaler":
        masters = dict(whole[0].engine.masters.items())
        assert same(dict(rest[0].engine.masters.items()), masters)


def test_weights_loaded_without_their_masters_are_what_is_trained(tmp_path):
    precision, run, model, optimizer = started("bf16-master")
    run.save(tmp_path / "a.ckpt", {"model": model})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    run.backward(next(losses(model, range(1)))[1])
    optimizer.step()  # a load of the weights that are there would keep the masters
    run.load(tmp_path / "a.ckpt", {"model": model}, weights_only=True)
    for _, loss in losses(model, range(1)):
        run.backward(loss)
        masters = precision.engine.state_dict()["masters"]
        for name, parameter in model.module.named_parameters():
            assert torch.equal(masters[name], parameter.float())  # the cast's remainders are gone
        optimizer.step()


def test_a_closure_is_run():
    _, run, model, optimizer = started("bf16-master")
    _, other, twin, plain = started("bf16-master")

    def closure():
        (_, loss), = losses(model, range(1))  # fmt: skip
        run.backward(loss)
        return loss.detach()

    value = optimizer.step(closure)
    for _, loss in losses(twin, range(1)):
        other.backward(loss)
        plain.step()
        assert value == loss
    assert same(weights(model), weights(twin))


def test_evaluation_alone_of_one_model_and_of_several():
    for count in (1, 2):
        precision, nets = HalfstepPrecision("bf16-master"), [network() for _ in range(count)]
        start = [weights(net) for net in nets]
        given = nets[0] if count == 1 else nets
        ready = precision.setup(fabric(precision), given)
        for model, net in zip([ready] if count == 1 else ready, nets, strict=True):
            assert model(batch(0)[0]).dtype == torch.float32
            assert net[0].weight.dtype == torch.bfloat16
        precision.give_back_()
        assert all(map(same, map(weights, nets), start))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_scaler_in_fabrics_place_is_fabrics_bit_for_bit(clip):
    def train(plugin):
        net = network()
        run = fabric(plugin)
        model, optimizer = run.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        seen = []
        for _, loss in losses(model, range(STEPS), bad=(OVERFLOW,)):
            seen.append(loss.item())
            optimizer.zero_grad()
            run.backward(loss)
            if clip is not None:
                run.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
            optimizer.step()
        return weights(net), seen, plugin.scaler.get_scale()

    theirs = train(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    inside = train(MixedPrecision("16-mixed", "cpu", GradScaler("cpu")))
    ours = train(ScaledPrecision(GradScaler("cpu")))
    assert same(theirs[0], inside[0])
    assert same(theirs[0], ours[0])
    assert theirs[1:] == inside[1:] == ours[1:]


def test_fused_optimizers_may_clip():
    precision, net = ScaledPrecision(device="cpu"), network()
    run = fabric(precision)
    model, optimizer = run.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    for _, loss in losses(model, range(STEPS)):
        optimizer.zero_grad()
        run.backward(loss)
        norm = run.clip_gradients(model, optimizer, max_norm=1e-3)
        left = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        # the factor and the sums are fp32; 1e-6 in the factor's denominator
        assert norm > 1e-3 > left.item() > 0.99e-3
        optimizer.step()
        assert precision.last_step.applied


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
    with pytest.raises(PrecisionError, match=r"under fabric\.autocast"):
        run.backward(mse(model.module(batch(0)[0]), batch(0)[1]))
    with run.autocast():
        loss = mse(model.module(batch(0)[0]), batch(0)[1])
    run.backward(loss)


def test_other_setups_are_refused():
    precision, net = HalfstepPrecision("bf16-mixed"), network()
    run = fabric(precision)
    with pytest.raises(ConfigError, match="this Fabric does not have"):
        HalfstepPrecision("bf16-mixed").setup(run, net)
    with pytest.raises(PrecisionError, match="LBFGS"):
        precision.setup(run, net, torch.optim.LBFGS(net.parameters()))
    other = HalfstepPrecision("fp32")
    run = fabric(other)
    model, optimizer = other.setup(run, net, AdamW(net.parameters()))
    with pytest.raises(ConfigError, match=r"was called already.*\[generator, discriminator\]"):
        other.setup(run, network(), AdamW(network().parameters()))
    with pytest.raises(PrecisionError, match="without backward"):
        optimizer.step()
    with pytest.raises(PrecisionError, match="norm_type=1"):
        run.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1)
    stranger = run.setup_optimizers(torch.optim.SGD(network().parameters(), lr=1.0))
    with pytest.raises(PrecisionError, match="not under the policy"):
        stranger.step()


def test_sharding_strategies_are_refused_by_name():
    precision = HalfstepPrecision("bf16-mixed")

    class Stub:
        strategy = FSDPStrategy.__new__(FSDPStrategy)

    with pytest.raises(PrecisionError, match="FSDPStrategy shards weights"):
        precision.setup(Stub(), network())


def two_ranks(run, name, folder):
    precision = run.strategy.precision
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if name == "scaler":
        model, optimizer = run.setup(net, optimizer)
    else:
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
@pytest.mark.parametrize("name", ["fp16-mixed", "scaler"])
def test_two_ddp_processes_step_and_skip_together(name, tmp_path):
    plugin = ScaledPrecision(device="cpu") if name == "scaler" else HalfstepPrecision(name)
    run = fabric(plugin, strategy=DDPStrategy(start_method="fork"), devices=2)
    run.launch(two_ranks, name, tmp_path)
    first, second = (torch.load(tmp_path / f"{i}.pt", weights_only=True) for i in range(2))
    assert same(first[0], second[0])
    assert first[1:] == second[1:]
    assert first[1] == 1
    assert not same(first[0], weights(network()))
