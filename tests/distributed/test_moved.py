"""An applied step has moved every weight with a gradient, in optimizers made of optimizers, too.

The oracle is the same training with the inner optimizers given in a list: the same bits.
"""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from halfstep import GradScaler, Precision, PrecisionError
from halfstep.precision.masters.local_part import local_part

POLICIES = "fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-pure"


class Around(Optimizer):
    """An optimizer that steps others, kept in an attribute of any name, in any shape."""

    def __init__(self, name, held, inner, groups=None):
        super().__init__([p for o in inner for g in o.param_groups for p in g["params"]], {})
        setattr(self, name, held(inner))
        self.inner = lambda: inner  # which nobody can see
        if groups:  # shared with the only one, as SAM does
            self.param_groups = inner[0].param_groups

    @torch.no_grad()
    def step(self, closure=None):
        for optimizer in self.inner():
            optimizer.step()


class Lookahead(Around):
    """Every second step goes half of the way back, in weights of its own."""

    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", torch.zeros_like(p))
            slow.lerp_(p, 0.5)
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            if self.state[p]["count"] % 2 == 0:
                p.detach().copy_(slow)


KINDS = {
    "torchtitan": lambda inner: Around("optimizers", list, inner),
    "pair": lambda inner: Around("by_kind", lambda some: {"all": (some,)}, inner),
    "torchft": lambda inner: Around("optim", lambda some: some[0], inner[:1]),
    "SAM": lambda inner: Around("base_optimizer", lambda some: some[0], inner[:1], groups=True),
    "Lookahead": lambda inner: Lookahead("optimizer", lambda some: some[0], inner[:1]),
}


def losses(policy, kind=None, shard=False, steps=3):
    """Losses and weights of a training whose AdamW and SGD are inside of a kind, or in a list."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    if shard:
        model = fully_shard(model.bfloat16() if policy in POLICIES[3:] else model)
        policy += ",reduce=bf16" if policy in POLICIES[3:] else ""
    one = kind in ("torchft", "SAM", "Lookahead", None)
    first = AdamW(model.parameters() if one else model[0].parameters(), lr=1e-2)
    inner = [first] if one else [first, SGD(model[2].parameters(), lr=1e-2)]
    given = inner if kind in (None, "list") else KINDS[kind](inner)
    with Precision(policy, model, given) as precision:
        for _ in range(steps):
            with precision.autocast():
                loss = model(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean()
            precision.step(loss)
    return loss.item(), [local_part(p).detach().clone() for p in model.parameters()]


def check(policy, kind, shard=False):
    found, weights = losses(policy, kind, shard)
    if kind == "Lookahead":
        assert found != losses(policy, None, shard)[0]  # its half way back counts, in masters, too
        return
    one = kind in ("torchft", "SAM")
    wanted, same = losses(policy, None if one else "list", shard)
    assert found == wanted
    assert all(map(torch.equal, weights, same))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_made_of_others_trains_as_those_do(kind, policy):
    check(policy, kind)


def sharded(rank, kinds, policies):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    for kind in kinds:
        for policy in policies:
            check(policy, kind, shard=True)
    model = nn.Linear(8, 8)
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    with pytest.raises(PrecisionError, match="ZeroRedundancyOptimizer steps only a part of its 2"):
        Precision("bf16-master", model, zero)
    precision = Precision("fp32", model, zero)
    before = model.weight.detach().clone()
    assert precision.step(model(torch.ones(2, 8)).mean()).applied
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("kinds", "policies"),
    [(["pair"], ["bf16-master"]), pytest.param([*KINDS], POLICIES, marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_so_it_does_over_shards_but_for_zero_with_masters(pool2, kinds, policies):
    pool2.run(sharded, kinds=kinds, policies=policies)


class Idle(SGD):
    """Moves the first ``moves`` weights only, behind torch's version counters."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"][: self.moves]):
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("moves", "rate", "times", "error"),
    [(2, 1.0, 1.0, ""), (1, 1.0, 1.0, "1 of 2 tensors.*bias"), (0, 0.1, 1.0, "2 of 2.*weight"),
     (0, 0.0, 1.0, ""), (0, 1.0, 0.0, ""), (2, 1e-12, 1.0, "")],
)  # fmt: skip
@pytest.mark.parametrize("way", ["fp32", "fp16-mixed", "bf16-master", "scaler"])
def test_a_first_step_that_left_a_weight_is_an_error_that_names_the_optimizer(
    way, moves, rate, times, error
):
    model = nn.Linear(3, 2)
    optimizer = Idle(model.named_parameters(), lr=rate)
    optimizer.moves = moves
    if way == "scaler":
        scaler = GradScaler("cpu", names=model.named_parameters())
        scaler.scale(model(torch.ones(4, 3)).mean() * times).backward()
        take = lambda: scaler.step(optimizer)  # noqa: E731
    else:
        precision = Precision(way, model, optimizer)
        with precision.autocast():
            loss = model(torch.ones(4, 3)).mean() * times
        take = lambda: precision.step(loss)  # noqa: E731
    if error:
        with pytest.raises(PrecisionError, match=r"Idle.step\(\) left " + error):
            take()
    else:
        take()


def test_a_wrapper_without_hooks_of_its_own_is_refused():
    model = nn.Linear(3, 2)
    bare = Optimizer.__new__(type("Bare", (Optimizer,), {"step": lambda self: None}))
    bare.optim = AdamW(model.parameters())
    bare.param_groups = bare.optim.param_groups
    with pytest.raises(PrecisionError, match=r"Bare has no hooks of its own.*give the optimizer"):
        Precision("fp32", model, bare)
    bare.__dict__ |= vars(bare.optim)  # as Lightning does
    with pytest.raises(PrecisionError, match="Bare has no hooks of its own"):
        Precision("fp32", model, bare)
    hidden = types.SimpleNamespace(optim=AdamW(model.parameters()))
    around = Around("engine", lambda _: hidden, [hidden.optim])
    precision = Precision("bf16-master", model, around)
    with precision.autocast():
        loss = model(torch.ones(2, 3)).mean()
    with pytest.raises(PrecisionError, match=r"Around.step\(\) left 2 of 2 tensors"):
        precision.step(loss)
