"""Planted faults: cause, operation, module, remedy and samples are right; healthy runs have none.

A program is healthy if its loss and all gradients are finite, which each test looks up itself.
"""

from __future__ import annotations

import pytest
import torch

from diagnostics.planted import FAULTS, MAKERS, batch_for, loss_of
from diagnostics.small_programs import FAULTS as SMALL, HEALTHY
from halfstep import NonFiniteError, Precision, first_cause
from halfstep.diagnostics.nonfinite.cause import OF_OPERATION


def under(policy, model):
    """The model, or a Precision of it at a loss scale of 1."""
    if not policy:
        return model
    spec = policy + (",init_scale=1" if policy.startswith("fp16") else "")
    return Precision(spec, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_with_its_remedy(fault):
    torch.manual_seed(0)
    model, batch = MAKERS[fault.model](), batch_for(fault.model)
    fault.plant(model, batch)
    precision = under(fault.policy, model)
    cause = first_cause(precision, lambda batch: loss_of(fault.model, model, batch), batch)
    assert cause is not None
    told, (op, cause_class, remedy) = f"{cause}", fault.told
    assert cause.cause_class == cause_class, told
    assert cause.op.startswith(op), told
    assert cause.direction == fault.direction, told
    assert remedy in cause.remedy, told
    assert cause.samples == fault.samples, told
    assert fault.module is None or cause.module == fault.module, told


@pytest.mark.parametrize("program", [*SMALL, *HEALTHY], ids=lambda program: program.name)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_is_said_of_a_small_program(program):
    torch.manual_seed(0)
    model = program.model()
    precision = under(program.policy, model)
    cause = first_cause(precision, lambda batch: program.loss(model, batch), program.batch)
    told, (op, cause_class, remedy) = f"{cause}", program.told
    if cause is None:
        assert not op
    else:
        assert cause.op.startswith(op or "none"), told
        assert cause.cause_class == cause_class, told
        assert remedy in cause.remedy, told
        assert ("fp32" not in cause.remedy) or cause.dtype == torch.float16, told
        # a user's own .half() is as much too narrow under another policy
        assert ("bf16-mixed" in cause.remedy) is (program.policy == "fp16-mixed"), told
        assert cause.samples == program.samples, told
        assert program.module in (None, cause.module), told
        assert "small_programs.py:" in cause.source or cause.module or cause_class.startswith("eps")
    with precision.autocast() if program.policy else torch.enable_grad():
        value = program.loss(model, program.batch)
    value.backward()
    ends = [value, *(p.grad for p in model.parameters() if p.grad is not None), *model.parameters()]
    assert all(bool(end.isfinite().all()) for end in ends) is (cause is None), told


@pytest.mark.covering
@pytest.mark.parametrize("name", [*MAKERS])
@pytest.mark.parametrize("spec", ["fp32", "bf16-mixed", "fp16-mixed,init_scale=1", "bf16-master"])
def test_a_healthy_step_has_no_cause(name, spec):
    """Padding, causal masks, T5's log of distances: infinities and masks that are meant."""
    torch.manual_seed(0)
    model, batch = MAKERS[name](), batch_for(name)
    if name in ("bert", "t5", "llama"):
        batch["attention_mask"] = torch.ones(4, 8, dtype=torch.long)
        batch["attention_mask"][1, 3:] = 0
        batch["attention_mask"][2, 1:] = 0
    precision = Precision(spec, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert first_cause(precision, lambda: loss_of(name, model, batch)) is None


@pytest.mark.parametrize("policy", ["fp32", "bf16-pure", "fp16-mixed,init_scale=1"])
def test_an_exploded_loss_is_answered_by_the_learning_rate(policy):
    """Also where it explodes in one step, and fp32 alone has a number for the next loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    precision = Precision(policy, model, torch.optim.SGD(model.parameters(), lr=1e3))
    x = torch.randn(32, 8)

    def loss(x):
        return model(x).float().sub(x[:, :1]).square().mean()

    def steps():
        for _ in range(20):
            with precision.autocast():
                value = loss(x)
            precision.step(value)

    with pytest.raises(NonFiniteError) as error:
        steps()
    cause = first_cause(precision, loss, x)
    assert cause.remedy.startswith("lower the learning rate: the loss rose from "), cause
    if policy != "fp16-mixed,init_scale=1":
        assert str(error.value).splitlines()[1] == f"to do: {cause.remedy}"
    else:
        assert cause.remedy.endswith(f"at step {precision.progress.steps}")  # the one that failed
    x[3] = 3e38  # whatever the loss has been, a row is to blame for this
    with torch.no_grad():
        [p.fill_(0.01) for p in model.parameters()]
    assert "learning rate" not in first_cause(precision, loss, x).remedy


@pytest.mark.parametrize("exploded", [True, False])
def test_a_row_that_fp32_bears_does_not_hide_an_exploded_loss(exploded):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    precision = Precision("fp16-mixed", model, torch.optim.SGD(model.parameters(), lr=0.1))
    precision.progress.losses.extend([(1, 1.0), (2, 9.0), (3, 30.0)] if exploded else [])
    x = torch.randn(32, 8)
    x[3] = 1e6
    cause = first_cause(precision, lambda x: model(x).float().abs().mean(), x)
    assert cause.samples == (3,)
    assert cause.remedy.startswith("lower the learning rate") == exploded, cause


def test_a_loss_that_no_operation_in_sight_made():
    loss = torch.full((), float("nan"), requires_grad=True)
    cause = first_cause(torch.nn.Linear(1, 1), lambda batch: loss, torch.ones(2))
    assert cause.cause_class == "not finite outside the batch"


@pytest.mark.parametrize("name", ["logit", "acosh", "xlogy", "log1p", "rsqrt", "acos", "log"])
def test_a_remedy_that_is_followed_ends_in_finite_numbers(name):
    x = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0], requires_grad=True)
    call = OF_OPERATION[name].rpartition(": x")[2].removesuffix(f".{name}()").removesuffix(".log()")
    operand = eval(f"x{call}", {"x": x, "eps": 1e-6})
    value = torch.xlogy(x, operand) if name == "xlogy" else getattr(operand, name)()
    assert value.isfinite().all()
    value.sum().backward()
    assert x.grad.isfinite().all()
