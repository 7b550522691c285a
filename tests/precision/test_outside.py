"""What a script does with 16-bit weights outside of the context: as inside, and in fp32."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from every import every
from halfstep import POLICIES, Precision, optim

LOW = [name for name, policy in POLICIES.items() if policy.param_dtype != torch.float32]
Z = torch.linspace(-2, 2, 20).reshape(5, 4)
X = torch.linspace(-1, 1, 40).reshape(5, 8)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.time, self.words = nn.Linear(6, 4), nn.Embedding(7, 4)
        self.cells, self.image = nn.GRU(4, 4, batch_first=True), nn.Conv1d(1, 2, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.register_buffer("place", torch.linspace(-1, 1, 4))

    def forward(self, x):
        return self.decode(self.encoder(x))

    def decode(self, z):
        return torch.sigmoid(self.decoder(z + self.place))

    def sample(self):
        z = Z
        for step in range(3):
            angles = step * torch.arange(1.0, 4.0).repeat(len(z), 1)
            z = z + 0.1 * self.time(torch.cat([angles.sin(), angles.cos()], -1))
        return self.decode(z)


CALLS = {
    "forward": lambda m: m(X),
    "method": lambda m: m.decode(Z),
    "sampling": lambda m: m.sample(),
    "part": lambda m: m.decoder(m.encoder(X)),
    "layer": lambda m: m.decoder[0](Z),
    "slice": lambda m: m.decoder[:2](Z),
    "words": lambda m: m.words(torch.arange(7)),
    "cells": lambda m: m.cells(Z[None])[0],
    "image": lambda m: m.image(X[:, None]),
    "attention": lambda m: m.layer(Z[None]),
    "fused": lambda m: m.eval().layer(Z[None]),
    "loss": lambda m: F.binary_cross_entropy(m.decode(Z), torch.ones(5, 8)),
    "functional": lambda m: torch.func.functional_call(m.time, m.time.state_dict(), (X[:, 2:],)),
    "vmap": lambda m: torch.func.vmap(m.decoder)(Z),
    "slope": lambda m: torch.func.grad(lambda z: m.decode(z).sum())(Z),
    "checkpointed": lambda m: checkpoint(m.decoder, Z, use_reentrant=False),
    "copy": lambda m: copy.deepcopy(m).decode(Z),
}  # fmt: skip


def trained(policy):
    torch.manual_seed(0)
    model = Autoencoder()
    own = POLICIES[policy].needs_own_optimizer
    sgd = (optim if own else torch.optim).SGD(model.parameters(), lr=0.1)
    precision = Precision(policy + ",init_scale=256" * (policy[:4] == "fp16"), model, sgd)
    with precision.autocast():
        loss = model(X).square().mean()
    precision.step(loss)
    return model, precision


def require_as_inside(policy, call):
    model, precision = trained(policy)
    found = CALLS[call](model)
    assert found.dtype == torch.float32
    found.detach().numpy()
    exact = CALLS[call](trained("fp32")[0])
    # some ten roundings, each of 2^-9 of values of at most 4
    assert (found - exact).abs().max() < 10 * 4 * 2.0**-9
    if call in ("forward", "layer", "words", "cells", "image", "attention", "fused", "vmap"):
        with precision.autocast():
            inside = CALLS[call](model)
        assert torch.equal(found, inside.float())


def test_calls_outside_of_the_context_run_as_inside_and_give_fp32():
    every(
        ((policy, call) for policy in ("bf16-split", "fp16-pure") for call in CALLS),
        require_as_inside,
    )


@pytest.mark.slow
def test_the_same_under_the_other_policies():
    every(itertools.product(LOW, CALLS), require_as_inside)


def test_closed_the_model_is_torchs_again():
    model, precision = trained("bf16-split")
    precision.close()
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(RuntimeError, match="same dtype"):
        model.decode(Z)
