"""Tasks and addresses are kept from step to step; whatever moves or changes is noticed."""

import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from halfstep import Precision
from halfstep.optim import AdamW


def make():
    torch.manual_seed(0)
    values = torch.randn(6, 6), torch.randn(300), torch.randn(3, 8)
    parameters = [nn.Parameter(v.bfloat16()) for v in values[:2]] + [nn.Parameter(values[2])]
    return parameters, AdamW(parameters, lr=0.1, update="split", moments="bf16")


def new_memory(parameters, optimizer):
    for parameter in parameters:
        parameter.data = parameter.data.clone()


def other_layout(parameters, optimizer):
    parameters[0].data = parameters[0].data.t().contiguous().t()
    state = optimizer.state[parameters[0]]
    for key in ("exp_avg", "exp_avg_sq", "remainder"):
        state[key] = state[key].t().contiguous().t()


def a_part(parameters, optimizer):
    """As many bytes further on: same strides, another address, elements between them."""
    wide = torch.zeros(6, 12, dtype=torch.bfloat16)
    wide[:, 6:] = parameters[0].data
    parameters[0].data = wide[:, 6:]


def turned(parameters, optimizer):
    """The same memory in another order."""
    parameters[0].data = parameters[0].data.t()


def new_moments(parameters, optimizer):
    state = optimizer.state[parameters[1]]
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


def another_step_number(parameters, optimizer):
    optimizer.state[parameters[2]]["step"].fill_(40)


def new_options(parameters, optimizer):
    optimizer.param_groups[0].update(lr=0.01, weight_decay=0.5)
    optimizer.storage["seed"] = 3


def no_state(parameters, optimizer):
    optimizer.state.clear()


def loaded(parameters, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def a_group_more(parameters, optimizer):
    parameters.append(nn.Parameter(torch.ones(5)))
    optimizer.add_param_group({"params": parameters[-1:]})


def a_parameter_less(parameters, optimizer):
    del optimizer.param_groups[0]["params"][0]


CHANGES = (
    new_memory, other_layout, a_part, turned, new_moments, another_step_number, new_options,
    no_state, loaded, a_group_more, a_parameter_less,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_steps_is_noticed(change):
    found = []
    for kept in (True, False):
        parameters, optimizer = make()
        for number in range(6):
            if number == 3:
                change(parameters, optimizer)
            generator = torch.Generator().manual_seed(number)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
            if not kept:
                optimizer._kept.clear()
            optimizer.step()
        states = [v for p in parameters for v in optimizer.state.get(p, {}).values()]
        found.append([*(p.detach() for p in parameters), *states])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("change", [no_state, new_moments, loaded, a_parameter_less])
def test_both_forms_of_what_an_optimizer_holds_are_kept_until_it_changes(change):
    model = nn.ParameterList(nn.Parameter(torch.ones(9)) for _ in range(3))
    optimizer, forms = torch.optim.AdamW(model.parameters()), []
    precision = Precision("bf16-master", model, optimizer)
    for number in range(6):
        if number == 3:
            change([*model], optimizer)
        with precision.autocast():
            loss = sum(p.float().square().sum() for p in model)
        precision.step(loss)
        forms.append(precision.masters.exchange._forms[optimizer])
    assert [a is b for a, b in pairwise(forms)][1:] == [True, False, True, True]


def test_tasks_are_kept_but_gradients_are_not():
    """Of each set of parameters with gradients, where sets take turns."""
    parameters, optimizer = make()
    tasks = []
    for some in (parameters[:1], parameters[1:]) * 2:
        for parameter in some:
            parameter.grad = torch.ones_like(parameter)
        gradients = [weakref.ref(parameter.grad) for parameter in some]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert not any(gradient() is not None for gradient in gradients)
        tasks.append([task for kept in optimizer._kept.values() for task in kept.tasks])
    assert [len(found) for found in tasks] == [1, 3, 3, 3]
    assert all(a is b for a, b in zip(tasks[1], tasks[3], strict=True))
