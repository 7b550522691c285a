"""A search of the first cause leaves everything around it as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from halfstep import Precision, PrecisionError, first_cause

NAN = float("nan")


class Averaging(nn.Module):
    """Centres its input by a running mean, which each forward assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


def broken(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    x[3] = NAN
    return x


@pytest.mark.covering
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)), (8, 2, 3, 3)),
        (Averaging(), (8, 4)),
    ],
    ids=["batch norm of images", "a buffer assigned anew"],
)
@pytest.mark.parametrize("ending", ["found", "interrupted"])
def test_buffers_are_left_as_they_are(model, shape, ending):
    # torch's batch norm writes its averages without a new version, and a NaN there stays for ever
    before = {name: (b, b.clone()) for name, b in model.named_buffers()}
    x = broken(*shape)

    def loss(x):
        value = model(x).sum()
        if ending == "interrupted":
            raise KeyboardInterrupt
        return value

    if ending == "found":
        assert first_cause(model, lambda: loss(x)).cause_class == "data not finite"
    else:
        with pytest.raises(KeyboardInterrupt):
            first_cause(model, lambda: loss(x))
    for name, buffer in model.named_buffers():
        tensor, value = before[name]
        assert buffer is tensor, name
        assert torch.equal(buffer, value), name


def test_random_numbers_of_python_and_numpy_are_left_as_they_are():
    model = nn.Linear(4, 1)
    random.seed(0)
    np.random.seed(0)  # a mixup draws from it

    def loss(x):
        share = np.random.beta(0.5, 0.5) * random.random()
        return model(x * share).sum()

    assert first_cause(model, lambda: loss(broken(8, 4))) is not None
    drawn = random.random(), np.random.beta(0.5, 0.5)
    random.seed(0)
    np.random.seed(0)
    assert drawn == (random.random(), np.random.beta(0.5, 0.5))


@pytest.mark.parametrize("policy", ["", "bf16-mixed", "fp16-mixed"])
def test_gradients_of_other_modules_and_of_inputs_are_left_as_they_are(policy):
    made, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    noise = broken(8, 4).requires_grad_()
    judge.weight.grad = kept = torch.ones(1, 4)
    precision = policy and Precision(policy, made, torch.optim.SGD(made.parameters(), lr=0.1))
    cause = first_cause(precision or made, lambda: judge(made(noise)).mean())
    assert cause.cause_class == "data not finite"
    assert judge.weight.grad is kept
    assert torch.equal(kept, torch.ones(1, 4))
    assert judge.bias.grad is None
    assert noise.grad is None


@pytest.mark.parametrize(
    ("value", "told"),
    [(3.0, "got a float"), (torch.ones(2).requires_grad_(), "loss.mean"), (torch.ones(()), "froz")],
    ids=["number", "vector", "constant"],
)
def test_what_is_no_loss_is_refused(value, told):
    with pytest.raises(PrecisionError, match=rf"backward\(\) got a.*allowed.*{told}|{told}"):
        first_cause(nn.Linear(2, 1), lambda: value)


def test_an_overflow_of_equal_gradients_is_no_mask():
    # one large negative number all over looks like a mask that was added twice, but for where it is
    model = nn.Linear(4, 1)
    precision = Precision("fp16-mixed", model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((8, 4), 3e4)

    def loss(x):
        return 0.01 * (model(x) - 6e4).float().square().mean()

    with precision.autocast():
        value = loss(x)
    assert not precision.step(value).applied
    cause = first_cause(precision, lambda: loss(x))
    assert (cause.direction, cause.cause_class) == ("backward", "overflow in the backward")
