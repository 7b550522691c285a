"""``halfstep.watch`` where a loop does what loops do: closures, copies, complex and odd tensors."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import warnings

import pytest
import torch
from torch import nn

from halfstep import Precision, SpikeError, load_numerics, trace, trace_nonfinite, watch
from halfstep.optim.optimizers import AdamW

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def of(step, kind: str) -> dict[str, float]:
    return {one.name: one.absmax for one in step.of(kind)}


@pytest.mark.covering
@pytest.mark.parametrize("given", ["positional", "by keyword"])
@pytest.mark.parametrize("found", [True, False], ids=["given", "found"])
def test_a_closures_gradients_are_those_of_its_step(given, found, tmp_path):
    # As Lightning steps: zero_grad, forward and backward are all in the closure.
    model, norms = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        norms.append(float(model[0].weight.grad.abs().max()))
        return loss

    with watch(model, optimizer if found else None, every=1, to=tmp_path / "n.jsonl"):
        for _ in range(3):
            loss = (
                optimizer.step(closure)
                if given == "positional"
                else optimizer.step(closure=closure)
            )
            assert loss.requires_grad
    steps = load_numerics(tmp_path / "n.jsonl").steps
    assert [of(step, "gradient")["0.weight"] for step in steps] == norms
    for step in steps:
        updates, gradients = of(step, "update"), of(step, "gradient")
        for name, gradient in gradients.items():  # the update of SGD, but for its rounding
            assert updates[name] == pytest.approx(0.5 * gradient, rel=1e-4)


@pytest.mark.parametrize("policy", ["", "fp32", "bf16-mixed", "bf16-split"])
def test_copies_and_pickles_made_inside_are_plain(policy):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if policy == "bf16-split":
        optimizer = AdamW(model.parameters(), lr=0.1)
    source = Precision(policy, model, optimizer) if policy else optimizer
    with watch(model, source, every=1) as watched:
        for _ in range(2):
            copied, saved = copy.deepcopy(model), io.BytesIO()
            torch.save(model, saved)
            for module in copied.modules():
                assert not module._forward_hooks
                assert not module._forward_pre_hooks
                assert not module._forward_hooks_always_called
            assert b"halfstep" not in saved.getvalue()
            before = [p.detach().clone() for p in model.parameters()]
            if policy:
                with source.autocast():
                    loss = model(X).float().mean()
                source.step(loss)
            else:
                model(X).mean().backward()
                optimizer.step()
            copied(X)
            assert (
                watched.report().of("activation")[0].elements == 16 * 8
            )  # the copy's do not count
            assert not all(map(torch.equal, before, model.parameters()))
    if not policy:
        assert not any("__reduce_ex__" in vars(module) for module in model.modules())
        assert copy.deepcopy(model)(X).shape == (16, 1)


def test_a_step_that_spikes_is_counted():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    precision, raised = Precision("fp32", model, optimizer, on_spike="stop"), 0
    with watch(model, precision, every=1) as watched:
        for step in range(1, 31):
            loss = model(X).square().mean() * (1e6 if step == 25 else 1)
            try:
                precision.step(loss)
            except SpikeError:
                raised += 1
            assert watched.report().step == step
            assert watched.report().applied == (step != 25)
    assert raised == 1


def test_complex_empty_and_scalar_parameters():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.complex = nn.Parameter(torch.full((4, 4), 3 - 4j))
            self.empty = nn.Parameter(torch.empty(0))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.whole = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)

        def forward(self, x):
            return (x.to(torch.complex64) @ self.complex).abs() * self.scalar + self.empty.sum()

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it drops the imaginary part
        with watch(model, optimizer, every=1) as watched:
            before = model.complex.detach().clone()
            model(X).sum().backward()
            optimizer.step()
    found = {(one.kind, one.name): one for one in watched.report().tensors}
    weight, update = found["weight", "complex"], found["update", "complex"]
    assert (weight.elements, weight.absmax, weight.exponents) == (32, 4.0, {1: 16, 2: 16})
    change = torch.view_as_real(model.complex.detach() - before)
    assert update.absmax == change.abs().max()
    assert found["gradient", "complex"].elements == 32
    assert found["weight", "empty"].elements == found["update", "empty"].elements == 0
    assert found["weight", "scalar"].absmax == 2
    assert ("weight", "whole") not in found
    assert "weight empty" in watched.table(rows=None)


def test_a_file_that_is_gone_does_not_stop_the_loop(tmp_path):
    model, path = network(), tmp_path / "numerics.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision("fp32", model, optimizer)
    with watch(model, precision, every=1, to=path) as watched:
        assert precision.step(model(X).mean()).applied
        path.unlink()
        path.mkdir()
        with pytest.warns(UserWarning, match="cannot be written.*goes on without its file"):
            assert precision.step(model(X).mean()).applied
        assert precision.step(model(X).mean()).applied
    assert watched.report().step == 3


@pytest.mark.covering
@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.0])
@pytest.mark.parametrize("subnormal", [0, 1, 3])
def test_subnormal_are_the_numbers_that_the_tensor_held_so(scale, subnormal):
    # a scale that is no power of two is divided out, which moves normal numbers below the least one
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with watch(model, optimizer, scaler=scaler, every=1) as watched:
        scaler.scale(model(X).sum()).backward()
        least = 2.0**-126
        values = [least / 2] * subnormal + [least] * (3 - subnormal)
        model.weight.grad = torch.tensor([[*values, 1.0]])
        scaler.step(optimizer)
        scaler.update()
    (gradient,) = watched.report().of("gradient")
    assert gradient.subnormal == subnormal


class Meeting(nn.Module):
    """Halts another thread's forward here, until the main thread's has gone past."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.passed = threading.Event(), threading.Event()

    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            self.arrived.set()
            assert self.passed.wait(60)
        return x


@contextlib.contextmanager
def evaluated_by_another_thread(model: nn.Sequential, meeting: Meeting):
    def evaluate():
        with torch.no_grad():
            model(X)

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert meeting.arrived.wait(60)
    try:
        yield
    finally:
        meeting.passed.set()
        thread.join()


def test_a_trace_names_the_module_of_its_own_thread():
    meeting = Meeting()
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(meeting, nn.Linear(8, 2)))
    with trace_nonfinite(model) as traced, evaluated_by_another_thread(model, meeting):
        (model[0](X) * 0 - 1).log().sum()
    assert (traced.first_cause.op, traced.first_cause.module) == ("aten.log.default", "")
    meeting.arrived.clear()
    meeting.passed.clear()
    with trace(model) as ran, evaluated_by_another_thread(model, meeting):
        (model[0](X).square().sum()).backward()
    assert {row.module for row in ran.operations if row.op == "addmm"} == {"0"}
    assert {row.class_name for row in ran.operations if row.op in ("pow", "sum")} <= {"", "Linear"}
    backward = {row.module for row in ran.operations if row.op == "mm"}
    assert backward == {"0"}
