"""halfstep.GradScaler's options: bounds and skip limit."""

import pytest
import torch

from every import every
from halfstep import GradScaler, NonFiniteError, PrecisionError
from integrations.test_grad_scaler import INF, NAN, made, step

OPTIONS = [
    {"strict": True},
    {"max_consecutive_skips": 400},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_scale_never_falls_where_gradients_are_destroyed(options):
    """Torch's first silent failure: at 2^-128 and below, 1/scale is inf and 1.0 becomes NaN."""
    model, optimizer, scaler = made(backoff_factor=2.0**-40, **options)
    stopped = None
    for _ in range(9):
        try:
            told = step(model, optimizer, scaler, first=(INF, 1.0))
            assert not told.applied
        except NonFiniteError as error:
            stopped = error
    assert scaler.get_scale() == (1.0 if "strict" in options else 2.0**-126)
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
            {"init_scale": 2.0**-130, "max_consecutive_skips": 9},
            {"init_scale": NAN, "strict": True},
            {"max_consecutive_skips": 0},
            {"strict": True, "growth_factor": INF},
            {"strict": True, "backoff_factor": 0.0},
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


def test_the_skip_limit_counts_after_the_first_applied_step():
    model, optimizer, scaler = made(init_scale=2.0**20, max_consecutive_skips=3)
    for _ in range(5):  # calibrating: no limit
        step(model, optimizer, scaler, first=(INF, 1.0))
    step(model, optimizer, scaler)
    for _ in range(2):
        step(model, optimizer, scaler, first=(1.0, NAN), second=(NAN, 1.0))
    with pytest.raises(NonFiniteError, match=r"^NaN in the gradients of first, second: 3 ") as e:
        step(model, optimizer, scaler, first=(1.0, NAN), second=(NAN, 1.0), unscale=True)
    assert (e.value.cause, e.value.parameters) == ("skip_limit", ("first", "second"))
    assert scaler.last_step.skipped_in_a_row == 3
    assert step(model, optimizer, scaler).applied


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
    assert not fresh.calibrating


@pytest.mark.parametrize("scale", [0.0, 2.0**30])
def test_a_state_that_cannot_be_continued_is_refused_whole(scale):
    scaler = GradScaler("cpu", strict=True, init_scale=4.0)
    before = scaler.state_dict()
    with pytest.raises(PrecisionError, match=r"saved scale is .*; allowed"):
        scaler.load_state_dict(before | {"growth_factor": 4.0, "scale": scale})
    assert scaler.state_dict() == before
