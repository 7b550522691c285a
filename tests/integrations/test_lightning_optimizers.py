"""Several optimizers, options of backward, a backward of the module's own, none at all, LBFGS.

Oracles: plain torch in fp32 for fp32; halfstep's own loop, one Precision a network, for policies.
"""

import contextlib
import math
import warnings

import pytest
import torch
from torch import nn

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.optim import AdamW
from halfstep.precision.step import Precision

pl = pytest.importorskip("lightning.pytorch")

from halfstep.integrations.fabric import HalfstepPrecision as FabricPrecision  # noqa: E402
from halfstep.integrations.lightning import HalfstepPrecision  # noqa: E402
from integrations.test_fabric import (  # noqa: E402
    POLICIES,
    STATIC,
    WIDTH,
    fabric,
    mse,
    network,
    same,
    spoilt,
    weights,
)
from integrations.test_lightning import (  # noqa: E402
    Regression,
    fit,
    lbfgs,
    loader,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than"),
]


def pair():
    torch.manual_seed(11)
    generator = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))
    return generator, critic


class Gan(pl.LightningModule):
    """The generator's loss flows through the critic, whose step clears what that leaves."""

    def __init__(self, make=AdamW, bad=()):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = pair()
        self.make, self.bad = make, bad
        self.applied = []

    def configure_optimizers(self):
        return [self.make(self.generator.parameters(), lr=0.01),
                self.make(self.critic.parameters(), lr=0.01)]  # fmt: skip

    def training_step(self, batch, index):
        one, two = self.optimizers()
        inputs, _ = batch
        fooled = self.critic(self.generator(inputs))
        fooled = spoilt(fooled, math.inf) if index in self.bad else fooled
        one.zero_grad()
        self.manual_backward((fooled - 1).square().mean() / 8)
        one.step()
        self.note()
        two.zero_grad()
        made, real = self.critic(self.generator(inputs).detach()), self.critic(inputs)
        self.manual_backward((made.square().mean() + (real - 1).square().mean()) / 8)
        two.step()
        self.note()

    def note(self):
        last = getattr(self.trainer.precision_plugin, "last_step", None)
        self.applied.append(last is None or last.applied)


