"""Layer health: a diverging layer is named long before a NaN, and healthy programs never are."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from tests.diagnostics.health_programs import (
    HEALTHY,
    Convolutions,
    Recurrent,
    Transformer,
    experts,
    gan,
    images,
    language,
    mlp,
    next_token,
    regression,
    sgd,
)
from torch import nn
from torch._dynamo.testing import CompileCounter

from halfstep import LayerHealth, NonFiniteError, Precision, SpikeError
from halfstep.diagnostics.health import _Past
from halfstep.trainer.models import GPTConfig
from halfstep.trainer.models.gpt import GPT

AT = 100  # the step at which a fault begins


def grow(layer, by, what="weight", row=slice(None)):
    """Multiply a layer's parameter, or a row of it, after each step."""

    def fault(model, optimizers, step):
        if step >= AT:
            with torch.no_grad():
                getattr(model.get_submodule(layer), what)[row] *= by

    return layer, fault


def gain(layer, by):
    """Multiply what a module multiplies by: a residual branch, or a query."""

    def fault(model, optimizers, step):
        if step >= AT:
            model.get_submodule(layer).gain *= by

    return layer, fault


def rate(layer, times):
    """Raise the learning rate of one layer."""

    def fault(model, optimizers, step):
        if step == AT:
            group = optimizers[0].param_groups[0]
            own = {id(p) for p in model.get_submodule(layer).parameters()}
            mine = [p for p in group["params"] if id(p) in own]
            group["params"] = [p for p in group["params"] if id(p) not in own]
            optimizers[0].param_groups.append({**group, "params": mine, "lr": group["lr"] * times})

    return layer, fault


def bert():
    return language(causal=False)


def convolutions():
    return images(Convolutions(), sgd(0.05))


def recurrent():
    return language(model=Recurrent(), clip=1.0)


PLANTED = [
    ("MLP of a GPT", language, *grow("blocks.1.mlp.0", 1.1)),
    ("head of a GPT", language, *grow("head", 1.05)),
    ("query of a GPT", language, *grow("blocks.1.attn.q_proj", 1.2)),
    ("output of attention", language, *grow("blocks.0.attn.out", 1.03)),
    ("row of an embedding", language, *grow("emb", 1.2, row=5)),
    ("gain of a norm", language, *grow("blocks.0.norm2", 1.1)),
    ("last norm", language, *grow("norm", 1.08)),
    ("positions", language, *grow("pos", 1.1)),
    ("learning rate of a layer", language, *rate("blocks.1.mlp.2", 100)),
    ("residual branch", language, *gain("blocks.1", 1.15)),
    ("attention logits", language, *gain("blocks.1.attn", 1.2)),
    ("value of a BERT", bert, *grow("blocks.0.attn.v_proj", 1.1)),
    ("bias of a BERT", bert, *grow("blocks.1.mlp.0", 1.2, "bias")),
    ("patches of a ViT", images, *grow("emb", 1.1)),
    ("convolution", convolutions, *grow("c3", 1.1)),
    ("BatchNorm", convolutions, *grow("b2", 1.1)),
    ("recurrent weight", recurrent, *grow("lstm", 1.05, "weight_hh_l1")),
    ("learning rate of an LSTM's head", recurrent, *rate("head", 100)),
    ("MLP", regression, *grow("2", 1.05)),
    ("learning rate in an MLP", regression, *rate("4", 100)),
    ("router", experts, *grow("router", 1.1)),
    ("expert", experts, *grow("experts.2.0", 1.2)),
    ("generator of a GAN", gan, *grow("g.2", 1.1)),
    ("post-LN", lambda: language(post=True), *grow("blocks.0.mlp.2", 1.1)),
]
QUICK = (
    "head of a GPT",
    "attention logits",
    "learning rate in an MLP",
    "curriculum of scale",
    "DQN",
)


def cases(named):
    slow = pytest.mark.slow
    return [pytest.param(*c, id=c[0], marks=() if c[0] in QUICK else slow) for c in named]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize(("name", "program", "layer", "fault"), cases(PLANTED))
def test_the_planted_layer_is_named_before_a_nan(name, program, layer, fault, every):
    torch.manual_seed(1)
    run, told = program(), []
    model, optimizers = next(run)
    with LayerHealth(model, optimizers, every=every, tell=told.append) as health:
        for step in range(AT + 200):
            fault(model, optimizers, step)
            loss = next(run)
            if health.alarms and step >= health.alarms[0].step + 20:
                break
            assert math.isfinite(loss), health
    assert health.alarms, "none"
    assert health.alarms[0].layer == layer, health
    assert health.alarms[0].since > AT
    assert told[0].startswith(f"{layer}: ")


@pytest.mark.parametrize(("name", "program"), cases([*HEALTHY.items()]))
@pytest.mark.parametrize("every", [1, 10, 100])
def test_healthy_programs_are_left_alone(name, program, every):
    torch.manual_seed(0)
    run = program()
    with LayerHealth(*next(run), every=every, tell=pytest.fail):
        for _ in range(300):
            next(run)


