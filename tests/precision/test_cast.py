"""Casting values and modules: structure kept, only floating tensors touched."""

import copy
import dataclasses
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from halfstep import POLICIES, Precision
from halfstep.precision.casting.cast import (
    cast_at_border,
    cast_floating,
    cast_parameters_,
    give_back_,
)
from halfstep.precision.policy.rules import place
from reference.training import MASTERS, PURE, STORED, mlp

BF16 = torch.bfloat16
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    label: str
    hidden: tuple[torch.Tensor, ...] = ()
    derived: int = dataclasses.field(default=7, init=False)


def test_structures_are_kept():
    for other in (None, 3, "text", True, {1, 2}, Output):
        assert cast_floating(other, BF16) is other
    x, ids = torch.ones(2), torch.tensor([1, 2])
    value = {
        "list": [x, ids, [x]],
        "tuple": (x, None),
        "named": Pair(x, "b"),
        "ordered": OrderedDict(a=x),
        "data": Output(x, "cat", (x, ids)),
    }
    result = cast_floating(value, BF16)
    assert type(result) is dict
    assert [t.dtype for t in result["list"][:2]] == [BF16, torch.int64]
    assert result["list"][2][0].dtype == BF16
    assert type(result["tuple"]) is tuple
    assert result["tuple"][1] is None
    assert isinstance(result["named"], Pair)
    assert result["named"].first.dtype == BF16
    assert result["named"].second == "b"
    assert type(result["ordered"]) is OrderedDict
    assert result["data"].logits.dtype == BF16
    assert (result["data"].label, result["data"].derived) == ("cat", 7)
    assert [t.dtype for t in result["data"].hidden] == [BF16, torch.int64]
    assert x.dtype == torch.float32
    assert value["data"].logits is x


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.counter = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("table", torch.linspace(0, 4096, 5))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.frozen


def test_parameters_are_cast_in_place_and_buffers_are_not():
    module = WithBuffers()
    before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
    table = module.table.clone()
    cast_parameters_(module, BF16)
    for name, parameter in module.named_parameters():
        same, values = before[name]
        assert parameter is same
        expected = values.to(BF16) if values.is_floating_point() else values
        assert parameter.dtype == expected.dtype
        assert torch.equal(parameter, expected)
    assert module.linear.weight.requires_grad
    assert not module.frozen.requires_grad
    assert torch.equal(module.table, table)
    assert module.table.dtype == torch.float32
    assert module.steps.dtype == torch.int64


@pytest.mark.parametrize("name", [*MASTERS, *PURE])
def test_the_border_casts_inputs_and_outputs_and_can_be_removed(name):
    seen = {}

    class Spy(nn.Module):
        def forward(self, x, ids, *, scale, flag=True):
            seen.update(x=x.dtype, ids=ids.dtype, scale=scale["s"].dtype, flag=flag)
            return {"y": x * scale["s"], "ids": ids}

    module = Spy()
    cast_at_border(place(POLICIES[name], module))
    x, ids, scale = torch.ones(2), torch.tensor([1, 2]), {"s": torch.tensor(2.0)}
    output = module(x, ids, scale=scale, flag=False)
    low = STORED[name]
    assert seen == {"x": low, "ids": torch.int64, "scale": low, "flag": False}
    assert (output["y"].dtype, output["ids"].dtype) == (torch.float32, torch.int64)
    give_back_(module)
    assert module(x.double(), ids, scale=scale)["y"].dtype == torch.float64


def hooked(module):
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._load_state_dict_post_hooks)
    return any(hooks) or "__reduce_ex__" in vars(module)


@pytest.mark.parametrize("name", STORED)
def test_a_copy_of_a_model_is_a_plain_fp32_model_with_the_exact_weights(name):
    # For an exponential moving average, a target network or an evaluation copy.
    model = mlp()
    precision = Precision(name, model, torch.optim.SGD(model.parameters(), lr=0.1))
    exact = dict(precision.masters.items())
    twin = copy.deepcopy(model)
    assert {n: p.dtype for n, p in twin.named_parameters()} == dict.fromkeys(exact, torch.float32)
    assert all(torch.equal(p, exact[n].float()) for n, p in twin.named_parameters())
    assert not hooked(twin)
    x = torch.ones(2, 4)
    assert twin(x).dtype == torch.float32
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert [p.dtype for p in copy.deepcopy(model[0]).parameters()] == [torch.float32] * 2


@pytest.mark.parametrize("name", STORED)
def test_a_pickled_model_is_plain_and_needs_no_halfstep(name):
    # torch.save(model), or a worker process that is handed the model.
    model = mlp()
    precision = Precision(name, model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = pickle.dumps(model)
    assert b"halfstep" not in data
    twin = pickle.loads(data)
    assert not hooked(twin)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert mine.dtype == STORED[name]
        assert torch.equal(mine, theirs)
        assert not vars(mine)
    with precision.autocast(), torch.no_grad():
        x = torch.ones(2, 4)
        assert torch.equal(twin(x).float(), model(x))
