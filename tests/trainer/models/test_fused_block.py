"""A GPT block in one autograd function against the same block layer by layer, and against fp64."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.trainer.runs import ON_CPU, run, small_config
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from halfstep import Precision, support
from halfstep.kernels.library import loaded
from halfstep.optim import AdamW
from halfstep.precision.policy.policy import POLICIES
from halfstep.trainer.models import GPTConfig, gpt
from halfstep.trainer.models.gpt import Block

pytestmark = pytest.mark.skipif(isinstance(loaded(), str), reason=f"no kernels: {loaded()}")
NATIVE = support("bf16-mixed", "cpu").status == "native"
CONFIG = GPTConfig(n_layer=1, n_head=4, n_embd=128, block_size=70, vocab_size=9, dropout=0.0)


def block(config=CONFIG, dtype=torch.float32):
    torch.manual_seed(0)
    made = Block(config)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return made.bfloat16().to(dtype)  # weights that bf16 holds exactly


@pytest.fixture
def fused(monkeypatch):
    """How often the one function ran."""
    runs = []
    apply = gpt._FusedBlock.apply
    counted = staticmethod(lambda *a: (runs.append(1), apply(*a))[1])
    monkeypatch.setattr(gpt._FusedBlock, "apply", counted)
    return runs


def results(model, x, upstream, *, autocast):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.backward(upstream.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "length"), [(3, 70), (1, 1), (2, 17)])
def test_results_are_as_near_to_fp64_as_layer_by_layer(batch, length, dtype, fused, monkeypatch):
    autocast = dtype == torch.float32
    x = torch.randn(batch, length, 128).bfloat16()
    upstream = torch.randn(batch, length, 128).bfloat16()
    true = results(block(dtype=torch.float64), x.double(), upstream.double(), autocast=False)
    got = results(block(dtype=dtype), x.to(dtype), upstream, autocast=autocast)
    assert fused == [1]
    monkeypatch.setattr(Block, "_fusable", lambda *_: None)
    plain = results(block(dtype=dtype), x.to(dtype), upstream, autocast=autocast)
    assert fused == [1]
    for name, exact in true.items():
        assert got[name].dtype == plain[name].dtype == dtype
        ours, theirs = (float((r[name].double() - exact).norm()) for r in (got, plain))
        # as many roundings, in another order; 2^-9 of the whole where there is next to nothing
        assert ours <= 1.25 * theirs + 2**-9 * float(exact.norm()), name


def test_gradients_wider_than_the_weights_are_not_rounded(fused):
    model = block(dtype=torch.bfloat16)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    model(torch.randn(2, 20, 128).bfloat16().requires_grad_()).float().sum().backward()
    assert fused == [1]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    # a sum over 40 rows of fp32 has digits that bf16 does not hold
    shift = model.mlp_norm.bias.grad
    assert not torch.equal(shift, shift.bfloat16().float())


def test_checkpointing_copies_and_frozen_weights(fused):
    x, upstream = torch.randn(2, 33, 128), torch.randn(2, 33, 128)
    model = block()
    other = copy.deepcopy(model)
    plain, copied = (results(m, x, upstream, autocast=True) for m in (model, other))
    assert all(torch.equal(plain[name], copied[name]) for name in plain)
    again = block(replace(CONFIG, activation_checkpointing=True))
    again = results(again, x, upstream, autocast=True)
    assert len(fused) == 4
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    model = block()
    model.attn.qkv.weight.requires_grad_(False)
    frozen = results(model, x, upstream, autocast=True)
    assert frozen.pop("attn.qkv.weight") is None
    assert all(torch.equal(plain[name], frozen[name]) for name in frozen)


def subclassed(m, place):
    layer = m.get_submodule(place)
    layer.__class__ = type("Own", (type(layer),), {})


class Own(nn.Parameter):
    pass


CHANGES = {
    "hook": lambda m: m.mlp.up.register_forward_hook(lambda *_: None),
    "dropout's hook": lambda m: m.dropout.register_forward_hook(lambda *_: None),
    "outer hook": lambda m: m.attn.register_full_backward_hook(lambda *_: None),
    "forward": lambda m: setattr(m.attn.proj, "forward", lambda x: x),
    "another's forward": lambda m: setattr(m.attn.proj, "forward", m.attn_norm.forward),
    "tensor": lambda m: setattr(m.mlp.down, "weight", Own(m.mlp.down.weight.detach())),
    "no bias": lambda m: setattr(m.mlp.up, "bias", None),
    **{place: partial(subclassed, place=place) for place in gpt._AS_BUILT},
}
RULES = {n: f",keep_fp32=0.{n}" for n in ("attn_norm", "attn", "attn.qkv", "mlp", "mlp.*")}


@pytest.mark.parametrize("change", ["", *CHANGES, *RULES])
@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-split"])
@pytest.mark.parametrize("late", [False, True])
def test_a_changed_layer_runs_itself(change, policy, late, fused):
    model, rule = nn.Sequential(block()), RULES.get(change, "")
    changed = CHANGES.get(change, lambda _: None)
    if not late:
        changed(model[0])
    precision = Precision(policy + rule, model, AdamW(model.parameters()))
    if late:
        changed(model[0])
    x = torch.randn(2, 10, 128, requires_grad=True)  # hooks on gradients want one
    with precision.autocast():
        model(x).sum().backward()
    assert len(fused) == (NATIVE and not change)


@pytest.mark.parametrize("policy", ON_CPU)
def test_the_trainer_takes_it_under_each_bf16_policy(policy, fused, corpus, tmp_path, monkeypatch):
    blocks, compute = [], Block._compute
    monkeypatch.setattr(Block, "_compute", lambda *a: (blocks.append(1), compute(*a))[1])
    run(small_config(corpus, policy, run__max_steps=2), tmp_path / "run")
    assert len(blocks) > 2
    taken = NATIVE and POLICIES[policy].compute_dtype == torch.bfloat16
    assert len(fused) == taken * len(blocks)


def test_dropout_runs_layer_by_layer(fused):
    x = torch.randn(2, 10, 128)
    model = block()
    with torch.autocast("cpu", torch.bfloat16):
        for model.dropout.p, model.attn.dropout in ((0.1, 0.0), (0.0, 0.5)):
            assert not torch.equal(model.train()(x), model(x))
            assert fused == []
        model.eval()(x)
    assert fused == [1]


def test_a_second_derivative_is_refused_with_the_way_out():
    x = torch.randn(2, 10, 128, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = block()(x)
    with pytest.raises(NotImplementedError, match="HALFSTEP_KERNEL=torch"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_no_product_for_a_frozen_weight(fused):
    def products(model):
        x = torch.randn(2, 16, 128, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).float().sum()
        with FlopCounterMode(display=False) as counter:
            y.backward()
        return counter.get_total_flops()

    model = block()
    whole = products(model)
    for m in (model.attn.qkv, model.attn.proj, model.mlp.up, model.mlp.down):
        m.weight.requires_grad_(False)
    assert products(model) == whole / 2
    assert fused == [1, 1]