def small(policy="fp32", **options):
    torch.manual_seed(0)
    model = mlp(4, 8, 8, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, Precision(policy, model, optimizer, **options)


def train(model, precision, first, last, spoil=lambda step, model: 1.0):
    results = []
    for step in range(first, last):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        with precision.autocast():
            loss = (model(x)[:, 0] - x[:, 0]).square().mean() * spoil(step, model)
        results.append(precision.step(loss, max_norm=1.0))
    return results


def diverge(step, model):
    if step >= 60:
        model[2].weight.data.mul_(1.3)
    return 1.0


def test_the_numbers_are_those_of_their_definitions(tmp_path):
    model = Transformer(layers=1, causal=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randint(0, 31, (2, 6))
    model.emb.weight.data[:, 0] = torch.tensor([8.0] * 31 + [-9.0])  # both ends are a largest
    seen = {}
    for name in ("emb", "blocks.0.attn.q_proj", "blocks.0.attn.k_proj"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, a, out, n=name: seen.update({n: out.detach()}))
    with LayerHealth(model, optimizer, to=tmp_path / "health.jsonl"):
        F.softmax(model(x), -1).square().mean().backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    found = json.loads((tmp_path / "health.jsonl").read_text())["layers"]
    old, new = before["emb.weight"], model.emb.weight.detach()
    assert found["emb"]["weight"] == pytest.approx(float(old.abs().max()), rel=1e-3)
    assert found["emb"]["gradient"] == pytest.approx(float(model.emb.weight.grad.norm()), rel=1e-3)
    ratio = float((new - old).norm() / old.norm())
    assert found["emb"]["update"] == pytest.approx(ratio, rel=1e-3)
    assert found["emb"]["activation"] == pytest.approx(float(seen["emb"].abs().max()), rel=1e-3)
    q, k = (seen[f"blocks.0.attn.{n}_proj"].unflatten(-1, (2, 16)) for n in "qk")
    bound = float(q.norm(dim=-1).max() * k.norm(dim=-1).max() / 4)
    assert found["blocks.0.attn"]["logit"] == pytest.approx(bound, rel=1e-3)
    assert float(torch.einsum("bqhd,bkhd->bhqk", q, k).max() / 4) <= bound
    assert F.softmax.__name__ == "softmax"  # given back


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master"])
def test_steps_stay_what_they_are(policy):
    """In halfstep's GPT, too, whose blocks run as one where nobody's hooks are active."""
    runs, shape = [], GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64)
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
    for healthy in (False, True):
        torch.manual_seed(0)
        model = GPT(shape)
        precision = Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.1))
        health = LayerHealth(model, precision, every=2) if healthy else None
        runs.append([])
        for _ in range(20):
            with precision.autocast():
                loss = next_token(model, tokens)
            runs[-1].append(precision.step(loss, max_norm=1.0))
        runs[-1] += [p.detach() for p in model.parameters()]
        if health is not None:
            health.close()
            assert not any("step" in vars(one) for one in (precision, precision.masters))
    assert runs[0][:20] == runs[1][:20]
    assert all(map(torch.equal, runs[0][20:], runs[1][20:]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["model", "method", "loss"])
def test_nothing_is_compiled_again(how):
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = CompileCounter()
    called, loss = model, next_token
    if how == "model":
        called = torch.compile(model, backend=counter, fullgraph=True)
    elif how == "method":
        model.compile(backend=counter, fullgraph=True)
    else:
        loss = torch.compile(next_token, backend=counter, fullgraph=True)
    x = torch.randint(0, 32, (2, 13))

    def step():
        loss(called, x).backward()
        optimizer.step()

    step()
    before = counter.frame_count
    with LayerHealth(called, optimizer, every=1, outputs=how != "loss") as health:
        for _ in range(20):
            step()
    assert counter.frame_count == before
    assert "no layer" in str(health)


def test_a_resumed_run_goes_on_with_its_past(tmp_path):
    file, alarms = tmp_path / "health.jsonl", []
    for cut in (None, 50):
        model, precision = small()
        with LayerHealth(model, precision, every=5, to=file, tell=str) as health:
            train(model, precision, 0, cut or 80, diverge)
        if cut:
            again = LayerHealth(model, precision, every=5, to=file, start=cut, tell=str)
            train(model, precision, cut, 80, diverge)
            again.close()
            health = again
        alarms.append([(a.layer, a.quantity, a.since, a.step) for a in health.alarms])
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [a["layer"] for line in lines for a in line["alarms"]][:1] == ["2"]
    assert alarms[0] == alarms[1]
    assert alarms[0][0][1] == "weight"


def test_a_spike_names_the_layer_that_rose_before_it():
    model, precision = small(on_spike="stop")
    with LayerHealth(model, precision, every=1, tell=str) as health:
        with pytest.raises(SpikeError, match=r"layer health: 2: largest weight .* since step 6\d"):
            train(model, precision, 0, 90, lambda s, m: diverge(s, m) * (1e6 if s > 75 else 1))
        assert health.alarms[0].layer == "2"
        with pytest.raises(NonFiniteError, match=r"no loss .*; layer health: 2: .*unchanged\n"):
            train(model, precision, 77, 78, lambda *_: math.nan)
    assert precision.outcome.about_layers() == ""


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("dead", [(4,), (0, 2, 4)])
def test_a_layer_that_dies_at_once_is_named_where_the_run_ends(every, dead):
    """If others have died as well, it cannot be told which was first."""
    model, precision = small()
    with LayerHealth(model, precision, every=every, tell=str) as health:
        train(model, precision, 0, 60)
        for i in dead:
            model[i].weight.data.mul_(10.0 ** (21 + i))  # the loss is infinite on this very step
        with pytest.raises(NonFiniteError):
            train(model, precision, 60, 61)
    told = [(a.layer, a.quantity, a.since, a.step) for a in health.alarms]
    assert told == [("4", "weight", 61, 61)] * (len(dead) == 1)


@pytest.mark.filterwarnings("ignore:the step is left out")
def test_a_layer_is_named_on_a_skipped_step_and_once(tmp_path):
    file = tmp_path / "health.jsonl"
    model, precision = small(on_nonfinite="skip:9")
    with LayerHealth(model, precision, every=1, to=file, tell=str) as health:
        train(model, precision, 0, 60)
        model[4].weight.data.mul_(1e25)
        train(model, precision, 60, 64)
    assert [(a.layer, a.step) for a in health.alarms] == [("4", 61)]
    last = json.loads(file.read_text().splitlines()[-1])
    assert (last["step"], last["layers"]) == (64, {})  # no past for a resumed run


def test_one_extreme_update_counts_at_once_and_a_batch_does_not():
    for rate, told in ((0.05, []), (500.0, [("2", "update", 61, 61)])):
        model, precision = small()

        def wild(step, model, usual=rate < 1):  # the gradient of one layer alone is 1e5 times
            bias = model[2].bias
            return 1 + usual * 1e6 * (bias - bias.detach()).sum()

        with LayerHealth(model, precision, every=1, tell=str) as health:
            train(model, precision, 0, 60)
            (group,) = precision.optimizers[0].param_groups
            own = {**group, "params": group["params"][2:3], "lr": rate}
            group["params"] = group["params"][:2] + group["params"][3:]
            precision.optimizers[0].param_groups.append(own)
            train(model, precision, 60, 61, wild)
        assert [(a.layer, a.quantity, a.since, a.step) for a in health.alarms] == told


def test_what_grows_to_what_is_usual_among_layers_is_not_out():
    for times, out in ((300, False), (30_000, True)):
        past = _Past("abc")
        usual = {name: {"update": 1e-2, "activation": 1.0, "weight": 1.0} for name in "abc"}
        usual["b"] = {quantity: value / 1e3 for quantity, value in usual["b"].items()}
        for step in range(20):
            assert not past.judge(step, past.row(usual), applied=True)
        for quantity, value in usual["b"].items():
            risen = past.row({**usual, "b": {**usual["b"], quantity: value * times}})
            assert past._out(risen)[0].any() == out, quantity


def test_a_skipped_step_between_does_not_end_what_is_out():
    past = _Past("abc")
    usual = {name: {"gradient": 1.0, "weight": 1.0} for name in "abc"}
    for step in range(20):
        assert not past.judge(step, past.row(usual), applied=True)
    found = []
    for step in range(20, 24):
        skipped = step == 21
        rise = {"gradient": math.inf if skipped else 20.0, "weight": 1.0}
        found += past.judge(step, past.row({**usual, "b": rise}), applied=not skipped)
    assert [(a.layer, a.quantity, a.since, a.step) for a in found] == [("b", "gradient", 20, 23)]


@pytest.mark.parametrize("scaled", [False, True])
def test_where_nothing_was_seen_before_the_end_it_says_so(scaled):
    torch.manual_seed(0)
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with LayerHealth(model, optimizer, scaler=scaler if scaled else None, every=1) as health:
        for step in range(1, 41):
            by = math.nan if (step == 20 and scaled) or step == 40 else 1.0
            scaler.scale(model(torch.randn(16, 4)).square().mean() * by).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 39:
                assert str(health) == "no layer has left its own past in 39 steps"
    assert str(health) == (
        "no layer was seen to leave its own past before step 40, which was skipped or not finite"
    )


def test_the_first_alarm_warns_once():
    model, precision = small()
    warns = pytest.warns(UserWarning, match="layer health: 2: largest weight")
    with warns as told, LayerHealth(model, precision, every=1):
        train(model, precision, 0, 90, diverge)
    assert len(told) == 1
