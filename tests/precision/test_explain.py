"""What explain says is what a real run holds."""

import pytest

from halfstep import POLICIES, Precision, parse_policy
from halfstep.optim.optimizers import AdamW
from halfstep.precision.explain import bytes_per_parameter
from reference.training import CPU_POLICIES, OPTIMIZERS, batches, loss_of, mlp

# The design, section 2, last column, split by hand: weights, masters, remainder, gradients (of one
# micro-batch), two moments.
BYTES = {
    "fp32": (4, 0, 0, 4, 8),
    "tf32": (4, 0, 0, 4, 8),
    "bf16-mixed": (4, 0, 0, 4, 8),
    "bf16-module": (4, 0, 0, 4, 8),
    "fp16-mixed": (4, 0, 0, 4, 8),
    "bf16-master": (2, 4, 0, 4, 8),
    "fp16-master": (2, 4, 0, 4, 8),
    "bf16-split": (2, 0, 2, 2, 8),
    "bf16-split24": (2, 0, 1, 2, 8),
    "bf16-kahan": (2, 0, 2, 2, 4),
    "bf16-sr": (2, 0, 0, 2, 4),
    "bf16-pure": (2, 0, 0, 2, 4),
    "fp16-pure": (2, 0, 0, 2, 4),
}
COMPONENTS = ("weights", "masters", "remainder", "gradients", "moments")
OWN = ("bf16-split", "bf16-split24", "bf16-kahan", "bf16-sr")


def test_bytes_are_the_design_s():
    for name, sizes in BYTES.items():
        cost = bytes_per_parameter(POLICIES[name])
        assert tuple(cost.items()) == tuple(zip(COMPONENTS, sizes, strict=True))
    # two scales of one byte for 128 elements
    cost = bytes_per_parameter(parse_policy("bf16-split,moments=8bit"))
    assert tuple(cost.values()) == (2, 0, 2, 2, 2 + 2 / 128)


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
