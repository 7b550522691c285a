"""In one context around everything, a weight that was written is used as it is from then on."""

import contextlib
import copy
import sys
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from every import every
from halfstep.precision.casting import op_table
from halfstep.precision.casting.op_table import before_forward, drop_casts

ATEN = torch.ops.aten
X = torch.linspace(-2, 2, 48).reshape(6, 8)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def scaled(model):
    return {name: p.detach() * 1.5 for name, p in model.named_parameters()}


def under_no_grad(write):
    return torch.no_grad()(write)


def step_of_a_plain_optimizer(model, _, optimizer=torch.optim.SGD, **options):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer(model.parameters(), lr=0.5, **options).step()
    model.zero_grad()


def average(model, _):
    other = halfstep.EMA(net().requires_grad_(True), 0.9)
    other.averages = {name: value * 1.5 for name, value in other.averages.items()}
    stack = contextlib.ExitStack()
    stack.enter_context(other.applied_to(model))
    return stack


def pruned(model, _):
    prune.custom_from_mask(model[0], "weight", torch.eye(8))
    prune.remove(model[0], "weight")


WRITES = {
    "load": lambda m, _: m.load_state_dict(scaled(m)),
    "assign": lambda m, _: m.load_state_dict(scaled(m), assign=True),
    "copy_": under_no_grad(lambda m, _: m[0].weight.copy_(m[0].weight * 1.5)),
    "a row": under_no_grad(lambda m, _: m[0].weight.view(-1)[3:].fill_(1.0)),
    "out of data": lambda m, _: torch.mul(m[0].weight.data, 1.5, out=m[0].weight.data),
    "operator on data": lambda m, _: ATEN.mul_(m[0].weight.data, 1.5),
    "data": lambda m, _: m[0].weight.data.mul_(1.5),
    "a row of data": lambda m, _: m[0].weight.data[1].zero_(),
    "data that is kept": lambda m, kept: kept.mul_(1.5),
    "all data": lambda m, _: torch._foreach_mul_([p.data for p in m.parameters()], 1.5),
    "new data": lambda m, _: setattr(m[0].weight, "data", m[0].weight.data * 1.5),
    "numpy": lambda m, _: m[0].weight.detach().numpy().fill(1.0),
    "average": average,
    "prune": pruned,
    "sgd": step_of_a_plain_optimizer,
    "fused": lambda m, _: step_of_a_plain_optimizer(m, _, torch.optim.AdamW, fused=True),
    "ours": lambda m, _: step_of_a_plain_optimizer(m, _, halfstep.optim.AdamW),
    "tied": lambda m, _: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach() * 1.5)),
}  # fmt: skip
USES = {
    "call": lambda m: m(X),
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (X,)),
    "operators": lambda m: ATEN.linear(
        ATEN.linear.default(X, m[0].weight, m[0].bias), m[2].weight, m[2].bias
    ),
    "linear": lambda m: F.linear(F.linear(X, m[0].weight, m[0].bias), m[2].weight, m[2].bias),
}


def require_used(write, use, own):
    """A model gives what its copy gives, of which no cast is kept, and so do its gradients.

    The context is of the model's own Precision, or of another model's.
    """
    model = net()
    trained = model if own else net()
    sgd = torch.optim.SGD(trained.parameters(), lr=0.1)
    precision = halfstep.Precision("bf16-mixed" if own else "fp16-mixed", trained, sgd)
    data, found = model[0].weight.data, []
    with precision.autocast():
        with torch.set_grad_enabled(own):
            before = USES[use](model)
        _open = WRITES[write](model, data)
        for one in (model, copy.deepcopy(model)):
            after = USES[use](one)
            loss = after.float().square().sum()
            found.append([after, *torch.autograd.grad(loss, [*one.parameters()])])
    assert not torch.equal(before, after)
    assert all(map(torch.equal, *found))


def test_a_written_weight_is_used_as_it_is():
    every(((write, "call", own) for write in WRITES for own in (True, False)), require_used)
    every(((w, use, True) for w in ("copy_", "data") for use in USES), require_used)


def by_another_thread():
    # which uses other weights then
    thread = threading.Thread(target=lambda: (drop_casts(), op_table.before_use([])))
    thread.start()
    thread.join()


class Collecting(TorchDispatchMode):
    """Ends a context that drops casts while torch makes one, as Python's garbage collector may."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        drop_casts()
        return func(*args, **(kwargs or {}))


OTHER = type("Other", (torch.Tensor,), {})
KINDS = (
    lambda w: w.clone().requires_grad_(),
    lambda w: torch.Tensor._make_subclass(OTHER, w, True),
    lambda w: TwoTensor(w, w.clone()).requires_grad_(),  # as a DTensor, without a memory
    type("Own", (nn.Parameter,), {}),
)


def drop_at(instruction, drop=None, kind=nn.Parameter, around=None):
    """Drop casts before one instruction of Python of a use; return how many there are."""
    weight, bias, count = kind(torch.ones(8, 8)), kind(torch.ones(8)), 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != op_table.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if event == "opcode" and count == instruction:
            drop()
        return trace

    with halfstep.autocast("bf16-mixed", "cpu"):
        before = sys.gettrace()
        sys.settrace(trace)
        with around or contextlib.nullcontext():
            F.linear(X, weight, bias)
        sys.settrace(before)
        weight.data.mul_(1.5)
        expected = F.linear(X, weight.detach(), bias.detach())  # of no leaf a cast is kept
        assert torch.equal(F.linear(X, weight, bias), expected)
    return count


def test_casts_of_any_class_may_be_dropped_at_any_time():
    # as Python's garbage collector does that ends a context, or another thread
    drop_at(0, around=Collecting())
    last = max(drop_at(0, kind=kind) for kind in KINDS)
    for drop in (drop_casts, by_another_thread):
        every(range(1, last + 1), lambda at, drop=drop: drop_at(at, drop))


class Casts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and type(args[0]) is nn.Parameter
        return func(*args, **(kwargs or {}))


def test_a_weight_that_nobody_writes_is_cast_once():
    layer = nn.Linear(8, 8)
    precision = halfstep.Precision("bf16-mixed", layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    with Casts() as seen, precision.autocast():
        h = X
        for step in range(5):
            h = layer(h).relu_()
            h.data.mul_(0.9)  # of an activation
            if step == 2:
                h.sum().backward(retain_graph=True)
            torch.func.vmap(lambda x: x.clone().mul_(2.0))(X)  # has no memory to be asked
            image = X.clone().requires_grad_()  # another each time, perhaps where one before was
            layer(image)
    assert seen.count == 2


def test_without_a_mode_a_call_of_the_model_looks_at_its_weights():
    # of data in place, and of torch's fused steps, a version counter knows nothing
    for write in [w for w in WRITES if not (w == "fused" or "data" in w) or w == "new data"]:
        model, seen = net(), []
        look = lambda m, _, seen=seen: before_forward(m.parameters(), seen)  # noqa: E731
        model.register_forward_pre_hook(look)
        with torch.autocast("cpu", torch.bfloat16):
            model(X)
            _open = WRITES[write](model, None)
            with torch.set_grad_enabled(write != "numpy"):
                found = model(X)
            drop_casts()
            assert torch.equal(found, model(X)), write
