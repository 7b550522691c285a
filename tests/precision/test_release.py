"""Gradients released during backward: the same bits as without, few gradients at once, refusals."""

import copy
import gc
import math
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import (
    EMA,
    LostUpdateMeter,
    MemoryMeter,
    NonFiniteError,
    Precision,
    PrecisionError,
    Recorder,
    estimate,
    first_cause,
    watch,
)
from halfstep.optim import SGD, Adafactor, AdamW, Lion, Muon, muon_groups
from reference.training import differences, through_a_file

SPLIT = "bf16-split24,moments=8bit"
POLICIES = [
    *("fp32", "bf16-mixed", "bf16-master", "bf16-pure", "bf16-split", "bf16-split24"),
    *("bf16-kahan", "bf16-sr", SPLIT, "bf16-sr,moments=bf16"),
    "bf16-split,recipe=mxfp8,simulate=yes,keep_bf16=unused",
]
MAKE = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "lion": lambda model: Lion(model.parameters(), lr=1e-3),
    "muon": lambda model: Muon(muon_groups(model), lr=0.01),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.01),
}


class Net(nn.Module):
    """A tied embedding, a layer used twice, a frozen layer and one that no loss reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.twice = nn.Linear(32, 32)
        self.last = nn.Linear(32, 32)
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = self.last(x) + self.frozen(x)
        return nn.functional.linear(x, self.embed.weight)


def build(policy=SPLIT, optimizer="adamw", release=True, **options):
    model = Net()
    made = MAKE[optimizer](model)
    return model, made, Precision(policy, model, made, release_gradients=release, **options)


def loss_of(model, precision, number=0):
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(number))
    with precision.autocast():
        logits = model(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def everything(model, optimizer, precision):
    found = optimizer.state_dict()["state"]  # made in backward's order
    states = {number: dict(sorted(found[number].items())) for number in sorted(found)}
    return {"model": model.state_dict(), "optimizer": states, "precision": precision.state_dict()}


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        *((policy, "adamw") for policy in POLICIES),
        *((SPLIT, name) for name in ("sgd", "lion", "muon")),
        *(("bf16-sr", name) for name in ("lion", "muon")),
        ("bf16-sr,moments=fp32", "adafactor"),
        *(("bf16-master", name) for name in ("muon", "adafactor")),
        ("fp32", "sgd"),
    ],
)
def test_a_run_has_the_bits_of_one_without(policy, optimizer):
    kept, released = (build(policy, optimizer, release) for release in (False, True))
    for number in range(9):  # 8-bit moments look at step 8 whether they must become bf16
        results = []
        for model, _, precision in (kept, released):
            results.append(precision.step(loss_of(model, precision, number)))
        one, other = results
        assert other.applied
        assert (one.loss, one.skipped_total) == (other.loss, other.skipped_total)
        # fp32 sums of 9 tensors against an fp64 sum of their fp32 norms
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
    assert differences(everything(*kept), everything(*released)) == []


def test_the_update_is_made_during_backward():
    model, optimizer, precision = build()
    before = copy.deepcopy(model.state_dict())
    loss = loss_of(model, precision)
    precision.backward(loss)
    changed = {n for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == {n for n in before if not n.startswith(("unused", "frozen"))}
    assert optimizer.state[model.embed.weight]["step"] == 1  # tied: one update for both uses
    precision.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(PrecisionError, match=r"without backward"):
        precision.step()


@pytest.fixture
def alive(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from release_cpu import GradientsAlive

    yield GradientsAlive
    sys.modules.pop("release_cpu", None)


def test_few_gradients_are_alive_at_once(alive):
    """Of 16 layers: all without release, and with it those of one layer and the next."""
    peaks = {}
    layer = 64 * 64 + 64
    for release in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
        optimizer = AdamW(model.parameters())
        precision = Precision("fp32", model, optimizer, release_gradients=release)
        for _ in range(2):
            with precision.autocast():
                loss = model(torch.ones(8, 64)).square().mean()
            counted = alive(loss)
            precision.step(loss)
        peaks[release] = counted.peak
    assert peaks[False] == 16 * layer * 4
    assert 64 * 64 * 4 <= peaks[True] <= 2 * layer * 4


def test_a_gradient_is_gone_after_its_update():
    model, _, precision = build()
    seen = []
    for parameter in (model.last.weight, model.twice.weight):
        parameter.register_hook(lambda gradient: seen.append(weakref.ref(gradient)))
    precision.step(loss_of(model, precision))
    assert len(seen) == 2
    assert all(gradient() is None for gradient in seen)


def test_schedules_averages_and_the_meter_see_a_step():
    runs = []
    for release in (False, True):
        model = Net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        ema = EMA(model, 0.9)
        precision = Precision(
            SPLIT,
            model,
            optimizer,
            schedulers=[schedule],
            ema=ema,
            release_gradients=release,
        )
        meter = LostUpdateMeter(precision, every=3, samples=10**6)
        lost = []
        for number in range(7):
            precision.step(loss_of(model, precision, number))
            lost += [(r.step, r.lost, r.group) for r in meter.report()] if meter.fresh else []
        rate = optimizer.param_groups[0]["lr"]
        runs.append(({"average": ema.averages, "rate": rate}, lost, precision.applied_total))
        meter.close()
    assert differences(runs[0][0], runs[1][0]) == []
    assert runs[0][1:] == runs[1][1:]
    assert [step for step, *_ in runs[1][1]] == [3, 6]
    assert runs[1][0]["rate"] == 0.01 / 8


def test_a_lost_update_is_counted_in_parts():
    """bf16 weights of 1 that are rounded to nearest lose an update of 1e-3, in every tensor."""
    model = nn.Sequential(nn.LayerNorm(64), nn.LayerNorm(64))
    optimizer = SGD(model.parameters(), lr=1e-6)
    precision = Precision("bf16-pure", model, optimizer, release_gradients=True)
    meter = LostUpdateMeter(precision, every=1)
    with precision.autocast():
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        loss = model(x).float().square().mean()
    precision.step(loss)
    (report,) = meter.report()
    assert report.lost > 0.4  # the gains; the zeros of the biases lose nothing


@pytest.mark.parametrize("policy", [SPLIT, "bf16-master", "bf16-sr"])
def test_a_run_resumes_bit_for_bit(policy):
    whole = build(policy)
    for number in range(3):
        whole[2].step(loss_of(whole[0], whole[2], number))
    model, optimizer, precision = whole
    saved = through_a_file(
        {"m": model.state_dict(), "o": optimizer.state_dict(), "p": precision.state_dict()}
    )
    model, optimizer, precision = build(policy)
    model.load_state_dict(saved["m"])
    optimizer.load_state_dict(saved["o"])
    precision.load_state_dict(saved["p"])
    for number in (3, 4):
        precision.step(loss_of(model, precision, number))
        whole[2].step(loss_of(whole[0], whole[2], number))
    assert differences(everything(*whole), everything(model, optimizer, precision)) == []


def test_several_optimizers_and_late_parameters():
    """Two optimizers that step together; a layer is unfrozen and added to one of them."""
    runs = []
    for release in (False, True):
        model = Net()
        first = AdamW([model.embed.weight, *model.norm.parameters()], lr=0.01)
        second = SGD([*model.twice.parameters(), *model.last.parameters()], lr=0.1)
        precision = Precision("bf16-split", model, [first, second], release_gradients=release)
        precision.step(loss_of(model, precision))
        model.frozen.requires_grad_(True)
        second.add_param_group({"params": [*model.frozen.parameters()]})
        for number in (1, 2):
            precision.step(loss_of(model, precision, number))
        runs.append([model.state_dict(), precision.state_dict()])
    assert differences(*runs) == []


def test_checkpointed_blocks_are_as_without():
    runs = []
    for release in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        optimizer = AdamW(model.parameters(), lr=0.01)
        precision = Precision("bf16-split", model, optimizer, release_gradients=release)
        for _ in range(3):
            with precision.autocast():
                x = torch.ones(4, 16)
                for layer in model:
                    x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x,
                                   use_reentrant=False)  # fmt: skip
                loss = x.float().square().mean()
            precision.step(loss)
        runs.append(model.state_dict())
    assert differences(*runs) == []


# What cannot be undone, and is told


def test_a_gradient_that_is_not_finite_stops_the_updates():
    """The last layer's gradients are complete first; NaN arrives in the layer before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = AdamW(model.parameters(), lr=0.1)
    precision = Precision("bf16-split", model, optimizer, release_gradients=True)
    before = copy.deepcopy(model.state_dict())
    model[1].weight.register_hook(lambda gradient: gradient * math.nan)
    with precision.autocast():
        loss = model(torch.ones(2, 4)).float().square().mean()
    with pytest.raises(
        NonFiniteError, match=r"had updated [23] parameters during backward"
    ) as told:
        precision.step(loss)
    assert told.value.parameters == ("1.weight",)
    assert "go on from a checkpoint" in str(told.value)
    assert "weights are unchanged" not in str(told.value)
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"2.weight", "2.bias"} <= changed <= {"2.weight", "2.bias", "1.bias"}
    assert f"updated {len(changed)} parameters" in str(told.value)
    assert (precision.applied_total, precision.skipped_total) == (0, 1)
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_not_finite_updates_nothing():
    model, optimizer, precision = build()
    before = copy.deepcopy(everything(model, optimizer, precision)["model"])
    with pytest.raises(NonFiniteError, match="the weights are unchanged") as told:
        precision.step(loss_of(model, precision) * math.inf)
    assert told.value.cause == "forward"
    assert differences(before, model.state_dict()) == []
    assert precision.step(loss_of(model, precision)).applied