def by_hand(policy, *, apart=False):
    """The same with halfstep's own loop; gradients left behind are cleared by freezing.

    ``apart``: each call of a model has an autocast, and so casts of weights, of its own.
    """
    generator, critic = pair()
    loops = [Precision(policy, m, AdamW(m.parameters(), lr=0.01)) for m in (generator, critic)]

    def context(inner):
        stack = contextlib.ExitStack()
        if inner is apart:
            for loop in loops:
                stack.enter_context(loop.autocast())
        return stack

    def call(model, inputs):
        with context(True):
            return model(inputs)

    for inputs, _ in loader():
        critic.requires_grad_(False)
        with context(False):
            loss = (call(critic, call(generator, inputs)) - 1).square().mean() / 8
        loops[0].step(loss)
        critic.requires_grad_(True)
        with context(False):
            made = call(critic, call(generator, inputs).detach())
            loss = (made.square().mean() + (call(critic, inputs) - 1).square().mean()) / 8
        loops[1].step(loss)
    return {f"generator.{n}": p for n, p in weights(generator).items()} | {
        f"critic.{n}": p for n, p in weights(critic).items()
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gan_trains_under_every_policy(policy):
    model, run = fit(HalfstepPrecision(policy), Gan())
    assert model.applied == [True] * 12
    assert run.precision_plugin.attempts == 12
    assert same(weights(model), by_hand(policy))


@pytest.mark.covering
@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("policy", ["fp32", STATIC])
def test_a_gan_in_fp32_is_lightnings_own_bit_for_bit(policy, make):
    plain, _ = fit(None, Gan(make))
    ours, _ = fit(HalfstepPrecision(policy), Gan(make))
    assert same(weights(ours), weights(plain))


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp16-master"])
def test_only_the_optimizer_whose_gradients_overflow_skips(policy):
    model, run = fit(HalfstepPrecision(policy), Gan(bad=(2,)))
    assert [i for i, applied in enumerate(model.applied) if not applied] == [4]
    assert run.precision_plugin.last_step.next_loss_scale == 2.0**15


class TwoOfOneLoss(pl.LightningModule):
    """One backward, two steps; in one step the first one's gradients overflow."""

    def __init__(self, make=AdamW, bad=None):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.make, self.bad = network(), make, bad

    def configure_optimizers(self):
        return [self.make(self.net[0].parameters(), lr=0.01),
                self.make(list(self.net[1:].parameters()), lr=0.01)]  # fmt: skip

    def training_step(self, batch, index):
        value = math.inf if index == self.bad else 1.0
        handle = self.net[0].weight.register_hook(lambda gradient: gradient * value)
        self.manual_backward(mse(self.net(batch[0]), batch[1]))
        handle.remove()
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("policy", POLICIES)
def test_two_optimizers_of_one_loss_step_one_after_the_other(policy):
    model, run = fit(HalfstepPrecision(policy), TwoOfOneLoss())
    assert run.precision_plugin.attempts == 12
    net = network()
    parts = net[0].parameters(), list(net[1:].parameters())
    own = Precision(policy, net, [AdamW(part, lr=0.01) for part in parts])
    for inputs, targets in loader():
        with own.autocast():
            loss = mse(net(inputs), targets)
        own.step(loss)
    assert same(weights(model.net), weights(net))


def test_gradients_that_wait_follow_the_scale():
    """After a skip of the first optimizer the second one's step is that of plain fp32."""
    model, _ = fit(HalfstepPrecision("fp32,scale=dynamic"), TwoOfOneLoss(bad=2))
    net = network()
    first = AdamW(net[0].parameters(), lr=0.01)
    second = AdamW(list(net[1:].parameters()), lr=0.01)
    for index, (inputs, targets) in enumerate(loader()):
        mse(net(inputs), targets).backward()
        if index != 2:
            first.step()
        second.step()
        net.zero_grad()
    assert same(weights(model.net), weights(net))


class Shared(pl.LightningModule):
    """Two optimizers over the same parameters: each after a loss of its own, or both after one."""

    def __init__(self, once=False):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.once = network(), once

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.parameters(), lr=0.1),
                torch.optim.Adam(self.net[3].parameters(), lr=0.01)]  # fmt: skip

    def training_step(self, batch, index):
        if self.once:
            self.manual_backward(mse(self.net(batch[0]), batch[1]))
        for optimizer in self.optimizers():
            if not self.once:
                self.manual_backward(mse(self.net(batch[0]), batch[1]))
            optimizer.step()
            if not self.once:
                self.net.zero_grad()
        self.net.zero_grad()


@pytest.mark.covering
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("policy", ["fp32", STATIC])
def test_optimizers_may_share_fp32_parameters(policy, once):
    plain, _ = fit(None, Shared(once))
    ours, run = fit(HalfstepPrecision(policy), Shared(once))
    assert same(weights(ours), weights(plain))
    assert run.precision_plugin.attempts == 12


def test_optimizers_that_share_16_bit_parameters_are_refused():
    with pytest.raises(PrecisionError, match="a parameter is in two optimizers"):
        fit(HalfstepPrecision("bf16-master"), Shared())


def test_a_step_without_gradients_changes_nothing_and_is_said_once():
    class Half(TwoOfOneLoss):
        def training_step(self, batch, index):
            first, second = self.optimizers()
            self.net[1:].requires_grad_(False)
            self.manual_backward(mse(self.net(batch[0]), batch[1]))
            second.step()
            first.step()
            assert self.trainer.precision_plugin.last_step.applied

    with pytest.warns(UserWarning, match="AdamW changed nothing: none of its") as said:
        model, run = fit(HalfstepPrecision("fp32"), Half())
    assert sum("changed nothing" in str(w.message) for w in said) == 1
    assert run.precision_plugin.attempts == 6
    assert same(weights(model.net[3]), weights(network()[3]))


