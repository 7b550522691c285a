"""Planted faults: cause, operation, module and remedy are right; healthy runs have none."""

from __future__ import annotations

import pytest
import torch

from diagnostics.planted import FAULTS, MAKERS, batch_for, loss_of
from halfstep import Precision, PrecisionError, first_cause


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_with_its_remedy(fault):
    torch.manual_seed(0)
    model, batch = MAKERS[fault.model](), batch_for(fault.model)
    fault.plant(model, batch)
    spec = fault.policy + (",init_scale=1" if fault.policy.startswith("fp16") else "")
    precision = Precision(spec, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = fault.loss or (lambda model, batch: loss_of(fault.model, model, batch))
    cause = first_cause(precision, lambda: loss(model, batch))
    assert cause is not None
    told = f"{cause}"
    assert cause.cause_class == fault.cause_class, told
    assert cause.op.startswith(fault.op), told
    assert cause.direction == fault.direction, told
    assert fault.remedy in cause.remedy, told
    assert fault.module is None or cause.module == fault.module, told


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


def test_what_cannot_be_searched_is_refused():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(PrecisionError, match=r"first_cause\(loss\) is .*allowed: a function"):
        first_cause(model, model(torch.ones(1, 2)).sum())
    with pytest.raises(PrecisionError, match=r"first_cause\(precision\)"):
        first_cause("model", lambda: None)
