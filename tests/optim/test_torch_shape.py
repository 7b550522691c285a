"""Constructors and states of ``torch.optim``: what is taken means the same, the rest is named."""

import pytest
import torch
from torch import nn

from halfstep import PrecisionError
from halfstep.optim.optimizers import SGD, AdamW, Lion
from reference.training import through_a_file

CLASSES = [AdamW, SGD, Lion]
PEERS = [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)]


def weights(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(seed)))


def run(optimizer: torch.optim.Optimizer, p: nn.Parameter, steps: int = 5) -> torch.Tensor:
    for step in range(steps):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 + step)).to(
            p.dtype
        )
        optimizer.step()
    return p.detach()


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_a_learning_rate_may_be_a_tensor_that_is_changed_in_place(cls):
    p, q = weights(), weights()
    rate = torch.tensor(0.5)
    ours, other = cls([p], lr=rate), cls([q], lr=0.5)
    assert torch.equal(run(ours, p), run(other, q))
    rate.fill_(0.25)
    other.param_groups[0]["lr"] = 0.25
    assert torch.equal(run(ours, p), run(other, q))
    assert ours.param_groups[0]["lr"] is rate


# --- states -------------------------------------------------------------------------------------


def test_a_state_whose_numbers_are_in_another_order_goes_by_position():
    """torch.optim maps the numbers of a saved state by their places in its groups."""
    p, q = weights(0), weights(1)
    ours = AdamW([p, q])
    p.grad, q.grad = torch.ones(40), torch.full((40,), 2.0)
    ours.step()
    state = ours.state_dict()
    state["param_groups"][0]["params"] = [7, 3]
    state["state"] = {7: state["state"][0], 3: state["state"][1]}
    before = ours.state[p]["exp_avg"].clone(), ours.state[q]["exp_avg"].clone()
    ours.load_state_dict(state)
    assert torch.equal(ours.state[p]["exp_avg"], before[0])
    assert torch.equal(ours.state[q]["exp_avg"], before[1])


@pytest.mark.parametrize(("cls", "peer"), PEERS)
def test_states_go_to_torch_and_back(cls, peer):
    p, q = weights(), weights()
    options = {"lr": 0.01} | ({"momentum": 0.9} if cls is SGD else {})
    ours, theirs = cls([p], **options), peer([q], **options)
    run(ours, p)
    q.data.copy_(p.detach())
    theirs.load_state_dict(through_a_file(ours.state_dict()))
    assert (run(ours, p) - run(theirs, q)).abs().max() < 1e-6
    p.data.copy_(q.detach())
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    assert (run(ours, p) - run(theirs, q)).abs().max() < 1e-6


def test_an_8_bit_state_of_before_has_its_codes_under_the_moment_s_own_name():
    p, q = weights(), weights()
    ours, other = AdamW([p], moments="8bit"), AdamW([q], moments="8bit")
    run(ours, p)
    state = through_a_file(ours.state_dict())
    entry = state["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        entry[name] = entry.pop(f"{name}_codes")
    q.data.copy_(p.detach())
    other.load_state_dict(state)
    assert other.state[q].keys() == ours.state[p].keys()
    assert torch.equal(run(ours, p), run(other, q))


def test_a_change_of_the_memory_format_takes_the_moments_along():
    p, q = (nn.Parameter(weights().detach().reshape(5, 8)) for _ in range(2))
    ours, other = AdamW([p], lr=0.1), AdamW([q], lr=0.1)
    for _ in range(3):
        assert torch.equal(run(ours, p), run(other, q))
        q.data = q.data.t().contiguous().t()
    q.data = torch.ones(2, 2)
    with pytest.raises(PrecisionError, match=r"has shape .*, the parameter shape \(2, 2\)"):
        run(other, q)


# --- autograd's in-place guard ------------------------------------------------------------------

MAKERS = {
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw, 8 bits": lambda p: AdamW(p, lr=0.1, moments="8bit"),
    "sgd": lambda p: SGD(p, lr=0.1),
    "lion": lambda p: Lion(p, lr=0.1, moments="bf16"),
}


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_between_a_forward_and_its_backward_is_an_error(name):
    """The classic mistake with two losses: the second backward needs the weights of before."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = MAKERS[name]([*first.parameters(), *second.parameters()])
    hidden = first(torch.ones(2, 3))
    loss, other = second(hidden).sum(), second(hidden * 2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
