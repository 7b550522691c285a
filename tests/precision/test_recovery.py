"""What follows a step: averages, and what is done where no scale can help."""

import math
import warnings

import pytest
import torch
from torch import nn

from halfstep import NonFiniteError, Precision, PrecisionError
from halfstep.optim.optimizers import AdamW
from halfstep.precision.ema import EMA
from reference.training import OPTIMIZERS, batches, differences, loss_of, mlp, mse, scaled, snapshot

POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-split")


def make(policy, seed=0, name="adamw-loop", **options):
    model = mlp(seed)
    optimizer = (
        AdamW(model.parameters(), lr=0.02, eps=1e-3)
        if "split" in policy
        else OPTIMIZERS[name](model.parameters())
    )
    return model, optimizer, Precision(scaled(policy), model, optimizer, **options)


def step(model, precision, number=0, poison=None):
    x, y = batches(number + 1)[number]
    loss = loss_of(model, precision, (x, y))
    if poison == "loss":
        loss = loss * math.nan
    if poison == "gradient":
        (p, *_) = (p for p in model.parameters() if p.requires_grad)
        handle = p.register_hook(lambda g: torch.full_like(g, math.nan))
        try:
            precision.backward(loss)
        finally:
            handle.remove()
        return precision.step()
    return precision.step(loss)


@pytest.mark.parametrize("text", ["skip", "skip:0", "skip:-1", "rollback:2", "stop:1", "", "go"])
def test_an_unknown_answer_is_refused(text):
    with pytest.raises(PrecisionError, match="allowed: stop, skip:K"):
        make("fp32", on_nonfinite=text)


@pytest.mark.covering
@pytest.mark.parametrize("poison", ["loss", "gradient"])
@pytest.mark.parametrize("policy", POLICIES)
def test_skip_leaves_out_k_in_a_row_and_then_stops(policy, poison):
    model, optimizer, precision = make(policy, on_nonfinite="skip:2")
    assert step(model, precision).applied
    before = snapshot(model, optimizer, precision)
    alone = policy.startswith("fp16") and poison == "gradient"  # answered by the loss scale
    if not alone:
        with pytest.warns(UserWarning, match=r"skip:2.*Said once"):
            result = step(model, precision, 1, poison)
    else:
        result = step(model, precision, 1, poison)
    reason = "nonfinite_loss" if poison == "loss" else "nan_gradients"
    assert (result.applied, result.reason) == (False, reason)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no second word
        result = step(model, precision, 2, poison)
    assert result.skipped_in_a_row == 2
    after = snapshot(model, optimizer, precision)
    assert differences(before, after) == []
    if not alone:
        with pytest.raises(NonFiniteError):
            step(model, precision, 3, poison)
    assert step(model, precision, 4).applied
    assert precision.progress.skipped_in_a_row == 0


@pytest.mark.filterwarnings("ignore:the step is left out")
def test_a_skipped_batch_that_poisons_running_statistics_stops():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision("fp32", model, optimizer, on_nonfinite="skip:3")
    x = torch.full((6, 4), math.nan)
    with pytest.raises(NonFiniteError, match=r"1\.running_mean.*checkpoint"):
        precision.step(mse(model(x), torch.zeros(6, 2)))


@pytest.mark.filterwarnings("ignore:the step is left out")
def test_ordinary_overflow_does_not_use_up_the_skips():
    model, _, precision = make("fp16-mixed", on_nonfinite="skip:1")
    for number in range(4):
        assert not step(model, precision, number, "gradient").applied
    assert not step(model, precision, 4, "loss").applied


def test_a_refused_step_leaves_no_gradient_behind():
    model, optimizer, precision = make("bf16-master")
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(PrecisionError, match="not a parameter of the model"):
        step(model, precision)
    del optimizer.param_groups[-1]
    first = step(model, precision).grad_norm
    fresh_model, _, fresh = make("bf16-master")
    assert step(fresh_model, fresh).grad_norm == first


def test_an_average_of_another_object_is_refused():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

    wrapped = Wrapped()
    ema = EMA(wrapped.inner)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with pytest.raises(PrecisionError, match="other names"):
        Precision("fp32", wrapped, optimizer, ema=ema)
    with pytest.raises(PrecisionError, match="other names"), ema.applied_to(wrapped):
        pass


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master", "bf16-split"])
def test_averages_in_the_weights_places_are_not_trained_on(policy):
    ema = EMA(mlp())
    model, _, precision = make(policy, ema=ema)
    with ema.applied_to(model), pytest.raises(PrecisionError, match="weights are averages"):
        step(model, precision)
    precision.discard()
    assert step(model, precision).applied


class Gain(nn.Module):
    def __init__(self, value, count=256):
        super().__init__()
        self.gain = nn.Parameter(torch.full((count,), float(value)))


def test_the_average_is_of_the_exact_masters_and_can_be_tried():
    model = mlp()
    ema = EMA(model, decay=0.5)
    optimizer = AdamW(model.parameters(), lr=0.02)
    precision = Precision("bf16-split", model, optimizer, ema=ema)
    expected = {n: v.double() for n, v in precision.masters.items()}
    for number in range(4):
        step(model, precision, number)
        for n, v in precision.masters.items():
            expected[n] = 0.5 * expected[n] + 0.5 * v.double()
    for n, average in ema.averages.items():
        # four fp32 roundings
        assert torch.allclose(average.double(), expected[n], rtol=4 * 2.0**-23, atol=1e-9)
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    with ema.applied_to(model):
        for n, p in model.named_parameters():
            assert torch.equal(p, ema.averages[n].bfloat16())
    with pytest.raises(RuntimeError, match="inside"), ema.applied_to(model):
        raise RuntimeError("inside")
    assert all(torch.equal(own[n], p) for n, p in model.named_parameters())
    other = EMA(mlp(seed=3), decay=0.5)
    other.load_state_dict(ema.state_dict())
    assert differences(other.state_dict(), ema.state_dict()) == []
    with pytest.raises(PrecisionError, match="another model"):
        EMA(Gain(1.0)).load_state_dict(ema.state_dict())


def test_several_optimizers_step_together_or_not_at_all():
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = OPTIMIZERS["adamw-fused"](model[2].parameters())
    precision = Precision(scaled("fp16-master"), model, [first, second])
    masters = {n: v.clone() for n, v in precision.masters.items()}
    assert not step(model, precision, 0, "gradient").applied
    assert all(torch.equal(masters[n], v) for n, v in precision.masters.items())
    assert step(model, precision, 1).applied
    assert all(not torch.equal(masters[n], v) for n, v in precision.masters.items())
    twin = mlp()
    twice = [torch.optim.SGD(twin.parameters()) for _ in range(2)]
    with pytest.raises(PrecisionError, match="is in two optimizers"):
        Precision("fp32", twin, twice)
