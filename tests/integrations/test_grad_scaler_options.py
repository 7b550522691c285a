"""halfstep.GradScaler's options: bounds."""

import pytest
import torch

from every import every
from halfstep import GradScaler, NonFiniteError, PrecisionError
from integrations.test_grad_scaler import INF, NAN, made, step


def test_the_scale_never_falls_where_gradients_are_destroyed():
    """Torch's first silent failure: at 2^-128 and below, 1/scale is inf and 1.0 becomes NaN."""
    model, optimizer, scaler = made(backoff_factor=2.0**-40, strict=True)
    stopped = None
    for _ in range(9):
        try:
            told = step(model, optimizer, scaler, first=(INF, 1.0))
            assert not told.applied
        except NonFiniteError as error:
            stopped = error
    assert scaler.get_scale() == 1.0
    assert stopped.cause == "loss_scale_floor"
    assert stopped.parameters == ("first",)
    assert "inf in the gradients of first" in str(stopped)
    step(model, optimizer, scaler)
    # SGD, lr 0.1, gradients 1, 2, 3, 4; scaling by a power of two is exact
    assert torch.equal(model.first, torch.tensor([1.0, 1.0]) - 0.1 * torch.tensor([1.0, 2.0]))
    assert scaler.last_step.applied


def test_what_cannot_be_honoured_is_refused():
    def check(options):
        with pytest.raises(PrecisionError, match="allowed"):
            GradScaler("cpu", **options)

    every(
        [
            {"init_scale": 0.5, "strict": True},
            {"init_scale": 2.0**25, "strict": True},
            {"init_scale": 0.0},
            {"init_scale": NAN, "strict": True},
        ],
        check,
    )


@pytest.mark.parametrize("new_scale", [0.25, torch.tensor(2.0**30), torch.tensor([NAN]), 0.0])
def test_a_new_scale_out_of_bounds_is_refused(new_scale):
    model, optimizer, scaler = made(strict=True)
    step(model, optimizer, scaler)
    before = scaler.state_dict()
    with pytest.raises(PrecisionError, match=r"new_scale is .* from 1 to"):
        scaler.update(new_scale)
    assert scaler.state_dict() == before
    scaler.update(torch.tensor(4.0))
    assert scaler.get_scale() == 4.0


def test_the_scale_never_rises_beyond_the_ceiling():
    model, optimizer, scaler = made("fused", init_scale=2.0**23, growth_interval=1, strict=True)
    assert [step(model, optimizer, scaler).next_loss_scale for _ in range(3)] == [2.0**24] * 3


def test_a_state_goes_from_torch_and_back():
    model, optimizer, ours = made(strict=True)
    step(model, optimizer, ours, first=(INF, 1.0))
    step(model, optimizer, ours)
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(ours.state_dict())
    core = {k: v for k, v in ours.state_dict().items() if k != "halfstep"}
    assert torchs.state_dict() == core
    fresh = GradScaler("cpu", strict=True)
    fresh.load_state_dict(torchs.state_dict())
    assert {k: v for k, v in fresh.state_dict().items() if k != "halfstep"} == core


@pytest.mark.parametrize("scale", [0.0, 2.0**30])
def test_a_state_that_cannot_be_continued_is_refused_whole(scale):
    scaler = GradScaler("cpu", strict=True, init_scale=4.0)
    before = scaler.state_dict()
    with pytest.raises(PrecisionError, match=r"saved scale is .*; allowed"):
        scaler.load_state_dict(before | {"growth_factor": 4.0, "scale": scale})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_strict_refuses_pure_bf16_before_anything_is_changed(kind, call):
    model, optimizer, scaler = made(kind, strict=True)
    scaler.scale(model.bfloat16()()).backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    with pytest.raises(PrecisionError, match=r"2 of 2 .* in bf16.*first, second.*\(8 bytes"):
        getattr(scaler, call)(optimizer)
    for p, (weight, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(p.grad, gradient)