class Twice(Regression):
    """Two losses of one graph."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        output = self.net(batch[0])
        self.manual_backward(mse(output, batch[1]) / 2, retain_graph=True)
        self.manual_backward(mse(output, batch[1]) / 2)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-master", "bf16-split"])
def test_a_graph_may_be_kept_for_a_second_loss(policy):
    model, run = fit(HalfstepPrecision(policy), Twice())
    net = network()
    own = Precision(policy, net, AdamW(net.parameters(), lr=0.01))
    for inputs, targets in loader():
        with own.autocast():
            parts = [mse(net(inputs), targets) / 2 for _ in range(2)]
        for part in parts:
            own.backward(part)
        result = own.step()
    assert same(weights(model.net), weights(net))
    assert run.precision_plugin.last_step == result


class OwnBackward(Regression):
    """Its hook is called, and may change the loss."""

    def backward(self, loss, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), loss.item()]
        (loss * 2).backward(*args, **kwargs)


@pytest.mark.parametrize("policy", ["fp32", STATIC, "bf16-mixed", "fp16-mixed", "bf16-master"])
def test_the_modules_own_backward_is_called_and_honoured(policy):
    model, _ = fit(HalfstepPrecision(policy), OwnBackward())
    net = network()
    own = Precision(policy, net, AdamW(net.parameters(), lr=0.01))
    for inputs, targets in loader():
        with own.autocast():
            loss = mse(net(inputs), targets) * 2
        own.step(loss)
    assert same(weights(model.net), weights(net))
    assert model.seen == model.losses


class PastThePolicy(Regression):
    def backward(self, loss):
        torch.autograd.backward(loss)


class NoBackward(Regression):
    def backward(self, loss):
        pass


class ByHand(Regression):
    automatic_optimization = False

    def training_step(self, batch, index):
        mse(self.net(batch[0]), batch[1]).backward()
        self.optimizers().step()


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-master", "bf16-split"])
def test_a_backward_past_the_policy_is_refused_and_none_is_no_step(policy):
    for made in (PastThePolicy, ByHand):
        with pytest.raises(PrecisionError, match=r"step\(\) without.* self\.manual_backward\("):
            fit(HalfstepPrecision(policy), made())
    model = NoBackward()
    plugin = HalfstepPrecision(policy)
    start = {n: w.to(plugin.policy.param_dtype) for n, w in weights(model).items()}
    fit(plugin, model)
    assert plugin.attempts == 0
    assert same(weights(model), start)


class NoOptimizer(Regression):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize("policy", ["fp32", "bf16-split"])
def test_no_optimizer_is_a_run_without_steps(policy):
    model = NoOptimizer()
    model.on_train_batch_end = lambda *args: None
    start = weights(model)
    with pytest.warns(UserWarning, match="this fit will run with no optimizer"):
        fit(HalfstepPrecision(policy), model)
    assert same(weights(model), start)
    assert len(model.losses) == 6
    assert set(model.outputs) == {torch.float32}


def test_a_model_without_parameters_can_be_evaluated():
    class Nothing(pl.LightningModule):
        def test_step(self, batch, index):
            assert batch[0].shape == (8, WIDTH)

    run = trainer(HalfstepPrecision("bf16-mixed"))
    run.test(Nothing(), loader(), verbose=False)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_lbfgs_in_fp32_is_lightnings_own(clip):
    plain, _ = fit(None, Regression(make=lbfgs), gradient_clip_val=clip)
    ours, run = fit(HalfstepPrecision("fp32"), Regression(make=lbfgs), gradient_clip_val=clip)
    assert same(weights(ours), weights(plain))
    assert run.precision_plugin.attempts == 6


def test_lbfgs_learns_in_bf16_mixed():
    plain, _ = fit(None, Regression(make=lbfgs))
    ours, _ = fit(HalfstepPrecision("bf16-mixed"), Regression(make=lbfgs))
    assert ours.losses[0] != plain.losses[0]
    # bf16 keeps 8 bits: a percent of the loss; where the search goes from there is its own affair
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=0.01)
    assert min(ours.losses) < 0.5 * ours.losses[0]


@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-master", "bf16-pure", STATIC])
def test_lbfgs_is_refused_elsewhere_before_the_first_step(policy):
    model = Regression(make=lbfgs)
    start = weights(model)
    with pytest.raises(PrecisionError, match="LBFGS calls the loss several times"):
        fit(HalfstepPrecision(policy), model)
    assert same(weights(model), start)
    assert not model.losses


def test_a_broken_loss_within_lbfgs_stops_the_run():
    class Broken(Regression):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * (math.nan if index == 2 else 1)

    with pytest.raises(NonFiniteError, match="the loss is nan within a step of LBFGS"):
        fit(HalfstepPrecision("bf16-mixed"), Broken(make=lbfgs))


def test_gradients_of_two_optimizers_are_clipped_each_by_itself():
    class Clipped(TwoOfOneLoss):
        def training_step(self, batch, index):
            self.manual_backward(mse(self.net(batch[0]), batch[1]))
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, 0.01, "norm")
                optimizer.step()
                optimizer.zero_grad()

    plain, _ = fit(None, Clipped(torch.optim.SGD))
    ours, run = fit(HalfstepPrecision(STATIC), Clipped(torch.optim.SGD))
    for name, weight in weights(plain).items():
        # the factor is rounded once in fp64 here, a few times in fp32 there
        torch.testing.assert_close(weights(ours)[name], weight, rtol=1e-6, atol=1e-7)
    assert run.precision_plugin.last_step.applied


# Fabric


@pytest.mark.parametrize("policy", POLICIES)
def test_two_models_and_two_optimizers_in_fabric(policy):
    precision = FabricPrecision(policy)
    run = fabric(precision)
    generator, critic = pair()
    made = AdamW(generator.parameters(), lr=0.01), AdamW(critic.parameters(), lr=0.01)
    first, second, one, two = precision.setup(run, [generator, critic], *made)
    for inputs, _ in loader():
        run.backward((second(first(inputs)) - 1).square().mean() / 8)
        one.step()
        two.zero_grad()
        fake, real = second(first(inputs).detach()), second(inputs)
        run.backward((fake.square().mean() + (real - 1).square().mean()) / 8)
        two.step()
        assert precision.last_step.applied
    found = {f"generator.{n}": p for n, p in weights(generator).items()} | {
        f"critic.{n}": p for n, p in weights(critic).items()
    }
    assert same(found, by_hand(policy, apart=True))
    assert {"0.0.weight", "1.0.weight"} < precision.engine.named_parameters().keys()


def test_one_model_and_two_optimizers_in_fabric():
    precision = FabricPrecision("fp32")
    run, net, twin = fabric(precision), network(), network()

    def make(model):
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[0], model[3])]

    model, one, two = precision.setup(run, net, *make(net))
    plain = make(twin)
    for inputs, targets in loader():
        run.backward(mse(model(inputs), targets), retain_graph=True)
        mse(twin(inputs), targets).backward()
        for ours, theirs in zip((one, two), plain, strict=True):
            ours.step()
            theirs.step()
            theirs.zero_grad()
    for (name, weight), other in zip(weights(net).items(), weights(twin).values(), strict=True):
        if not name.startswith("1."):  # of the norm between them, which nobody steps
            assert torch.equal(weight, other), name


def test_a_second_fit_after_a_plain_one():
    """What one fit was without an optimizer, the next one is with one."""
    plugin = HalfstepPrecision("bf16-mixed")
    model = NoOptimizer()
    model.on_train_batch_end = lambda *args: None
    run = trainer(plugin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(model, loader())
    run = trainer(plugin)
    other = Regression()
    start = weights(other)
    run.fit(other, loader())
    assert not same(weights(other), start)
