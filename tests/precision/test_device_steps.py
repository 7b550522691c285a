"""Steps of stock optimizers that the device decides about, on a CPU that is asked as a GPU is."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import halfstep.precision.masters.stepping as stepping
from halfstep.errors import NonFiniteError
from halfstep.precision.step import Precision

SCALED = "scale=dynamic,init_scale=256,growth_interval=2"
KINDS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "two": lambda p: [torch.optim.AdamW(p[:1], fused=True), torch.optim.SGD(p[1:], fused=True)],
}


class Heeding(torch.optim.Optimizer):
    """A stranger's sign descent that heeds a GradScaler's tensors."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            state = self.state[p]
            state.setdefault("moved", p.new_zeros(()))
            moves = 1 - getattr(self, "found_inf", p.new_zeros(()))
            state["moved"] += moves
            p.data.sub_(torch.where(moves > 0, 0.01 * p.grad.sign(), 0))


KINDS["stranger"] = lambda p: Heeding(p, {})


@pytest.fixture
def decided(monkeypatch):
    """Max norms of the steps that were decided as on a GPU."""
    seen, decide = [], stepping.decide_by_torch
    monkeypatch.setattr(stepping, "_waits_for_host", lambda device: True)
    monkeypatch.setattr(
        stepping, "decide_by_torch", lambda *given: (seen.append(given[2]), decide(*given))[1]
    )
    return seen


class Run:
    """A Precision over a small model, and one step of it."""

    def __init__(self, policy, make, *, host=False, device="cpu"):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).to(device)
        self.batches = torch.randn(8, 6, 8).to(device)
        made = make([*self.model.parameters()])
        self.optimizers = made if isinstance(made, list) else [made]
        self.precision = Precision(policy, self.model, made)
        if host:
            self.precision._steps._path = None

    def step(self, number, fault=None, **options):
        with self.precision.autocast():
            loss = self.model(self.batches[number]).float().square().mean()
        self.precision.backward(loss)
        if fault is not None:
            self.model[0].weight.grad[0].fill_(fault)
        return self.precision.step(**options)

    def everything(self):
        states = [o.state_dict()["state"] for o in self.optimizers]
        held = [v for state in states for entry in state.values() for v in entry.values()]
        masters = dict(self.precision.masters.items())
        return [v.clone() for v in [*self.model.parameters(), *held, *masters.values()]]


def alike(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("policy", [f"fp16-mixed,{SCALED}", f"bf16-master,{SCALED}", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_host_s_training(kind, policy, decided):
    ours, theirs = Run(policy, KINDS[kind]), Run(policy, KINDS[kind], host=True)
    faults = {0: math.inf, 2: math.inf, 3: math.nan, 5: -math.inf} if "dynamic" in policy else {}
    for number in range(8):
        before = ours.everything()
        # norms that clip nothing, so that bits can be compared
        a, b = (run.step(number, faults.get(number), max_norm=1e6) for run in (ours, theirs))
        assert a.applied is b.applied is (number not in faults)
        assert alike(ours.everything(), before) is not a.applied
        assert alike(ours.everything(), theirs.everything())
        assert (a.loss, a.reason, a.next_loss_scale) == (b.loss, b.reason, b.next_loss_scale)
        assert a.nonfinite_parameters == b.nonfinite_parameters
        assert not a.applied or math.isclose(a.grad_norm, b.grad_norm, rel_tol=1e-6)
    # the first that is applied makes the state, and only what is without a state needs no first
    assert len(decided) == 8 if kind == "sgd" else len(decided) in (6, 7)


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_gradients_are_clipped_as_they_are_read(kind, decided):
    ours, theirs = Run("fp32", KINDS[kind]), Run("fp32", KINDS[kind], host=True)
    for number in range(6):
        for run in (ours, theirs):
            assert run.step(number, max_norm=0.01).applied
    for a, b in zip(ours.everything(), theirs.everything(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)  # a quotient, and an fp32 factor
    assert decided == [0.01] * 5


def test_an_error_comes_with_what_is_asked_next(decided):
    for ask in (
        lambda run, result: result.applied,
        lambda run, result: run.step(3),
        lambda run, result: run.precision.progress,
        lambda run, result: run.optimizers[0].state_dict(),
        lambda run, result: run.optimizers[1].load_state_dict({}),
        lambda run, result: run.precision.close(),
    ):
        run = Run("bf16-mixed", KINDS["two"])
        run.step(0), run.step(1)
        before = run.everything()
        result = run.step(2, math.inf)
        with pytest.raises(NonFiniteError, match=r"inf in the gradients of 0\.weight"):
            ask(run, result)
        assert alike(before, run.everything()[: len(before)])


def test_who_is_left_to_the_host(decided, monkeypatch):
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)

    class Plain(torch.optim.AdamW):
        pass

    def hooked(p):
        optimizer = torch.optim.SGD(p, lr=0.1, fused=True)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    def wrapped(p):
        optimizer = torch.optim.SGD(p, lr=0.1, fused=True)
        optimizer.step = functools.wraps(optimizer.step)(lambda step=optimizer.step: step())
        return optimizer

    def scaled_by_hand(p):
        optimizer = torch.optim.SGD(p, lr=0.1, fused=True)
        optimizer.grad_scale = torch.tensor(2.0)
        return optimizer

    def scheduled(p):
        optimizer = torch.optim.SGD(p, lr=0.1, fused=True)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step, too
        return optimizer

    for make, there in (
        (lambda p: torch.optim.AdamW(p, foreach=True), False),
        (lambda p: torch.optim.RMSprop(p), False),
        (lambda p: [torch.optim.SGD(p[:1], fused=True), torch.optim.SGD(p[1:])], False),
        (lambda p: Own(p, fused=True), False),
        (hooked, False),
        (wrapped, False),
        (scaled_by_hand, False),
        (lambda p: Plain(p, fused=True), True),
        (scheduled, True),
    ):
        decided.clear()
        run = Run("fp32", make)
        assert run.step(0).applied is run.step(1).applied is True
        assert bool(decided) is there, make
    with monkeypatch.context() as patched:  # a hook on every optimizer
        patched.setitem(_global_optimizer_post_hooks, 0, lambda *_: None)
        decided.clear()
        run = Run("fp32", KINDS["sgd"])
        assert run.step(0).applied
        assert not decided
    # one whose state is loaded from an unfused optimizer's goes on as that does
    run, other = Run("fp32", KINDS["adamw"]), Run("fp32", lambda p: torch.optim.AdamW(p))
    other.step(0)
    run.optimizers[0].load_state_dict(other.optimizers[0].state_dict())
    decided.clear()
    assert run.step(1).applied
    assert not decided


def test_huge_and_tiny_gradients_are_finite_and_no_zeros(decided):
    for value in (1e30, 3e38, 1e-30, 1e-44):
        p = nn.Linear(1, 70000, bias=False)
        precision = Precision("fp32", p, torch.optim.SGD(p.parameters(), lr=0.1, fused=True))
        precision.backward(p.weight.sum())
        p.weight.grad.fill_(value)
        exact = float(p.weight.grad[0].double()) * math.sqrt(70000)
        result = precision.step(max_norm=0.1)
        assert math.isclose(result.grad_norm, exact, rel_tol=1e-12)
        assert p.weight.isfinite().all()
