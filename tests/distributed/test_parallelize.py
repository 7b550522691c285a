"""Tensor parallelism of the GPT against the same model on one device, and what it refuses."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from every import every
from halfstep.distributed.tensor_parallel import parallelize_, sum_over_ranks
from halfstep.errors import ConfigError, DataError
from halfstep.precision.casting.autocast import Autocast, SimulatedProducts
from halfstep.precision.casting.cast import add_regions_, cast_parameters_
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.models.gpt import GPT, GPTConfig

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 19}


@functools.cache
def axis():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def make(dtype=torch.float32, **shape):
    """A model without any parameter at 0 or 1, whose numbers every dtype holds exactly."""
    model = GPT(GPTConfig(**(SHAPE | shape)), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    return model.bfloat16().half().to(dtype)


def batch(b=3, t=24, vocab=19, seed=0, ignored=0.2):
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, vocab, (2, b, t), generator=g)
    targets[torch.rand(b, t, generator=g) < ignored] = -100
    return tokens, targets


def split(model):
    parallelize_(model, model.tp_plan(), axis())
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compute(model, pair, autocast=None):
    """What a model answers to a batch, and its gradients."""
    with (
        SimulatedProducts(torch.float16),
        torch.autocast("cpu", autocast, enabled=autocast is not None),
    ):
        with torch.no_grad():
            hidden, logits = model.hidden(pair[0]), model(pair[0])
        loss, count = model.loss_sum(pair)
        loss.backward()
    return {"loss": loss.detach(), "count": count, "hidden": hidden, "logits": logits}


def run(rank, pair, dtype=torch.float32, autocast=None, **shape):
    """``compute`` of this rank's part, with whole gradients; and what is stored, by name."""
    model = split(make(dtype, **shape))
    answer = compute(model, pair, autocast)
    placed = {}
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter), name
        assert isinstance(p, DTensor), name
        assert isinstance(p.grad, DTensor), name
        assert p.grad.placements == p.placements, name
        assert p.grad.shape == p.shape, name
        assert p.grad.dtype == p.grad.to_local().dtype == p.dtype == dtype, name
        assert p.grad.to_local().shape == p.to_local().shape, name
        placed[name] = p.placements[0]
    parts = {n: p.grad.to_local() for n, p in model.named_parameters() if placed[n].is_replicate()}
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    return answer | {"grads": grads, "placed": placed, "parts": parts}


def same(results):
    """All ranks have the same bits of what they hold in common; the first rank's answer."""
    for other in results[1:]:
        for key in ("loss", "count", "hidden", "logits"):
            assert torch.equal(results[0][key], other[key]), key
        for name, part in results[0]["parts"].items():
            assert torch.equal(part, other["parts"][name]), name
    return results[0]


def distance(got, wanted):
    """Relative error in the 2-norm."""
    return float((got.double() - wanted).norm() / wanted.norm())


# --- the same function ----------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [19, 20])
def test_fp64_proves_the_mathematics(pool, vocab):
    pair, oracle = batch(vocab=vocab), make(torch.float64, vocab_size=vocab)
    wanted = compute(oracle, pair)
    got = same(pool.run(run, pair=pair, dtype=torch.float64, vocab_size=vocab))
    assert got["count"] == wanted["count"]
    # Rounding (1.1e-16) of sums of tens of terms in another order, through two blocks and back.
    for key in ("loss", "hidden", "logits"):
        assert distance(got[key], wanted[key]) < 1e-13, key
    for name, p in oracle.named_parameters():
        assert distance(got["grads"][name], p.grad) < 1e-12, name