def test_the_first_cause_is_found_and_changes_nothing():
    model, _, precision = build()
    before = copy.deepcopy(model.state_dict())
    assert first_cause(precision, lambda: loss_of(model, precision) / 0) is not None
    assert differences(before, model.state_dict()) == []
    precision.backward(loss_of(model, precision))
    assert precision.has_loss
    assert precision.step().applied


def test_a_backward_that_fails_tells_what_it_has_done():
    model, optimizer, precision = build()
    saved = through_a_file(
        {"m": model.state_dict(), "o": optimizer.state_dict(), "p": precision.state_dict()}
    )

    def fail(_):
        raise RuntimeError("out of memory")

    handle = model.norm.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory") as told:
        precision.backward(loss_of(model, precision))
    (note,) = told.value.__notes__
    assert "4 parameters have been updated already" in note  # last and twice
    handle.remove()
    with pytest.raises(PrecisionError, match="a backward that did not end"):
        precision.step()
    with pytest.raises(PrecisionError, match="a second backward"):
        precision.backward(loss_of(model, precision))
    model.load_state_dict(saved["m"])
    optimizer.load_state_dict(saved["o"])
    precision.load_state_dict(saved["p"])
    precision.step(loss_of(model, precision))
    whole = build()
    whole[2].step(loss_of(whole[0], whole[2]))
    assert differences(everything(*whole), everything(model, optimizer, precision)) == []


