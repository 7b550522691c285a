"""What explain says is what a real run holds."""

import pytest

from halfstep import POLICIES, Precision
from halfstep.optim.optimizers import AdamW
from halfstep.precision.explain import bytes_per_parameter
from reference.training import CPU_POLICIES, OPTIMIZERS, batches, loss_of, mlp

OWN = ("bf16-split", "bf16-split24", "bf16-kahan", "bf16-sr")


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", [*CPU_POLICIES, *OWN])
def test_bytes_are_those_of_the_tensors_of_a_real_run(name):
    model = mlp()
    optimizer = (
        AdamW(model.parameters()) if name in OWN else OPTIMIZERS["adamw-loop"](model.parameters())
    )
    precision = Precision(name, model, optimizer)
    gradients = 0
    for i, (x, y) in enumerate(batches(2)):
        loss = loss_of(model, precision, (x, y))
        precision.backward(loss)  # the second time gradients are held while moments exist
        gradients = size(p.grad for p in model.parameters())
        if i == 0:
            precision.step()
    updated = list(precision.named_parameters().values())
    weights = list(model.parameters())
    own = {id(p) for p in weights}
    if name == "bf16-master":  # a stock optimizer wants them in fp32, 16 bits are freed then
        with precision.masters.installed():
            finished = precision.masters.gradients()
            precision.masters.hand_over(precision.optimizers, finished, 1.0)
        del finished
        assert all(p.grad is None for p in weights)
        gradients = size(p.grad for p in updated)
    measured = {
        "weights": size(weights),
        "masters": size(p for p in updated if id(p) not in own),
        "remainder": size(s["remainder"] for s in optimizer.state.values() if "remainder" in s),
        "gradients": gradients,
        "moments": size(
            t for s in optimizer.state.values() for k, t in s.items() if k.startswith("exp_avg")
        ),
    }
    count = sum(p.numel() for p in weights)
    stated = bytes_per_parameter(POLICIES[name])
    assert measured == {part: per * count for part, per in stated.items()}
