"""Policies whose optimizer keeps what a 16-bit weight cannot hold, under Precision."""

import pytest
import torch

from halfstep import Precision, PrecisionError
from halfstep.optim.optimizers import SGD, AdamW, Lion
from reference.training import batches, loss_of, mlp, mse

KEPT = ("bf16-split", "bf16-split24", "bf16-kahan", "bf16-sr")
OWN = {"adamw": lambda ps: AdamW(ps, lr=0.01), "sgd": lambda ps: SGD(ps, lr=0.05),
       "lion": lambda ps: Lion(ps, lr=0.002)}  # fmt: skip


def run(policy, make, steps=30, micro=1, **options):
    model = mlp()
    optimizer = make(model.parameters())
    precision = Precision(policy, model, optimizer, **options)
    losses = []
    for x, y in batches(steps, rows=6 * micro):
        for part in range(micro):
            rows = slice(6 * part, 6 * part + 6)
            with precision.autocast():
                loss = mse(model(x[rows]), y[rows]) / micro
            precision.backward(loss)
        losses.append(precision.step(max_norm=1.0).loss)
    return model, optimizer, precision, losses


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
@pytest.mark.parametrize("micro", [1, 3])
def test_split_is_the_fp32_copy_bit_for_bit(make, micro):
    """Same gradients, same fp32 masters; but nearest weights differ on exact ties alone."""
    split_model, _, split, split_losses = run("bf16-split", make, micro=micro)
    copy_model, _, copied, copy_losses = run("bf16-master", make, micro=micro)
    ours, theirs = dict(split.masters.items()), dict(copied.masters.items())
    assert split_losses == copy_losses
    for name, master in theirs.items():
        assert torch.equal(ours[name], master), name
    for a, b in zip(split_model.parameters(), copy_model.parameters(), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", [*KEPT, "bf16-mixed,moments=8bit", "bf16-master,moments=bf16"])
def test_a_stock_optimizer_is_refused_before_anything_changes(policy):
    model = mlp()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(PrecisionError, match=r"halfstep\.optim.*AdamW does not.*nearest policy"):
        Precision(policy, model, torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


SAVED = ("fp32", "bf16-mixed", "bf16-master", "bf16-split", "bf16-split,moments=8bit", "bf16-kahan")


@pytest.mark.covering
@pytest.mark.parametrize("later", SAVED)
@pytest.mark.parametrize("first", SAVED)
def test_masters_load_into_every_other_policy(first, later):
    def make(ps):
        return AdamW(ps, lr=0.01)

    model, stepped, saved, _ = run(first, make, steps=5)
    exact = dict(saved.masters.items())
    state, weights = saved.state_dict(), model.state_dict()
    other = mlp(seed=9)
    begun = make(other.parameters())
    precision = Precision(later, other, begun)
    begun.load_state_dict(stepped.state_dict())
    if first != later:
        with pytest.raises(PrecisionError, match=r"weights= to convert it"):
            precision.load_state_dict(state)
    precision.load_state_dict(state, weights=weights)
    for name, value in precision.masters.items():
        bound = 2.0**-15 if "kahan" in later else 0.0
        assert ((value - exact[name]).abs() <= bound * exact[name].abs()).all(), name
    assert precision.step(loss_of(other, precision)).applied
