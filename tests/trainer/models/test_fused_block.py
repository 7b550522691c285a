"""A GPT block in one autograd function against the same block layer by layer, and against fp64."""

import copy

import pytest
import torch
from torch import nn

from halfstep.kernels.library import loaded
from halfstep.trainer.models.gpt import gpt
from halfstep.trainer.models.gpt.gpt import Block
from halfstep.trainer.models.shapes import GPTConfig

pytestmark = pytest.mark.skipif(isinstance(loaded(), str), reason=f"no kernels: {loaded()}")
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
    run = gpt.fused_block
    monkeypatch.setattr(gpt, "fused_block", lambda *a: (runs.append(1), run(*a))[1])
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


def test_checkpointing_and_frozen_weights(fused):
    from dataclasses import replace

    x, upstream = torch.randn(2, 33, 128), torch.randn(2, 33, 128)
    plain = results(block(), x, upstream, autocast=True)
    again = results(
        block(replace(CONFIG, activation_checkpointing=True)), x, upstream, autocast=True
    )
    assert fused == [1, 1, 1]
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    model = block()
    model.attn.qkv.weight.requires_grad_(False)
    frozen = results(model, x, upstream, autocast=True)
    assert frozen.pop("attn.qkv.weight") is None
    assert all(torch.equal(plain[name], frozen[name]) for name in frozen)


def hook(model):
    model.mlp.up.register_forward_hook(lambda *_: None)


def outer_hook(model):
    model.attn.register_full_backward_hook(lambda *_: None)


def replaced_forward(model):
    model.attn.proj.forward = lambda x: nn.Linear.forward(model.attn.proj, x)


class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def wrapped(model):
    model.mlp.down = Adapter(model.mlp.down)


def subclass(model):
    class Own(nn.Parameter):
        pass

    model.mlp.down.weight = Own(model.mlp.down.weight.detach())


@pytest.mark.parametrize("change", [hook, outer_hook, replaced_forward, wrapped, subclass])
def test_a_changed_layer_is_run_as_it_is(change, fused):
    model = block()
    change(model)
    x = torch.randn(2, 10, 128, requires_grad=True)  # hooks on gradients want one
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert fused == []


def test_dropout_and_other_formats_run_layer_by_layer(fused):
    x = torch.randn(2, 10, 128)
    model = block()
    model(x)  # fp32
    with torch.autocast("cpu", torch.float16):
        model(x)
    model.dropout.p = 0.1
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        assert fused == []
        model.eval()(x)
    assert fused == [1]


def test_a_second_derivative_is_refused_with_the_way_out():
    x = torch.randn(2, 10, 128, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = block()(x)
    with pytest.raises(NotImplementedError, match="HALFSTEP_KERNEL=torch"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_copy_of_a_model_runs_by_itself(fused):
    model = block()
    other = copy.deepcopy(model)
    x, upstream = torch.randn(2, 10, 128), torch.randn(2, 10, 128)
    first, second = (results(m, x, upstream, autocast=True) for m in (model, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert fused == [1, 1]


class LowRank(nn.Linear):
    """A layer with weight and bias, as the block's own, and with more in its forward."""

    def __init__(self, inner):
        super().__init__(inner.in_features, inner.out_features)
        self.down = nn.Linear(inner.in_features, 2)
        self.up = nn.Linear(2, inner.out_features)
        self.load_state_dict(inner.state_dict(), strict=False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


@pytest.mark.parametrize("place", ["attn.qkv", "attn.proj", "mlp.up", "mlp.down"])
@pytest.mark.parametrize("kind", [LowRank, Adapter])
def test_a_layer_of_another_class_runs_itself(kind, place, fused):
    model = block()
    model.set_submodule(place, kind(model.get_submodule(place)))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 10, 128)).sum().backward()
    assert fused == []
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["attn", "mlp"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_part_of_another_class_runs_itself(name, bf16, fused):
    model = block()

    class Doubled(nn.Module):
        def forward(self, x, cache=None):
            return 2 * x

    setattr(model, name, Doubled())
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(torch.randn(2, 10, 128))
    assert fused == []


def test_what_attention_alone_drops_is_dropped(fused):
    model = block()
    model.attn.dropout = 0.5  # the block's own is 0
    x = torch.randn(2, 10, 128)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(model(x), model(x))
        assert fused == []
        model.eval()(x)
    assert fused == [1]


def test_a_hook_on_all_modules_is_called(fused):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    try:
        with torch.autocast("cpu", torch.bfloat16):
            block()(torch.randn(2, 10, 128))
    finally:
        handle.remove()
    assert fused == []
    assert seen.count(nn.Linear) == 4


@pytest.mark.parametrize(
    "make", [lambda x: x[..., :128], lambda x: x[:1, :, :128].expand(3, -1, -1)]
)
def test_a_stream_that_lies_apart(make, fused):
    """A slice of a wider tensor, or one row for all of the batch."""
    x = make(torch.randn(3, 20, 256).bfloat16().float())
    model = block()
    with torch.autocast("cpu", torch.bfloat16):
        found, true = model(x), model(x.contiguous().clone())
    assert fused == [1, 1]
    assert torch.equal(found, true)


def test_no_product_for_a_frozen_weight(fused):
    from torch.utils.flop_counter import FlopCounterMode

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
    assert fused == [1]
    assert products(model) == whole / 2
    assert fused == [1, 1]
