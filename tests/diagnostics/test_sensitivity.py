"""``halfstep.sensitivity``: planted sensitive layers are named, and no other."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.errors import PrecisionError
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy

WIDTH = 64


class Residual(nn.Module):
    """A block whose linear layer sees some channels of its input ``scale`` times as large.

    The weights are as much smaller, so that the function is that of a block without scales.
    """

    def __init__(self, scale):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", scale)
        self.lin = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.lin.weight.div_(scale)

    def forward(self, x):
        return x + F.gelu(self.lin(self.norm(x) * self.scale))


def planted(seed, blocks=8, count=3, strength=300.0):
    """A model, and the names of the layers with an outlier in each block of 16 channels."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    where = sorted(torch.randperm(blocks, generator=generator)[:count].tolist())
    scales = [torch.ones(WIDTH) for _ in range(blocks)]
    for at in where:
        outliers = torch.arange(0, WIDTH, 16) + torch.randint(0, 16, (4,), generator=generator)
        scales[at][outliers] = strength
    return nn.Sequential(*map(Residual, scales), nn.LayerNorm(WIDTH)), {f"{i}.lin" for i in where}


def data(seed, count=4):
    generator = torch.Generator().manual_seed(1000 + seed)
    mixed = torch.randn(WIDTH, WIDTH, generator=generator) / 8
    xs = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(count)]
    return [(x, torch.tanh(x @ mixed)) for x in xs]


def loss_fn(model, batch):
    return (model(batch[0]).float() - batch[1]).square().mean()


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 22))]
)
def test_three_planted_layers_are_named_and_no_other(seed):
    model, sensitive = planted(seed)
    found = halfstep.sensitivity(model, data(seed, 1), loss_fn)
    assert len(found.errors) == 24
    policy = found.policy(most=0.05)
    low = {p.name: str(p.recipe) for p in place(parse_policy(policy), model).low}
    assert {name for name, recipe in low.items() if recipe != "nvfp4"} == sensitive
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halfstep.Precision(policy, model, optimizer).close()


def test_layers_whose_features_fill_no_blocks_stay_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, WIDTH))
    found = halfstep.sensitivity(model, data(0, 1), loss_fn, "mxfp8")
    # 40 outputs are no whole blocks of 32 for dgrad of the first layer and fprop of the second
    assert found.errors.keys() == {
        ("0", "fprop"), ("0", "wgrad"), ("2", "dgrad"), ("2", "wgrad"),
    }  # fmt: skip
    expected = "mxfp8,simulate=yes,rules=0:mxfp8/bf16/mxfp8|2:bf16/mxfp8/mxfp8"
    assert found.policy(most=1.0) == expected
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halfstep.Precision(expected, model, optimizer).close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"form": "fp3"}, "format 'fp3'; allowed: "),
        ({"batches": []}, "^batches is empty"),
        ({"loss_fn": lambda model, batch: loss_fn(model, batch) * math.nan}, "gradient is nan"),
        ({"loss_fn": lambda model, batch: loss_fn(model, batch) * 0}, "gradient is 0"),
        ({"model": nn.Sequential(nn.Conv1d(4, 4, 1))}, "torch.nn.Linear"),
    ],
)
def test_what_makes_no_sense_is_refused(given, words):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(PrecisionError, match=words):
        halfstep.sensitivity(**{"model": model, "batches": data(0), "loss_fn": loss_fn, **given})
