"""Several optimizers and options of backward, in manual optimization.

Oracles: plain torch in fp32 for fp32; halfstep's own loop, one Precision a network, for policies.
"""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.errors import PrecisionError
from halfstep.optim import AdamW
from halfstep.precision.step import Precision

pl = pytest.importorskip("lightning.pytorch")

from halfstep.integrations.lightning import HalfstepPrecision  # noqa: E402
from integrations.test_lightning import (  # noqa: E402
    POLICIES,
    WIDTH,
    Regression,
    fit,
    loader,
    mse,
    network,
    same,
    spoilt,
    weights,
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


def by_hand(policy):
    """The same with halfstep's own loop; gradients left behind are cleared by freezing."""
    generator, critic = pair()
    loops = [Precision(policy, m, AdamW(m.parameters(), lr=0.01)) for m in (generator, critic)]
    for inputs, _ in loader():
        critic.requires_grad_(False)
        with loops[0].autocast(), loops[1].autocast():
            loss = (critic(generator(inputs)) - 1).square().mean() / 8
        loops[0].step(loss)
        critic.requires_grad_(True)
        with loops[0].autocast(), loops[1].autocast():
            made = critic(generator(inputs).detach())
            loss = (made.square().mean() + (critic(inputs) - 1).square().mean()) / 8
        loops[1].step(loss)
    return {f"generator.{n}": p for n, p in weights(generator).items()} | {
        f"critic.{n}": p for n, p in weights(critic).items()
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gan_trains_under_every_policy(policy):
    model, _ = fit(HalfstepPrecision(policy), Gan())
    assert model.applied == [True] * 12
    assert same(weights(model), by_hand(policy))


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


class ByHand(Regression):
    automatic_optimization = False

    def training_step(self, batch, index):
        mse(self.net(batch[0]), batch[1]).backward()
        self.optimizers().step()


def test_a_backward_past_the_policy_is_refused():
    with pytest.raises(PrecisionError, match=r"step\(\) without.* self\.manual_backward\("):
        fit(HalfstepPrecision("fp16-mixed"), ByHand())


class Repeats(nn.Sequential):
    """Computes its first layers again in the backward, if it is told to."""

    again = False

    def forward(self, x):
        first = nn.Sequential(*[*self][:-1])
        return self[-1](checkpoint(first, x, use_reentrant=False) if self.again else first(x))


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-split"])
def test_a_manual_backward_may_compute_layers_again(policy):
    ends = []
    for again in (False, True):
        model = TwoOfOneLoss()
        model.net = Repeats(*network())
        model.net.again = again
        ends.append(weights(fit(HalfstepPrecision(policy), model)[0]))
    assert same(*ends)
