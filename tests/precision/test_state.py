"""Saving and resuming: every policy continues bit for bit, and nothing is loaded by halves."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

from halfstep import Precision, PrecisionError, optim
from reference.training import (
    CPU_POLICIES,
    MASTERS,
    OPTIMIZERS,
    batches,
    differences,
    loss_of,
    mlp,
    scaled,
    snapshot,
    through_a_file,
)

OPTIONS = {"init_scale": 2**8, "growth_interval": 2, "hysteresis": 2}
DATA = batches(7)
BAD = (2, 3)  # steps whose gradients overflow, where the policy can skip


def make(name: str, optimizer: str = "adamw-loop", **options):
    model = mlp()
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, Precision(scaled(name, **{**OPTIONS, **options}), model, made)


def train(parts, steps) -> list:
    model, _, precision = parts
    results = []
    for i in steps:
        x, y = DATA[i]
        loss = loss_of(model, precision, (x, y))
        if i in BAD and precision.policy.loss_scale.kind == "dynamic":
            handle = model[0].weight.register_hook(lambda g: g * float("inf"))
            precision.backward(loss)
            handle.remove()
        else:
            precision.backward(loss)
        results.append(precision.step(max_norm=1.0))
    return results


@functools.cache
def uninterrupted(name: str, optimizer: str):
    parts = make(name, optimizer)
    results = train(parts, range(7))
    return results, snapshot(*parts), copy.deepcopy(parts[2].state_dict())


@pytest.mark.covering
@pytest.mark.parametrize(
    ("optimizer", "cut"),
    [
        *itertools.product(["adamw-loop"], [0, 1, 3, 4, 6]),  # 3: between the two overflows
        *itertools.product(["sgd", "adamw-fused", "stranger"], [3]),
    ],
)
@pytest.mark.parametrize("name", CPU_POLICIES)
def test_a_resumed_run_is_the_uninterrupted_run(name, optimizer, cut):
    expected, end, state = uninterrupted(name, optimizer)
    first = make(name, optimizer)
    results = train(first, range(cut))
    model, made, precision = first
    saved = through_a_file(
        {"m": model.state_dict(), "o": made.state_dict(), "p": precision.state_dict()}
    )
    second = make(name, optimizer)
    if cut:
        train(second, [6])  # any other state than the fresh one
    second[0].load_state_dict(saved["m"])
    second[1].load_state_dict(saved["o"])
    second[2].load_state_dict(saved["p"])
    results += train(second, range(cut, 7))
    assert results == expected
    assert differences(end, snapshot(*second)) == []
    assert differences(state, second[2].state_dict()) == []


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_the_state_holds_all_that_changes(name):
    model, made, precision = make(name)
    train((model, made, precision), range(4))
    state = precision.state_dict()
    counts = {"applied_total", "skipped_total", "skipped_in_a_row"}
    assert set(state) == {"policy", "loss_scale", *counts}
    dynamic = name.startswith("fp16")
    assert state["policy"] == str(precision.policy)
    assert state["loss_scale"] == (
        # two clean steps: 512; then two overflows, the first tolerated: 256
        {"value": 256.0, "good_steps": 0, "hysteresis_left": 0} if dynamic else {}
    )
    assert (state["skipped_total"], state["skipped_in_a_row"]) == ((2, 2) if dynamic else (0, 0))
    assert state["applied_total"] == (2 if dynamic else 4)
    for entry, (key, exact) in zip(made.state.values(), precision.masters.items(), strict=True):
        assert ({"master", "remainder"} & entry.keys() != set()) == (name in MASTERS)
        master = entry.get("master")
        assert master is None or torch.equal(master, exact), key
        assert master is None or (master.dtype, master.requires_grad) == (torch.float32, False)


def frozen_state(parts):
    return copy.deepcopy((snapshot(*parts), parts[2].state_dict()))


@pytest.mark.covering
@pytest.mark.parametrize("to", CPU_POLICIES)
@pytest.mark.parametrize("of", CPU_POLICIES)
def test_a_state_of_another_policy_is_refused(of, to):
    if of == to:
        return
    saved = make(of)[2].state_dict()
    parts = make(to)
    before = frozen_state(parts)
    with pytest.raises(PrecisionError, match="resume with") as caught:
        parts[2].load_state_dict(saved)
    assert str(parts[2].policy) in str(caught.value)
    assert saved["policy"] in str(caught.value)
    assert differences(before, frozen_state(parts)) == []


@pytest.mark.parametrize("wrong", [{"applied_total": -3}, {"skipped_total": 2.5},
                                   {"skipped_in_a_row": "x"}, {"loss_scale": None}])  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(wrong):
    parts = make("fp16-mixed")
    before, saved = frozen_state(parts), parts[2].state_dict() | wrong
    for state in (saved, {k: v for k, v in saved.items() if k not in wrong}):
        with pytest.raises(PrecisionError, match=f"has {next(iter(wrong))}="):
            parts[2].load_state_dict(state)
    assert differences(before, frozen_state(parts)) == []


def test_a_subclass_with_a_step_of_its_own_keeps_its_moments():
    class Told(optim.AdamW):
        def step(self, *args, **options):
            return super().step(*args, **options)

    class Plain(optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    for kind in (Told, Plain):
        model = nn.Linear(4, 4)
        optimizer = kind(model.parameters(), lr=0.1)
        precision = Precision("bf16-split", model, optimizer)
        with precision.autocast():
            loss = model(torch.ones(1, 4)).float().sum()
        precision.step(loss)
        assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["bf16-mixed", *MASTERS])
def test_a_state_of_before_had_the_masters(name):
    first = make(name)
    train(first, range(2))
    exact = dict(first[2].masters.items())
    of_before = {**first[2].state_dict(), "masters": exact if name in MASTERS else {}}
    second = make(name)
    second[0].load_state_dict(first[0].state_dict())
    second[2].load_state_dict(through_a_file(of_before))
    assert differences(exact, dict(second[2].masters.items())) == []


def test_masters_of_another_model_or_format_are_refused_as_a_whole():
    source = make("fp16-master")
    train(source, range(2))
    masters = dict(source[2].masters.items())
    bias = masters["2.bias"]
    for wrong in (
        {"other": bias}, {"2.bias": torch.ones(3)}, {"2.bias": [0.0, 0.0]},
        {"2.bias": bias.half()},  # a checkpoint that somebody made smaller
    ):  # fmt: skip
        parts = make("fp16-master")
        before = frozen_state(parts)
        with pytest.raises(PrecisionError, match="from another model"):
            parts[2].load_state_dict({**source[2].state_dict(), "masters": {**masters, **wrong}})
        assert differences(before, frozen_state(parts)) == []
