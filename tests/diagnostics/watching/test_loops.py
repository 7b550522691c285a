"""``halfstep.watch`` where a loop does what loops do: closures, copies, complex and odd tensors."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from halfstep import Precision, load_numerics, watch
from halfstep.optim.optimizers import AdamW

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def of(step, kind: str) -> dict[str, float]:
    return {one.name: one.absmax for one in step.of(kind)}


@pytest.mark.covering
@pytest.mark.parametrize("given", ["positional", "by keyword"])
@pytest.mark.parametrize("found", [True, False], ids=["given", "found"])
def test_a_closures_gradients_are_those_of_its_step(given, found, tmp_path):
    # As Lightning steps: zero_grad, forward and backward are all in the closure.
    model, norms = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        norms.append(float(model[0].weight.grad.abs().max()))
        return loss

    with watch(model, optimizer if found else None, every=1, to=tmp_path / "n.jsonl"):
        for _ in range(3):
            loss = (
                optimizer.step(closure)
                if given == "positional"
                else optimizer.step(closure=closure)
            )
            assert loss.requires_grad
    steps = load_numerics(tmp_path / "n.jsonl").steps
    assert [of(step, "gradient")["0.weight"] for step in steps] == norms


@pytest.mark.parametrize("policy", ["", "fp32", "bf16-mixed", "bf16-split"])
def test_copies_and_pickles_made_inside_are_plain(policy):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if policy == "bf16-split":
        optimizer = AdamW(model.parameters(), lr=0.1)
    source = Precision(policy, model, optimizer) if policy else optimizer
    with watch(model, source, every=1) as watched:
        for _ in range(2):
            copied, saved = copy.deepcopy(model), io.BytesIO()
            torch.save(model, saved)
            for module in copied.modules():
                assert not module._forward_hooks
                assert not module._forward_pre_hooks
                assert not module._forward_hooks_always_called
            assert b"halfstep" not in saved.getvalue()
            before = [p.detach().clone() for p in model.parameters()]
            if policy:
                with source.autocast():
                    loss = model(X).float().mean()
                source.step(loss)
            else:
                model(X).mean().backward()
                optimizer.step()
            copied(X)
            assert (
                watched.report().of("activation")[0].elements == 16 * 8
            )  # the copy's do not count
            assert not all(map(torch.equal, before, model.parameters()))
    if not policy:
        assert not any("__reduce_ex__" in vars(module) for module in model.modules())
        assert copy.deepcopy(model)(X).shape == (16, 1)


def test_complex_empty_and_scalar_parameters():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.complex = nn.Parameter(torch.full((4, 4), 3 - 4j))
            self.empty = nn.Parameter(torch.empty(0))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.whole = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)

        def forward(self, x):
            return (x.to(torch.complex64) @ self.complex).abs() * self.scalar + self.empty.sum()

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it drops the imaginary part
        with watch(model, optimizer, every=1) as watched:
            model(X).sum().backward()
            optimizer.step()
    found = {(one.kind, one.name): one for one in watched.report().tensors}
    weight = found["weight", "complex"]
    assert (weight.elements, weight.absmax, weight.exponents) == (32, 4.0, {1: 16, 2: 16})
    assert found["gradient", "complex"].elements == 32
    assert found["weight", "empty"].elements == 0
    assert found["weight", "scalar"].absmax == 2
    assert ("weight", "whole") not in found
    assert "weight empty" in watched.table(rows=None)
