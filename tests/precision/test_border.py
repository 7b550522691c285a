"""Every public entry takes names and values, and answers everything else with an error of ours."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.distributed import Layout, choose_strategy, decide
from halfstep.errors import HalfstepError
from reference.training import mlp


def make(optimizer=torch.optim.SGD):
    model = mlp()
    return model, optimizer(model.parameters(), lr=0.1)


@pytest.mark.parametrize("policy", ["bf16-mixed", halfstep.parse_policy("bf16-mixed")])
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_names_and_values_mean_the_same(policy, device):
    assert halfstep.support(policy, device).status in ("native", "simulated")
    assert "bf16" in halfstep.explain(policy, device)
    with halfstep.autocast(policy, device):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    for layout in ("data=2", Layout(data=2)):
        assert decide(policy, layout) == decide("bf16-mixed", Layout(data=2))
    assert choose_strategy("data=1", policy, device).layout == Layout()
    model, optimizer = make()
    assert str(halfstep.Precision(policy, model, optimizer).policy) == "bf16-mixed"


@pytest.mark.parametrize("dtype", ["fp16", "float16", "half", "torch.float16", torch.float16])
def test_dtypes_by_name_and_value(dtype):
    assert halfstep.mask_value(dtype) == -16376.0
    _, optimizer = make(torch.optim.AdamW)
    assert halfstep.lift_eps_(optimizer, dtype) == [(0, 1e-8, 2.0**-14)]
    model = mlp()
    halfstep.cast_module_(model, dtype)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_formats_are_public_values():
    formats = (halfstep.FP32, halfstep.TF32, halfstep.BF16, halfstep.FP16)
    assert [f.name for f in (*formats, halfstep.E4M3FN, halfstep.E5M2)] == [
        "fp32", "tf32", "bf16", "fp16", "e4m3fn", "e5m2"
    ]  # fmt: skip
    assert halfstep.FP16.max == 65504


def precision(*arguments):
    return lambda: halfstep.Precision(*arguments)


def wrong_calls():
    model, optimizer = make()
    return {
        "no policy": precision(None, model, optimizer),
        "a dtype for a policy": precision(torch.bfloat16, model, optimizer),
        "swapped": precision("bf16", optimizer, model),
        "no optimizer": precision("bf16", model, None),
        "no optimizers": precision("bf16", model, []),
        "a class": precision("bf16", nn.Linear, optimizer),
        "parameters": precision("bf16", model, model.parameters()),
        "meter of a model": lambda: halfstep.LostUpdateMeter(model),
        "support of a number": lambda: halfstep.support("fp32", 3.5),
        "support of no policy": lambda: halfstep.support(None, "cpu"),
        "explain on a planet": lambda: halfstep.explain("fp32", "mars"),
        "autocast on a planet": lambda: halfstep.autocast("fp32", "mars"),
        "mask of a word": lambda: halfstep.mask_value("bf17"),
        "mask of integers": lambda: halfstep.mask_value(torch.int32),
        "eps of a word": lambda: halfstep.lift_eps_(optimizer, "sixteen"),
        "cast to a word": lambda: halfstep.cast_module_(model, "bf17"),
        "cast to integers": lambda: halfstep.cast_module_(model, torch.int8),
        "layout of a number": lambda: decide("fp32", 2),
        "layout of a word": lambda: choose_strategy("rows=2", "fp32", "cpu"),
    }


@pytest.mark.parametrize("call", wrong_calls())
def test_a_wrong_call_ends_in_one_of_our_errors(call):
    with pytest.raises(HalfstepError) as error:
        wrong_calls()[call]()
    assert any(word in str(error.value) for word in ("allowed", "Allowed", "write"))


@pytest.mark.parametrize("loss", [1.0, None, torch.ones(2), "loss"])
def test_a_wrong_loss_ends_in_one_of_our_errors(loss):
    model, optimizer = make()
    train = halfstep.Precision("fp32", model, optimizer)
    with pytest.raises(HalfstepError, match="allowed"):
        train.backward(loss)
    if loss is not None:
        with pytest.raises(HalfstepError, match="allowed"):
            train.step(loss)
