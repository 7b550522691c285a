"""Every public entry takes names and values, and answers everything else with an error of ours."""

import pytest
import torch
from torch import nn

import halfstep
from every import every
from halfstep.distributed import (
    Layout,
    choose_strategy,
    open_world,
    plan_of,
)
from halfstep.errors import HalfstepError
from halfstep.integrations import accelerate, lightning
from reference.training import mlp


def make():
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def precision(*arguments):
    return lambda: halfstep.Precision(*arguments)


def trained(**options):
    """A Precision with a loss that waits for its step."""
    model, optimizer = make()
    train = halfstep.Precision("fp32", model, optimizer, **options)
    with train.autocast():
        loss = model(torch.ones(2, 4)).sum()
    return train, loss


def step(**options):
    train, loss = trained()
    return train.step(loss, **options)


def backward(**options):
    train, loss = trained()
    train.backward(loss, **options)


def wrong_calls():
    """What was called to how, by what a test calls it."""
    model, optimizer = make()
    train = halfstep.Precision
    return {
        "no policy": precision(None, model, optimizer),
        "a dtype for a policy": precision(torch.bfloat16, model, optimizer),
        "a number for a policy": lambda: halfstep.parse_policy(16),
        "swapped": precision("bf16", optimizer, model),
        "no optimizer": precision("bf16", model, None),
        "no third argument": precision("bf16", model),
        "a model first": precision(model, "bf16", optimizer),
        "no optimizers": precision("bf16", model, []),
        "a class": precision("bf16", nn.Linear, optimizer),
        "parameters": precision("bf16", model, model.parameters()),
        "a choice of no kind": lambda: train("fp32", model, optimizer, on_nonfinite=5),
        "ranks of a word": lambda: train("fp32", model, optimizer, ranks="all"),
        "a class of ranks": lambda: train("fp32", model, optimizer, ranks=halfstep.OneRank),
        "a norm of 0": lambda: step(max_norm=0.0),
        "gradients of a number": lambda: backward(inputs=5),
        "a state of no kind": lambda: trained()[0].load_state_dict(5),
        "meter of a model": lambda: halfstep.LostUpdateMeter(model),
        "meter at times": lambda: halfstep.LostUpdateMeter(optimizer, every="now and then"),
        "trace of an optimizer": lambda: halfstep.trace_nonfinite(optimizer),
        "support of a number": lambda: halfstep.support("fp32", 3.5),
        "explain on a planet": lambda: halfstep.explain("fp32", "mars"),
        "autocast on a planet": lambda: halfstep.autocast("fp32", "mars"),
        "average of an optimizer": lambda: halfstep.EMA(optimizer),
        "ranks on a planet": lambda: halfstep.ManyRanks("mars"),
        "scaler on a planet": lambda: halfstep.GradScaler("mars"),
        "scaler of an optimizer": lambda: halfstep.GradScaler(optimizer),
        "scale in words": lambda: halfstep.GradScaler("cpu", init_scale="large"),
        "scaler of a number of names": lambda: halfstep.GradScaler("cpu", names=5),
        "plugin of no policy": lambda: lightning.HalfstepPrecision(None),
        "attach to a model": lambda: accelerate.attach(model),
        "policy by names of dtypes": lambda: halfstep.PrecisionPolicy(param_dtype="bf16"),
        "policy of a word's scale": lambda: halfstep.PrecisionPolicy(loss_scale="dynamic"),
        "scale of no kind": lambda: halfstep.LossScaleConfig(kind="dyn"),
        "optimizer of a model": lambda: halfstep.optim.AdamW(model),
        "rate below 0": lambda: halfstep.optim.AdamW(model.parameters(), lr=-1.0),
        "optimizer of a word": lambda: halfstep.optim.Lion(model.parameters(), update="x"),
        "layout of a number": lambda: choose_strategy(2, "fp32", "cpu"),
        "layout of fractions": lambda: Layout(data=2.5),
        "plan of a number": lambda: plan_of(5),
        "world on a planet": lambda: open_world("mars"),
    }


def test_a_wrong_call_ends_in_one_of_our_errors():
    def check(call):
        with pytest.raises(HalfstepError) as error:
            wrong_calls()[call]()
        # what is allowed, or what to do instead
        assert any(word in str(error.value) for word in ("allowed", "Allowed", "write"))
        assert " object at 0x" not in str(error.value)

    every(wrong_calls(), check)
