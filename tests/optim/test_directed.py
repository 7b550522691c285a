"""Muon, whose directions need whole tensors: rounding, saving, skipping and rolling back."""

import copy

import pytest
import torch
from torch import nn

from halfstep import Precision, PrecisionError
from halfstep.optim import Muon, muon_groups
from halfstep.precision.masters.rounding import ROUNDING
from optim.test_optimizers import MOMENTS, assert_same, everything, feed, numbers, parameter
from reference.training import through_a_file


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("multiplier", [1.0, 0.25])
def test_split_weights_train_as_fp32_weights_do_to_the_last_bit(multiplier):
    half = parameter((40, 24), dtype=torch.bfloat16)
    full = nn.Parameter(half.detach().float())
    ours, other = Muon([half], update="split"), Muon([full])
    for step in range(20):
        gradient = numbers((40, 24), step)
        ours.step(gradients={half: gradient}, multiplier=multiplier)
        other.step(gradients={full: gradient}, multiplier=multiplier)
        assert torch.equal(ours.read_master(half), full.detach())
    assert not torch.equal(half.detach().float(), full.detach())  # the remainder counts


@pytest.mark.covering
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("way", ROUNDING)
def test_training_goes_on_to_the_bit_after_save_and_load(way, moments):
    def made(seed: int):
        matrices = [parameter((30, 20), seed, torch.bfloat16)]
        matrices.append(nn.Parameter(numbers((20, 30), seed).bfloat16().T))
        vector = parameter(130, seed, torch.bfloat16)
        groups = [{"params": matrices}, {"params": [vector], "use_muon": False}]
        return [*matrices, vector], Muon(groups, update=way, moments=moments, seed=3)

    ps, optimizer = made(0)
    for step in range(3):
        feed(optimizer, step)
        optimizer.step()
    saved = through_a_file({"ps": [p.detach() for p in ps], "o": optimizer.state_dict()})
    others, resumed = made(9)
    with torch.no_grad():
        for p, value in zip(others, saved["ps"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["o"])
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for step in range(3, 6):
        assert_same(everything(resumed), everything(optimizer))
        for one in (optimizer, resumed):
            feed(one, step)
            one.step()
    assert_same(everything(resumed), everything(optimizer))
    assert_same(everything(copy.deepcopy(optimizer)), everything(optimizer))


# --- under Precision ----------------------------------------------------------------------------


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def trained(policy: str, steps: int, **options) -> tuple[Precision, list[float]]:
    model = mlp()
    precision = Precision(policy, model, Muon(muon_groups(model)), **options)
    return precision, [train_step(precision, number).loss for number in range(steps)]


def train_step(precision: Precision, number: int, poison: float = 1.0):
    x = torch.randn((32, 8), generator=torch.Generator().manual_seed(number))
    with precision.autocast():
        loss = (precision.model(x) - x[:, :4]).square().mean() * poison
    return precision.step(loss)


def bits(precision: Precision) -> dict[str, torch.Tensor]:
    (optimizer,) = precision.optimizers
    return everything(optimizer) | {f"m.{n}": v.clone() for n, v in precision.masters.items()}


def test_torch_s_muon_is_refused_where_weights_are_split():
    model = mlp()
    with pytest.raises(PrecisionError, match=r"one of halfstep\.optim; Muon does not.*bf16-master"):
        Precision("bf16-split", model, torch.optim.Muon([model[0].weight]))
