"""Muon against its definition in fp64, against torch.optim.Muon, and in every storage mode."""

import contextlib

import pytest
import torch
from torch import nn

from every import every
from halfstep import PrecisionError
from halfstep.optim import Muon, muon_groups
from halfstep.optim.moments import decode
from halfstep.optim.state import stored_moment
from halfstep.precision.casting.autocast import SimulatedProducts
from halfstep.precision.policy.devices import cpu_has_bf16
from optim.test_optimizers import MOMENTS, numbers, parameter
from reference.training import through_a_file

SHAPES = [(48, 32), (32, 48), (40, 40), (1, 30), (30, 1)]


def whole_numbers(shape, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


def momentum_of(optimizer: Muon, p: nn.Parameter) -> torch.Tensor:
    codes, tops = stored_moment(optimizer.state[p], "momentum_buffer")
    return decode(codes.view(-1), tops, signed=True).view(p.shape).double()


# --- the step -----------------------------------------------------------------------------------


def same_products():
    """Around steps of torch's Muon: its bf16 products are scalar code where the CPU has none."""
    return contextlib.nullcontext() if cpu_has_bf16() else SimulatedProducts(torch.bfloat16)


@pytest.mark.covering
@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", None])
def test_ten_steps_are_torch_s_where_momentum_is_exact(shape, nesterov, adjust):
    """Whole gradients and a momentum of 1/2 are exact in fp32, so that directions are the same."""
    p, q = parameter(shape), parameter(shape)
    options = {"lr": 0.02, "momentum": 0.5, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours, theirs = Muon([p], **options), torch.optim.Muon([q], **options)
    for step in range(10):
        p.grad = whole_numbers(shape, step)
        q.grad = p.grad.clone()
        ours.step()
        with same_products():
            theirs.step()
        state, peer = ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"]
        assert torch.equal(state, peer)
    # three roundings of a weight each, per step, of 2^-24 of it
    largest = max(p.detach().abs().max().item(), q.detach().abs().max().item(), 1.0)
    assert (p - q).abs().max().item() <= 2 * 10 * 3 * 2.0**-24 * largest
    assert (p.detach() - parameter(shape).detach()).abs().max() > 0.01


# --- AdamW for the rest -------------------------------------------------------------------------


class Small(nn.Module):
    """An embedding, a tied head, a block, a classifier, a convolution and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.positions = nn.Embedding(32, 16)  # of the shape of a hidden matrix
        self.pos_embed = nn.Parameter(torch.zeros(8, 16))
        self.conv = nn.Conv1d(16, 16, 3)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.out = nn.Linear(16, 50)
        self.tied = nn.Linear(16, 50, bias=False)
        self.tied.weight = self.embed.weight
        self.classifier = nn.Linear(16, 3)


def test_the_helper_says_which_parameters_are_muon_s():
    groups = muon_groups(Small(), lr=3e-4, weight_decay=0.2)
    found = {g["name"]: [name for name, _ in g["params"]] for g in groups}
    assert found == {
        "matrices": ["block.0.weight", "block.2.weight"],
        "embeddings": ["pos_embed", "embed.weight", "positions.weight"],
        "heads": ["out.weight", "classifier.weight"],
        "no matrices": [
            *("conv.weight", "conv.bias", "block.0.bias", "block.1.weight", "block.1.bias"),
            *("block.2.bias", "out.bias", "classifier.bias"),
        ],
    }
    assert [g["use_muon"] for g in groups] == [True, False, False, False]
    optimizer = Muon(groups, lr=0.02)
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 3e-4, 3e-4, 3e-4]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.2, 0.2, 0.0]


# --- options, states ----------------------------------------------------------------------------


def test_options_that_mean_nothing_are_refused():
    def check(options, message):
        with pytest.raises(PrecisionError, match=message):
            Muon([parameter((3, 4))], **options)

    every(
        [
            ({"momentum": 1.0}, "Invalid momentum value: 1.0; allowed: 0 <= momentum < 1"),
            (
                {"adjust_lr_fn": "rms"},
                "Invalid adjust_lr_fn: rms; allowed: None, original, match_rms_adamw",
            ),
            ({"moments": "4bit"}, "moments='4bit'; allowed: fp32, bf16, 8bit"),
        ],
        check,
    )


def test_what_is_no_matrix_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(PrecisionError, match=r"0\.bias has shape \(4,\).*muon_groups.*use_muon=Fa"):
        Muon(model.named_parameters())
    optimizer = Muon([parameter((3, 4))])
    with pytest.raises(PrecisionError, match=r"parameter 0 has shape \(2, 3, 4\)"):
        optimizer.add_param_group({"params": [parameter((2, 3, 4))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("moments", MOMENTS)
def test_the_state_of_torch_s_muon_goes_on_here(moments):
    p, q = parameter((30, 20)), parameter((30, 20))
    theirs = torch.optim.Muon([q], lr=1e-2, momentum=0.5)
    for step in range(3):
        q.grad = whole_numbers((30, 20), step)
        theirs.step()
    p.data.copy_(q.detach())
    ours = Muon([p], moments=moments)
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 1e-2
    held = momentum_of(ours, p)
    exact = theirs.state[q]["momentum_buffer"]
    gap = {"fp32": 0, "bf16": 2.0**-7, "8bit": 2.0**-3}[moments]
    assert ((held - exact).abs() <= gap * exact.abs()).all()
    before = p.detach().clone()
    p.grad = q.grad = whole_numbers((30, 20), 3)
    ours.step()
    with same_products():
        theirs.step()
    if moments == "fp32":
        assert (p - q).abs().max() <= 2.0**-22 * q.abs().max()
        theirs.load_state_dict(through_a_file(ours.state_dict()))  # and back
        assert torch.equal(theirs.state[q]["momentum_buffer"], ours.state[p]["momentum_buffer"])
    assert ((p - before) * (q.detach() - before)).sum() > 0.9 * (q.detach() - before).square().sum()


# --- rounding modes, saving ---


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