SETTINGS = {
    "fp32": (torch.float32, None, torch.float32, 2.0**-24 * 64),
    "bf16 autocast": (torch.float32, torch.bfloat16, torch.float32, 2.0**-8 * 4),
    "fp16 autocast": (torch.float32, torch.float16, torch.float32, 2.0**-11 * 4),
    "bf16": (torch.bfloat16, None, torch.bfloat16, 2.0**-8 * 4),
    "fp16": (torch.float16, None, torch.float16, 2.0**-11 * 4),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_has_its_dtypes_and_every_gradient_its_digits(pool, setting):
    # The bounds are those of one device, test_gpt.py: against fp64, a few units.
    dtype, autocast, stream, bound = SETTINGS[setting]
    pair, oracle = batch(), make(torch.float64)
    wanted = compute(oracle, pair)
    one = compute(make(dtype), pair, autocast)
    got = same(pool.run(run, pair=pair, dtype=dtype, autocast=autocast))
    for key in ("loss", "hidden", "logits"):
        assert got[key].dtype == one[key].dtype, key
        assert distance(got[key], wanted[key]) <= bound, key
    assert got["hidden"].dtype == stream
    for name, p in oracle.named_parameters():
        assert distance(got["grads"][name], p.grad) <= bound, name


def look_up(rank, table, tokens):
    model = make(table.dtype)
    model.wte.weight.data = table
    found = split(model).wte(tokens)
    return found.detach().view(torch.int16 if table.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_lookup_has_every_bit_of_one_device(pool, dtype):
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    table = torch.randn(19, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    table[3:15, ::3] = -0.0
    table[4:16, 1] = torch.finfo(dtype).tiny / 2  # subnormal
    table[::2, 2] = torch.inf
    tokens = torch.arange(24).remainder(19).repeat(2, 1)
    wanted = table[tokens].view(bits)
    for got in pool.run(look_up, table=table, tokens=tokens):
        assert torch.equal(got, wanted)


def dropped(rank, dropout=0.0, checkpointing=False):
    """Losses of three steps of SGD on the local parts, and what ranks hold in common."""
    torch.manual_seed(5)
    model = split(make(dropout=dropout, activation_checkpointing=checkpointing))
    losses = []
    for step in range(3):
        loss, count = model.loss_sum(batch(seed=step))
        (loss / count).backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().sub_(p.grad.to_local(), alpha=0.1)
                p.grad = None
    named = model.named_parameters()
    return losses, {n: p.to_local().detach() for n, p in named if p.placements[0].is_replicate()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_keeps_ranks_in_step(pool2, checkpointing):
    job = {"dropout": 0.2}
    (losses, common), other = pool2.run(dropped, checkpointing=checkpointing, **job)
    assert len(common) == 2 * 6 + 3  # norms and biases of rowwise layers, wpe, final norm
    assert all(torch.equal(value, other[1][name]) for name, value in common.items())
    assert losses == other[0]
    assert losses != pool2.run(dropped)[0][0]  # it does act
    assert losses == pool2.run(dropped, checkpointing=not checkpointing, **job)[0][0]


@functools.cache
def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


# --- what is stored, and sums ---------------------------------------------------------------------


def total(rank, values):
    mine = values[rank]
    kept = mine.clone()
    answer = sum_over_ranks(mine, axis())
    assert torch.equal(mine, kept)
    return answer


def test_a_16_bit_sum_that_fits_does_not_overflow_on_the_way(pool4):
    values = [torch.full((5,), v, dtype=torch.float16) for v in (6e4, 6e4, -6e4, -5e4)]
    for got in pool4.run(total, values=values):
        assert torch.equal(got, sum(v.double() for v in values).half())


# --- refusals -------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose table is a linear head's too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def with_plan(**changes):
    model = make()
    plan = model.tp_plan()
    for name, style in changes.items():
        name = name.replace("__", ".")
        if style is None:
            del plan[name]
        else:
            plan[name] = style
    return model, plan


def message(rank, case):
    """The refusal of a case; nothing of the model may have changed."""
    model, plan = {
        "heads": lambda: (lambda m: (m, m.tp_plan()))(make(n_head=1)),
        "vocabulary": lambda: (lambda m: (m, m.tp_plan()))(make(vocab_size=1)),
        "width": lambda: (nn.Sequential(nn.Linear(7, 9)), {"0": "colwise"}),
        "input": lambda: (nn.Sequential(nn.Linear(7, 9)), {"0": "rowwise"}),
        "unit": lambda: (nn.Sequential(nn.Linear(8, 8)), {"0": "colwise:3"}),
        "style": lambda: with_plan(wpe="replicated"),
        "argument": lambda: with_plan(wpe="replicate:all"),
        "no unit": lambda: with_plan(layers__1__mlp__up="colwise:0"),
        "left out": lambda: with_plan(layers__1__attn_norm=None),
        "no module": lambda: with_plan(layers__1__atn_norm="replicate"),
        "norm": lambda: with_plan(final_norm="rowwise"),
        "no embedding": lambda: with_plan(final_norm="vocab"),
        "tied": lambda: (Tied(), {"embed": "vocab", "head": "rowwise"}),
        "twice": lambda: (lambda m: (m, m.tp_plan()))(split(make())),
    }[case]()
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    forwards = [m.__dict__.get("forward") for m in model.modules()]
    try:
        parallelize_(model, plan, axis())
    except ConfigError as error:
        assert {n: (id(p), p._version) for n, p in model.named_parameters()} == before
        assert [m.__dict__.get("forward") for m in model.modules()] == forwards
        return str(error)
    return "nothing was refused"


REFUSALS = {
    "heads": r"layers\.0\.attn\.qkv: 96 outputs in 1 units of 96 .* by 2 .* allowed .* tensor=1$",
    "vocabulary": "wte: a vocabulary of 1 rows .* leaves 1 of 2 .* take tensor=1",
    "width": "0: 9 outputs cannot be shared equally by 2 .* tensor=1, 3$",
    "input": "0: 7 inputs cannot be shared equally by 2 .* tensor=1$",
    "unit": "0: 8 outputs are no multiple of the unit 3",
    "style": "wpe: unknown style 'replicated'; allowed styles: colwise, rowwise, replicate, vocab",
    "argument": "wpe: argument 'all' of its style; allowed: none",
    "no unit": r"layers\.1\.mlp\.up: colwise:0; allowed: colwise:U",
    "left out": r"the parameter layers\.1\.attn_norm\.weight out; add 'layers\.1\.attn_norm' with",
    "no module": r"'layers\.1\.atn_norm'",
    "norm": "final_norm is a LayerNorm; its style splits nn.Linear only: give it the style replic",
    "no embedding": "final_norm is a LayerNorm; the style vocab splits nn.Embedding",
    "tied": r"embed\.weight and head\.weight are one parameter, .* two ways",
    "twice": "wte is sharded, or its forward replaced, already",
}


def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(pool2):
    def check(case, words):
        for text in pool2.run(message, case=case):
            assert re.search(words, text), text

    every(REFUSALS.items(), check)


def bad_data(rank, tokens, targets):
    model = split(make())
    try:
        model.loss_sum((tokens, targets))
    except (DataError, IndexError) as error:
        return str(error)
    return "nothing"


def test_tokens_and_targets_out_of_range_are_refused_on_every_rank(pool):
    def check(bad):
        tokens, targets = batch()
        wrong = tokens.clone()
        wrong[1, 3] = bad
        for text in pool.run(bad_data, tokens=wrong, targets=targets):
            assert "index out of range" in text
        targets[1, 3] = bad
        for text in pool.run(bad_data, tokens=tokens, targets=targets):
            assert f"target {bad} at row 27 is out of range: allowed are 0 to 18" in text

    every((19, 20, 1000, -1), check)


# --- beneath a precision policy ------------------------------------------------------------------


def under_rules(rank, text, pair):
    """Gradients and the dtype of every module's output, with modules that rules keep in fp32."""
    policy = parse_policy(text)
    model = make()
    cast_parameters_(model, place(policy, model).dtypes())
    if rank is not None:
        split(model)
    add_regions_(place(policy, model))
    dtypes = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, args, out, n=name: dtypes.update({n: out.dtype}))
    with Autocast(policy, model, torch.device("cpu")):
        loss = model.loss_sum(pair)[0]
        loss.backward()
    return dtypes, {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master", "fp16-mixed"])
@pytest.mark.parametrize("kept", ["type:LayerNorm|layers.1.mlp", "wte|layers.0.attn.proj"])
def test_regions_of_a_policy_lie_around_the_parts(pool2, policy, kept):
    text, pair = f"{policy},keep_fp32={kept}", batch()
    oracle = make(torch.float64)
    compute(oracle, pair)
    dtypes, _ = under_rules(None, text, pair)
    bound = 2.0 ** (-8 if policy.startswith("bf16") else -11) * 4  # as above
    for found, grads in pool2.run(under_rules, text=text, pair=pair):
        assert found == dtypes
        for name, p in oracle.named_parameters():
            assert distance(grads[name], p.grad) <= bound, name
