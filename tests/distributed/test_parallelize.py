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
from halfstep.distributed.tensor_parallel import parallelize_
from halfstep.errors import ConfigError
from halfstep.precision.casting.autocast import Autocast, SimulatedProducts
from halfstep.precision.casting.cast import add_regions_, cast_parameters_
from halfstep.precision.masters.local_part import is_divided, local_part
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


def batch(b=3, t=24, seed=0, ignored=0.2):
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 19, (2, b, t), generator=g)
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
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter), name
        assert isinstance(p, DTensor) == (name.rpartition(".")[0] in model.tp_plan()), name
        assert isinstance(p.grad, DTensor) == isinstance(p, DTensor), name
        assert getattr(p.grad, "placements", None) == getattr(p, "placements", None), name
        assert p.grad.shape == p.shape, name
        assert p.grad.dtype == local_part(p.grad).dtype == p.dtype == dtype, name
        assert local_part(p.grad).shape == local_part(p).shape, name
    parts = {n: local_part(p.grad) for n, p in model.named_parameters() if not is_divided(p)}
    return answer | {"grads": {n: whole(p.grad) for n, p in model.named_parameters()},
                     "parts": parts}  # fmt: skip


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


def test_fp64_proves_the_mathematics(pool):
    pair, oracle = batch(), make(torch.float64)
    wanted = compute(oracle, pair)
    got = same(pool.run(run, pair=pair, dtype=torch.float64))
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
    return model, plan | {name.replace("__", "."): style for name, style in changes.items()}


def message(rank, case):
    """The refusal of a case; nothing of the model may have changed."""
    model, plan = {
        "heads": lambda: (lambda m: (m, m.tp_plan()))(make(n_head=1)),
        "width": lambda: (nn.Sequential(nn.Linear(7, 9)), {"0": "colwise"}),
        "input": lambda: (nn.Sequential(nn.Linear(7, 9)), {"0": "rowwise"}),
        "unit": lambda: (nn.Sequential(nn.Linear(8, 8)), {"0": "colwise:3"}),
        "style": lambda: with_plan(wpe="replicated"),
        "argument": lambda: with_plan(wpe="replicate:all"),
        "no unit": lambda: with_plan(layers__1__mlp__up="colwise:0"),
        "no module": lambda: with_plan(layers__1__atn_norm="replicate"),
        "norm": lambda: with_plan(final_norm="rowwise"),
        "tied": lambda: (Tied(), {"head": "rowwise"}),
        "half": lambda: (nn.Sequential(nn.Linear(8, 8)), {"0": "colwise"}),
    }[case]()
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    try:
        parallelize_(model, plan, axis())
    except ConfigError as error:
        assert {n: (id(p), p._version) for n, p in model.named_parameters()} == before
        return str(error)
    return "nothing was refused"


REFUSALS = {
    "heads": r"layers\.0\.attn\.qkv: 96 outputs in 1 units of 96 .* by 2 .* allowed .* tensor=1$",
    "width": "0: 9 outputs cannot be shared equally by 2 .* tensor=1, 3$",
    "input": "0: 7 inputs cannot be shared equally by 2 .* tensor=1$",
    "unit": "0: 8 outputs are no multiple of the unit 3",
    "style": "wpe: unknown style 'replicated'; allowed styles: colwise, colwise:U with U >= 1",
    "argument": "wpe: unknown style 'replicate:all'; allowed styles: colwise, ",
    "no unit": r"layers\.1\.mlp\.up: unknown style 'colwise:0'; allowed styles: colwise, ",
    "no module": r"'layers\.1\.atn_norm'",
    "norm": "final_norm is a LayerNorm; its style splits nn.Linear only: give it the style replic",
    "tied": r"embed\.weight and head\.weight are one parameter, which cannot be split and stay one",
    "half": "the plan has colwise layers only, such as 0; what a colwise layer splits, a rowwise",
}


def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(pool2):
    def check(case, words):
        for text in pool2.run(message, case=case):
            assert re.search(words, text), text

    every(REFUSALS.items(), check)


# --- beneath a precision policy ------------------------------------------------------------------


def under_rules(rank, text, pair):
    """The dtype of every module's output, with modules that rules keep in fp32."""
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
        model.loss_sum(pair)[0].backward()
    return dtypes


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master", "fp16-mixed"])
@pytest.mark.parametrize("kept", ["type:LayerNorm|layers.1.mlp", "wte|layers.0.attn.proj"])
def test_regions_of_a_policy_lie_around_the_parts(pool2, policy, kept):
    text, pair = f"{policy},keep_fp32={kept}", batch()
    assert pool2.run(under_rules, text=text, pair=pair) == [under_rules(None, text, pair)] * 2