def test_a_backward_that_fails_at_once_may_be_repeated():
    model, _, precision = build()
    handle = model.last.weight.register_hook(lambda _: 1 / 0)
    other = model.last.bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        precision.backward(loss_of(model, precision))
    handle.remove(), other.remove()
    assert precision.step(loss_of(model, precision)).applied


def test_a_shared_layer_under_reentrant_checkpoints_is_refused():
    model = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters())
    precision = Precision("fp32", model, optimizer, release_gradients=True)
    x = torch.ones(2, 4, requires_grad=True)
    with precision.autocast():
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=True)
        loss = x.square().mean()
    with pytest.raises(PrecisionError, match="use_reentrant=False"):
        precision.backward(loss)


def test_a_weight_that_backward_still_needs_is_noticed():
    """A detached use saves the weight for the input's gradient; autograd sees that it changed."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = AdamW(model.parameters())
    precision = Precision("fp32", model, optimizer, release_gradients=True)
    x = torch.ones(2, 4, requires_grad=True)
    with precision.autocast():
        loss = model(x @ model.weight.detach()).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        precision.backward(loss)


# Refusals


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("fp16-mixed", {}, "its loss scale skips a step"),
        ("bf16-mixed,scale=static,init_scale=8", {}, "its loss scale skips a step"),
        (SPLIT, {"on_nonfinite": "skip:3"}, "on_nonfinite=skip:3"),
        (SPLIT, {"on_nonfinite": "rollback:3"}, "on_nonfinite=rollback:3"),
        (SPLIT, {"on_spike": "skip:3"}, "on_spike=skip:3"),
        (SPLIT, {"on_spike": "stop"}, "on_spike=stop"),
    ],
)
def test_what_undoes_a_step_is_refused(policy, options, words):
    with pytest.raises(PrecisionError, match=f"release_gradients=True with .*{words}"):
        build(policy, **options)


def test_other_optimizers_ranks_and_values_are_refused():
    model = Net()
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.LBFGS(model.parameters())):
        with pytest.raises(PrecisionError, match=f"{type(optimizer).__name__}, which steps all"):
            Precision("fp32", model, optimizer, release_gradients=True)

    class Several:
        measure = cannot = worst_ = parts_of = union = lambda *_: None
        worst = lambda self, marks: list(marks)  # noqa: E731

    optimizer = AdamW(model.parameters())
    with pytest.raises(PrecisionError, match="on several ranks"):
        Precision("fp32", model, optimizer, release_gradients=True, ranks=Several())
    with pytest.raises(PrecisionError, match="allowed: True or False"):
        Precision("fp32", model, optimizer, release_gradients="yes")


def test_calls_that_need_all_gradients_are_refused():
    model, optimizer, precision = build()
    loss = loss_of(model, precision)
    with pytest.raises(PrecisionError, match=r"step\(max_norm=1\)"):
        precision.step(loss, max_norm=1.0)
    with pytest.raises(PrecisionError, match=r"step\(closure\)"):
        precision.step(lambda: loss)
    for options in ({"retain_graph": True}, {"create_graph": True}):
        with pytest.raises(PrecisionError, match="over the same graph"):
            precision.backward(loss, **options)
    with pytest.raises(PrecisionError, match="release_gradients"):
        precision.captured(lambda: None)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(PrecisionError, match="step hooks"):
        precision.backward(loss)
    handle.remove()
    loss_of(model, precision).backward()  # by hand: a full set of gradients
    with pytest.raises(PrecisionError, match="gradients are there before the backward"):
        precision.backward(loss)
    model.zero_grad()
    assert precision.step(loss).applied


def test_between_backward_and_step():
    model, optimizer, precision = build()
    precision.backward(loss_of(model, precision))
    with pytest.raises(PrecisionError, match="this gradient is gone"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(PrecisionError, match="this gradient is gone"):
        model.last.weight.grad.mul_(0)
    assert repr(model.last.weight.grad) == "ReleasedGradient()"
    assert model.unused.weight.grad is None
    with pytest.raises(PrecisionError, match="a second backward"):
        precision.backward(loss_of(model, precision, 1))
    with pytest.raises(PrecisionError, match=r"discard\(\) between"):
        precision.discard()
    with pytest.raises(PrecisionError, match=r"state_dict\(\) between"):
        precision.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(PrecisionError, match="a learning rate was changed"):
        precision.step()
    assert precision.step(loss_of(model, precision)).applied
    saved = precision.state_dict()
    precision.backward(loss_of(model, precision))
    precision.load_state_dict(saved)
    assert model.last.weight.grad is None
    assert not precision.has_loss
    assert precision.step(loss_of(model, precision)).applied


def test_averages_in_place_of_weights_are_not_trained():
    model = Net()
    ema = EMA(model, 0.9)
    precision = Precision(SPLIT, model, AdamW(model.parameters()), ema=ema, release_gradients=True)
    loss = loss_of(model, precision)
    with ema.applied_to(model), pytest.raises(PrecisionError, match="applied_to"):
        precision.backward(loss)
    assert precision.step(loss_of(model, precision)).applied


def test_a_loss_of_inputs_alone_updates_nothing():
    model, _, precision = build("fp32")
    x = torch.ones(2, 32, requires_grad=True)
    before = copy.deepcopy(model.state_dict())
    with precision.autocast():
        loss = model.twice(x).square().mean()
    precision.backward(loss, inputs=[x])
    assert x.grad is not None
    assert differences(before, model.state_dict()) == []


def test_watchers_and_captures_are_refused(tmp_path):
    model, _, precision = build()
    with pytest.raises(PrecisionError, match="release_gradients"):
        watch(model, precision)
    with pytest.raises(PrecisionError, match="captures=0"):
        Recorder(precision, tmp_path, captures=1)
    with Recorder(precision, tmp_path) as recorder:
        recorder.batch(torch.ones(1))
        assert recorder.step(precision.step(loss_of(model, precision))).applied


# Memory, as values


def test_meter_and_estimate_count_one_gradient():
    model, _, precision = build()
    precision.step(loss_of(model, precision))
    with MemoryMeter(precision) as meter:
        precision.step(loss_of(model, precision))
    with MemoryMeter(precision) as idle:
        pass
    assert idle.memory.part("gradients") == 0
    largest = 64 * 32 * 2  # the embedding, bf16
    assert meter.memory.bytes["gradients"] == {"bf16": largest}
    guess = estimate(Net(), SPLIT, None, release_gradients=True)
    for part in ("weights", "masters", "gradients", "moments"):
        assert guess.part(part) == pytest.approx(meter.memory.part(part), rel=0.05), part
    with pytest.raises(PrecisionError, match="loss scale"):
        estimate(Net(), "fp16-mixed", None, release_gradients=True)
    with pytest.raises(PrecisionError, match="allowed: 1 and 1"):
        estimate(Net(), SPLIT, None, release_gradients=True, micro_batches=2)


# What a step costs


class Many(nn.Module):
    """Many tiny parameters, in the order in which their gradients arrive or not."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(4) for _ in range(count)])

    def forward(self):
        return sum(weight.float().square().sum() for weight in self.weights)


