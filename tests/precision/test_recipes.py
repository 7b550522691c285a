"""Recipes below 16 bits as fields of a policy: spelling, rules by module and product, schedules."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import PrecisionError
from halfstep.precision import low_bit
from halfstep.precision.casting.cast import region_of
from halfstep.precision.low_bit import linear, native
from halfstep.precision.policy import devices
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x):
        return x + self.norm(self.down(self.up(x).relu()))


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 96, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def recipes(policy, model=None):
    model = Model() if model is None else model
    return {p.name: str(p.recipe) for p in place(parse_policy(policy), model).low}


def test_every_linear_layer_has_the_recipe_but_one_that_shares_an_embedding():
    every = {f"blocks.{i}.{layer}": "mxfp8" for i in range(3) for layer in ("up", "down")}
    assert recipes("mxfp8") == {**every, "head": "mxfp8"}
    assert recipes("mxfp8", Model(tied=True)) == every
    assert recipes("bf16-mixed,rules=head:mxfp8", Model(tied=True)) == {"head": "mxfp8"}


def test_the_last_rule_that_matches_a_module_decides():
    assert recipes("nvfp4,rules=blocks.1:bf16|blocks.1.up:mxfp8|head:fp32|blocks.2:fp32") == {
        "blocks.0.up": "nvfp4",
        "blocks.0.down": "nvfp4",
        "blocks.1.up": "mxfp8",
    }


@pytest.mark.parametrize(
    ("policy", "model", "words"),
    [
        ("mxfp8", nn.Sequential(nn.Linear(100, 64)), "0 has 100 inputs.*fprop.*keep_bf16=0"),
        ("mxfp8", nn.Sequential(nn.Linear(64, 10)), "0 has 10 outputs.*dgrad.*keep_bf16=0"),
        ("nvfp4", nn.Linear(24, 16), r"the model has 24 inputs.*blocks of 16.*keep_bf16=\*"),
        # square blocks of weights: a product that sums over inputs needs whole blocks of outputs
        ("bf16-mixed,recipe=nvfp4/bf16/bf16", nn.Linear(32, 24), "24 outputs.*fprop.*keep_bf16"),
        ("fp8", nn.Sequential(nn.Conv2d(4, 4, 3)), "none of the model's is a torch.nn.Linear"),
        ("mxfp8,keep_bf16=0", nn.Sequential(nn.Linear(64, 64)), "none of the model's"),
        ("nvfp4,keep_bf16=heda", Model(), "there are head"),
    ],
)
def test_a_model_that_cannot_have_the_recipe_is_refused_by_name(policy, model, words):
    with pytest.raises(PrecisionError, match=words):
        place(parse_policy(policy), model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(PrecisionError):
        halfstep.Precision(
            f"{policy},simulate=yes", model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 32) / 8)

    def forward(self, x):
        return nn.functional.grouped_mm(x, self.up, offs=torch.arange(8, 40, 8, dtype=torch.int32))


def test_what_multiplies_without_linear_layers_is_said_to_stay_in_bf16():
    def said(policy, *modules):
        model = nn.Sequential(*modules)
        precision = halfstep.Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return precision.support.reason.partition("stay in bf16: ")[2]

    policy, layer = "mxfp8,simulate=yes", nn.Linear(64, 64)
    assert said(policy, layer, Experts(), Experts()) == "1"
    assert said(policy, layer, nn.MultiheadAttention(64, 4)) == "1"
    table = nn.ParameterList([torch.randn(1, 16, 64)])  # of positions
    assert said(policy, layer, nn.Conv1d(4, 4, 3), table) == ""
    assert said(f"{policy},keep_bf16=1", layer, Experts()) == ""
    assert said("bf16-mixed", layer, Experts()) == ""


def test_a_shared_layer_with_two_recipes_is_refused():
    model = nn.ModuleDict({"a": nn.Linear(64, 64)})
    model["b"] = model["a"]
    with pytest.raises(PrecisionError, match=r"both a and b has recipe mxfp8 .* give both"):
        place(parse_policy("bf16-mixed,rules=a:mxfp8|b:nvfp4"), model)


def test_without_simulate_it_is_refused_where_it_is_not_native():
    for policy in ("fp8", "mxfp8", "nvfp4", "bf16-mixed,rules=a:fp8-block"):
        found = halfstep.support(policy, "cpu")
        assert found.status == "refused"
        assert found.nearest.endswith("simulate=yes") or "simulate=yes" in found.nearest
        assert halfstep.support(found.nearest, "cpu").status == "simulated"
    model = nn.Linear(64, 64)
    with pytest.raises(PrecisionError, match=r"a CPU has no mxfp8 .*; add simulate.*simulate=yes"):
        halfstep.Precision("mxfp8", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_layer_too_narrow_to_gain_stays_in_bf16_where_it_would_be_native(monkeypatch):
    hopper = next(kind for kind in devices.DEVICES if kind.family == "Ada or Hopper")
    sizes = "768 x 3072", "1024 x 2304", "1600 x 1608"

    def made(policy):
        model = nn.Sequential(*(nn.Linear(*map(int, size.split(" x "))) for size in sizes))
        return model, halfstep.Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def low(model):
        return [type(region_of(m)).__name__ == "LowBitLinear" for m in model]

    simulated, precision = made("fp8,simulate=yes")
    assert low(simulated) == [True, True, True]  # it shows what the formats do, not how fast
    assert "narrow" not in precision.support.reason
    for module in (linear, native, low_bit):
        monkeypatch.setattr(module, "why_not_native", lambda name, device: "")
    monkeypatch.setattr(native, "kind_of", lambda device: hopper)
    model, precision = made("fp8")
    assert low(model) == [False, True, False]  # 1608 is no multiple of 16
    assert "2 of 3 layers" in precision.support.reason
    asked, precision = made("bf16-mixed,rules=0:fp8|1:fp8")
    assert low(asked) == [True, True, False]
    one = nn.Linear(64, 64)
    precision = halfstep.Precision("fp8", one, torch.optim.SGD(one.parameters(), lr=0.1))
    with halfstep.trace(one, precision) as ran, precision.autocast():
        one(torch.ones(16, 64)).sum().backward()
    assert ran.differences("fp8") == []
