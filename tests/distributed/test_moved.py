"""An applied step has moved every weight with a gradient, in optimizers made of optimizers, too.

The oracle is the same training with the inner optimizers given in a list: the same bits.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from halfstep import GradScaler, Precision, PrecisionError
from halfstep.precision.masters.local_part import local_part

POLICIES = "fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-pure"


class Around(Optimizer):
    """Steps others, which it holds as ``held``, of any shape, and then may go half-way back."""

    def __init__(self, inner, held=None, shares=False, back=False):
        super().__init__([p for o in inner for g in o.param_groups for p in g["params"]], {})
        self.any_name, self.hidden, self.back = held, lambda: inner, back
        if shares:
            self.param_groups = inner[0].param_groups

    @torch.no_grad()
    def step(self, closure=None):
        for optimizer in self.hidden():
            optimizer.step()
        for p in (p for group in self.param_groups for p in group["params"] * self.back):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            p.lerp_(slow, 0.5)


KINDS = {
    "container": lambda inner: Around(inner, inner),
    "nested": lambda inner: Around(inner, {"by kind": [(o,) for o in inner]}),
    "wrapper": lambda inner: Around(inner[:1], inner[0]),
    "SAM": lambda inner: Around(inner[:1], inner[0], shares=True),
    "Lookahead": lambda inner: Around(inner[:1], inner[0], back=True),
}


def train(policy, kind, shard, inside=True):
    """The loss and the weights of a training by AdamW, and SGD for two of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    if shard:
        low = policy in POLICIES[3:]
        model, policy = (
            fully_shard(model.bfloat16() if low else model),
            policy + ",reduce=bf16" * low,
        )
    two = kind in ("container", "nested")
    inner = [AdamW((model[0] if two else model).parameters(), lr=1e-2)]
    inner += [SGD(model[2].parameters(), lr=1e-2)] * two
    with Precision(policy, model, KINDS[kind](inner) if inside else inner) as precision:
        for _ in range(3):
            with precision.autocast():
                loss = model(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean()
            precision.step(loss)
    return loss.item(), [local_part(p).detach().clone() for p in model.parameters()]


def check(kind, policy, shard=False):
    (found, weights), (wanted, same) = (train(policy, kind, shard, inside=x) for x in (True, False))
    if kind == "Lookahead":  # whose own part must count
        assert found != wanted
    else:
        assert found == wanted
        assert all(map(torch.equal, weights, same))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_made_of_others_trains_as_those_do(kind, policy):
    check(kind, policy)


def sharded(rank, kinds, policies):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    for kind in kinds:
        for policy in policies:
            check(kind, policy, shard=True)
    model = nn.Linear(8, 8)
    zero, before = ZeroRedundancyOptimizer(model.parameters(), AdamW), model.weight.tolist()
    with pytest.raises(PrecisionError, match="ZeroRedundancyOptimizer steps only a part of its 2"):
        Precision("bf16-master", model, zero)
    assert Precision("fp32", model, zero).step(model(torch.ones(2, 8)).mean()).applied
    assert model.weight.tolist() != before


@pytest.mark.parametrize(
    ("kinds", "policies"),
    [(["nested"], ["bf16-master"]), pytest.param([*KINDS], POLICIES, marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_so_it_does_over_shards_but_for_zero_with_masters(pool2, kinds, policies):
    pool2.run(sharded, kinds=kinds, policies=policies)


class Idle(SGD):
    """Moves the first ``moves`` weights only, behind torch's version counters."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"][: self.moves]:
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("moves", "rate", "times", "error"),
    [(2, 1.0, 1.0, ""), (1, 1.0, 1.0, "1 of 2 tensors.*bias"), (0, 0.1, 1.0, "2 of 2.*weight"),
     (0, 0.0, 1.0, ""), (0, 1.0, 0.0, ""), (2, 1e-12, 1.0, "")],
)  # fmt: skip
@pytest.mark.parametrize("way", ["fp32", "fp16-mixed", "bf16-master", "scaler"])
def test_a_first_step_that_leaves_a_weight_names_the_optimizer(way, moves, rate, times, error):
    model = nn.Linear(3, 2)
    optimizer = Idle(model.named_parameters(), lr=rate)
    optimizer.moves = moves
    if way == "scaler":
        scaler = GradScaler("cpu", names=model.named_parameters())
        scaler.scale(model(torch.ones(4, 3)).mean() * times).backward()
    else:
        precision = Precision(way, model, optimizer)
        with precision.autocast():
            loss = model(torch.ones(4, 3)).mean() * times
    raises = pytest.raises(PrecisionError, match=r"Idle.step\(\) left " + error)
    with raises if error else contextlib.nullcontext():
        scaler.step(optimizer) if way == "scaler" else precision.step(loss)


def test_a_wrapper_without_hooks_of_its_own_is_refused():
    model = nn.Linear(3, 2)
    inner = AdamW(model.parameters())
    bare = Optimizer.__new__(type("Bare", (Optimizer,), {"step": lambda self: None}))
    for held in ({"optim": inner, "param_groups": inner.param_groups}, vars(inner)):
        bare.__dict__ |= held
        with pytest.raises(PrecisionError, match=r"Bare has no hooks of its own.*give the optimi"):
            Precision("fp32", model, bare)
    precision = Precision("bf16-master", model, Around([inner]))  # which nobody can see
    with precision.autocast():
        loss = model(torch.ones(2, 3)).mean()
    with pytest.raises(PrecisionError, match=r"Around.step\(\) left 2 of 2 tensors"):
        precision.step(loss)