def calls_of_a_step(policy, count, optimizers, metered):
    """How many functions the third step calls, of Python and of C alike."""
    gc.collect()  # each Precision that another test has left looks at every step
    model = Many(count)
    parameters = [*model.parameters()]
    made = [AdamW(parameters[at::optimizers], lr=0.01) for at in range(optimizers)]
    precision = Precision(policy, model, made, release_gradients=True)
    meter = LostUpdateMeter(precision, every=1) if metered else None
    called = 0

    def count_calls(_, event, __):
        nonlocal called
        called += event in ("call", "c_call")

    gc.disable()  # it would call what it finds to free
    try:
        for _ in range(3):
            called = 0
            with precision.autocast():
                loss = model()
            sys.setprofile(count_calls)
            precision.step(loss)
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
        gc.enable()
    if meter is not None:
        meter.close()
    precision.close()
    return called


@pytest.mark.parametrize(
    ("policy", "optimizers", "metered"),
    [
        *(("bf16-split", 1, False), ("bf16-split", 2, False), ("bf16-master", 1, False)),
        *(("bf16-master", 2, False), (SPLIT, 1, True), ("bf16-split", 1, True)),
    ],
)
def test_the_cost_of_a_step_grows_with_the_parameters_not_with_their_square(
    policy, optimizers, metered
):
    """Twice the difference of parameters makes twice the difference of calls: 2.6 to 3.6 before."""
    other = nn.Linear(2, 2)  # its Precision does not look at each parameter in each part either
    beside = Precision("bf16-split", other, AdamW(other.parameters()))
    few, more, most = (
        calls_of_a_step(policy, count, optimizers, metered) for count in (40, 80, 160)
    )
    # a hundredth for what is called by the way, as where a dict of torch grows
    assert (most - more) / (more - few) == pytest.approx(2, rel=0.01)
    beside.close()
