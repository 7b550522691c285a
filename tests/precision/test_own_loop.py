"""Precision in loops of other people's: constructors that fail, resumes in any order, copies."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from halfstep import NonFiniteError, OneRank, Precision, PrecisionError
from halfstep.optim.optimizers import SGD, AdamW

MAKE = {"bf16-master": torch.optim.SGD, "fp16-master": torch.optim.SGD, "bf16-split": SGD}
X = torch.linspace(-1, 1, 32).reshape(8, 4)


def net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, outputs))


def under(policy, model, optimizer=None, **options):
    optimizer = optimizer or MAKE.get(policy, torch.optim.SGD)(model.parameters(), lr=0.1)
    return optimizer, Precision(policy, model, optimizer, **options)


def loss_of(model, precision):
    with precision.autocast():
        return model(X).square().mean()


def step(model, precision):
    return precision.step(loss_of(model, precision))


def test_a_constructor_that_failed_leaves_the_parameters_to_the_next_one():
    model = net()
    optimizer = AdamW(model.parameters(), update="split")
    with pytest.raises(PrecisionError, match="update='split'") as kept:
        Precision("bf16-kahan", model, optimizer)
    assert kept.tb is not None  # as a notebook keeps it, with the frame of the constructor
    _, precision = under("bf16-split", model, optimizer)
    assert step(model, precision).applied


@pytest.mark.parametrize("policy", MAKE)
def test_close_also_lets_go_of_parameters_that_no_optimizer_has(policy):
    model = net()
    _, precision = under(policy, model, MAKE[policy](model[1].parameters(), lr=0.1))
    for _ in range(2):  # of a second one gradients are fp32
        precision.backward(loss_of(model, precision))
    assert model[0].weight.grad.dtype == torch.float32
    expected = model[0].weight.grad.to(model[0].weight.dtype)
    precision.close()
    assert all(p.grad_dtype == p.dtype for p in model.parameters())
    assert torch.equal(model[0].weight.grad, expected)  # nobody's to clear
    assert all(p.grad is None for p in model[1].parameters())


@pytest.mark.covering
@pytest.mark.parametrize("order", ["mop", "pom", "mpo", "opm", "pmo"])
@pytest.mark.parametrize("policy", MAKE)
def test_a_resume_is_exact_in_whatever_order_states_are_loaded(policy, order):
    model = net()
    optimizer, precision = under(policy, model)
    for _ in range(3):
        step(model, precision)
    states = {"m": model.state_dict(), "o": optimizer.state_dict(), "p": precision.state_dict()}
    states = copy.deepcopy(states)
    step(model, precision)
    other = net()
    into = dict(zip("op", under(policy, other), strict=True)) | {"m": other}
    for one in order:
        into[one].load_state_dict(states[one])
    step(other, into["p"])
    found = dict(into["p"].masters.items())
    for name, master in precision.masters.items():
        assert torch.equal(found[name], master), name


@pytest.mark.parametrize("policy", MAKE)
def test_a_head_of_another_size_is_trained_saved_and_loaded(policy):
    model = net()
    optimizer, precision = under(policy, model)
    step(model, precision)
    for gone in model[1].parameters():
        optimizer.state.pop(gone, None)  # torch saves no state of what it does not hold
    model[1] = nn.Linear(4, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    assert step(model, precision).applied
    model.load_state_dict({n: v / 2 for n, v in model.state_dict().items()})
    assert step(model, precision).applied
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][2].get("master", model[1].weight).shape == (3, 4)
    optimizer.load_state_dict(saved)
    precision.load_state_dict(precision.state_dict())


SCALED = ["fp16-mixed", "fp16-master"]
# Rounding to fp16 of operands and results in a forward and a backward of two layers.
NEAR = {"rtol": 0.02, "atol": 1e-3}


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", *SCALED])
def test_a_gradient_of_the_input_is_unscaled_and_its_loss_is_none_of_the_step(policy):
    model = net()
    expected = X.clone().requires_grad_()
    net()(expected).square().mean().backward()
    _, precision = under(policy, model)
    for ask in (lambda x: x, lambda x: [x]):
        x = X.clone().requires_grad_()
        with precision.autocast():
            loss = model(x).square().mean()
        precision.backward(loss, inputs=ask(x))
        torch.testing.assert_close(x.grad, expected.grad, **NEAR)
        assert not x._backward_hooks
        assert all(p.grad is None for p in model.parameters())
    loss = loss_of(model, precision)
    assert precision.step(loss).loss == loss.item()


@pytest.mark.parametrize("policy", MAKE)
def test_weights_that_are_loaded_for_an_evaluation_and_taken_back_lose_nothing(policy):
    (model, other), losses = (net(), net()), []
    _, precision = under(policy, model)
    _, undisturbed = under(policy, other)
    for _ in range(3):
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value / 2 for name, value in own.items()})
        with precision.autocast(), torch.no_grad():
            losses.append(model(X).square().mean().item())
        model.load_state_dict(own)
        step(model, precision)
        step(other, undisturbed)
    exact = dict(undisturbed.masters.items())
    for name, master in precision.masters.items():
        assert torch.equal(master, exact[name]), name
    assert len({*losses}) == 3


class Waits(OneRank):
    """Ranks of which the others wait in ``measure``; counts those that told them."""

    def __init__(self):
        self.told = 0

    def cannot(self):
        self.told += 1


def test_a_rank_that_cannot_take_a_parameter_in_tells_the_others():
    model, ranks = net(), Waits()
    optimizer, precision = under("fp32", model, ranks=ranks)
    precision.backward(loss_of(model, precision))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(PrecisionError, match="not a parameter of the model"):
        precision.step()
    assert ranks.told == 1


@pytest.mark.parametrize("policy", MAKE)
def test_a_precision_that_nobody_keeps_leaves_its_optimizer_shut(policy):
    model = net()
    optimizer, _ = under(policy, model)
    del _
    model(X).float().square().mean().backward()
    with pytest.raises(PrecisionError, match="was called by hand"):
        optimizer.step()


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-split"])
def test_a_loss_is_dropped_with_gradients_that_are_cleared(policy):
    model = net()
    model[1].bias.requires_grad_(False)
    _, precision = under(policy, model)
    with precision.autocast():
        dropped, kept = model(1e3 * X).square().mean(), model(X).square().mean()
    precision.backward(dropped, retain_graph=True)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    result = precision.step(kept)
    assert result.loss == pytest.approx(kept.item())


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-split"])
def test_a_loss_whose_gradients_are_all_zero_is_told_as_it_is(policy):
    model = net()
    _, precision = under(policy, model)
    with precision.autocast():
        loss = (model(X) * 0).square().mean() + 2.5
    assert precision.step(loss).loss == 2.5
    with precision.autocast():
        empty = model(X[:0]).square().mean()  # NaN, and its gradients are 0
    with pytest.raises(NonFiniteError, match="the loss is nan before any gradient"):
        precision.step(empty)


# As a context manager


def test_a_with_block_closes_at_its_end():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Precision("bf16-master", model, optimizer) as precision:
        assert precision.step(loss_of(model, precision)).applied
    with pytest.raises(PrecisionError, match="was closed"):
        precision.step(loss_of(model, precision))
    optimizer.step()  # the model's own again
    with pytest.raises(PrecisionError, match="was closed"), precision:
        pass


def test_a_second_precision_takes_the_model_over_where_the_first_keeps_no_more_than_weights():
    for policy in ("fp32", "fp16-mixed", "bf16-pure"):
        model = net()
        optimizer, first = under(policy, model)
        with pytest.raises(PrecisionError, match="not parameters of the model"):
            under(policy, model, torch.optim.SGD(net().parameters()))
        assert step(model, first).applied  # a refusal takes nothing over
        _, second = under(policy, model, optimizer)  # the cell of a notebook is run again
        assert step(model, second).applied
        with pytest.raises(PrecisionError, match="as another one took its model"):
            step(model, first)
    model = net()
    _, first = under("bf16-master", model)
    with pytest.raises(PrecisionError, match="another Precision of policy bf16-master"):
        under("bf16-master", model)
    first.close()
    _, second = under("bf16-master", model)
    assert loss_of(model, second).dtype == torch.float32


@pytest.mark.parametrize("policy", ["fp16-master", "bf16-split", "bf16-pure"])
def test_a_group_that_is_added_late_is_trained(policy):
    model = net()
    model[0].requires_grad_(False)
    optimizer, precision = under(policy, model, AdamW(model[1].parameters(), lr=0.1))
    step(model, precision)
    before = model[0].weight.clone()
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    assert step(model, precision).applied
    assert not torch.equal(model[0].weight, before)
    precision.close()
    if policy == "fp16-master":  # without masters its kernels take no fp16
        with pytest.raises(PrecisionError, match="fp16-master"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).half())]})


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-master"])
def test_owners_end_with_their_work(policy):
    """Folds of a function, an error in the middle, a cycle that holds one: none is in the way."""
    model = net()
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def fold(error=None):
        model.load_state_dict(start)
        optimizer, precision = under(policy, model)
        precision.me = precision  # a cycle, as many programs have one
        with precision if policy == "bf16-master" else nullcontext():
            assert step(model, precision).applied
            if error is not None:
                raise error
        return optimizer

    optimizer = fold()
    for error in (RuntimeError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fold(error)
        error.__traceback__ = None
    fold()
    optimizer.step()  # the first fold's, without a Precision


def test_a_precision_that_went_with_its_masters_is_named():
    model = net()
    under("bf16-master", model)
    with pytest.raises(PrecisionError, match=r"gone without close\(\).* as precision:` or"):
        under("bf16-master", model)


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
def test_a_users_post_step_hook_reads_and_writes_the_weights(policy):
    """An average in a hook sees this step's weights, and what a hook writes is trained on."""
    model, twin, seen = net(), net(), []
    optimizer, precision = under(policy, model)

    @torch.no_grad()
    def read_and_write(*_):
        seen.append(model[1].weight.clone())
        model[1].bias.fill_(0.5)

    optimizer.register_step_post_hook(read_and_write)
    _, plain = under(policy, twin)
    assert step(model, precision).applied
    assert step(twin, plain).applied
    assert torch.equal(seen[0], twin[1].weight)
    assert torch.equal(model[1].weight, twin[1].weight)
    assert precision.named_parameters()["1.bias"].tolist() == [0.5]


class Inner(torch.autograd.Function):
    """A part whose gradients its backward makes itself: in a nested ``grad`` or ``backward``."""

    @staticmethod
    def forward(ctx, part, nested, x, *parameters):
        ctx.part, ctx.nested = part, nested
        ctx.save_for_backward(x, *parameters)
        return part(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.part(x)
        if ctx.nested == "grad":  # as adjoints of an ODE and implicit layers do
            return (None, None, *torch.autograd.grad(y, (x, *parameters), gradient))
        y.backward(gradient)  # as a reentrant checkpoint does
        return (None, None, x.grad, *[None] * len(parameters))


@pytest.mark.parametrize("nested", ["grad", "backward"])
@pytest.mark.parametrize("policy", SCALED)
def test_gradients_of_a_nested_backward_are_unscaled_once(policy, nested):
    def gradients(policy):
        model = net()
        _, precision = under(policy, model)
        part = model[0]
        with precision.autocast():
            y = Inner.apply(part, nested, X.clone().requires_grad_(), *part.parameters())
            loss = model[1](y).square().mean()
        precision.backward(loss)
        assert not loss._backward_hooks
        return [p.grad.float() for p in model.parameters()]

    scaled = f"{policy},init_scale=256"  # so that fp16 holds each gradient
    for got, expected in zip(gradients(scaled), gradients("fp32"), strict=True):
        torch.testing.assert_close(got, expected, **NEAR)


class Calls(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.function()
        return gradient, None


def called(model, function):
    model[0].register_forward_hook(lambda *io: Calls.apply(io[-1], function))


def node(model, precision, look):
    held = model[0].weight.expand(4, 4).grad_fn.next_functions[0][0]
    held.register_hook(lambda *_: look())
    return held


def same(model, precision, look):
    model[0].weight.grad = model[1].weight.grad = torch.zeros(4, 4)


def huge(model, precision, look):
    model[0].weight.grad = torch.full((4, 4), 1e35)


def foreign(model, precision, look):
    leaf = torch.ones(3, requires_grad=True)
    called(model, lambda: precision.backward(leaf.sum()))
    model[2].register_forward_hook(lambda *io: io[-1] * leaf.mean())  # reached from outside, too
    return leaf.register_hook(look) and leaf


def at_the_end(model, precision, look):
    later = torch.autograd.Variable._execution_engine.queue_callback
    model[0].weight.register_hook(lambda _: later(look))


# Who looks at p.grad before a backward ends, or keeps its memory.
LOOKS = {
    "tensor": lambda m, _, look: m[0].weight.register_hook(look),
    "parameter": lambda m, _, look: m[0].weight.register_post_accumulate_grad_hook(look),
    "module": lambda m, _, look: m[1].register_full_backward_hook(look),
    "old module": lambda m, _, look: m[1].register_backward_hook(look),
    "function": lambda m, _, look: called(m, look),
    **{made.__name__: made for made in (node, same, huge, foreign, at_the_end)},
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("kind", LOOKS)
def test_nobody_finds_a_scaled_gradient(kind):
    def found(policy):
        model, seen = nn.Sequential(*net(4), nn.Linear(4, 1)), []
        _, precision = under(policy, model)

        def look(*_):
            seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

        held = LOOKS[kind](model, precision, look)
        for _ in range(2):
            precision.backward(loss_of(model, precision))
        ends = [*model.parameters(), *([held] if isinstance(held, torch.Tensor) else [])]
        return seen + [p.detach() if p.grad is None else p.grad for p in ends]

    scaled, plain = found("fp32,scale=dynamic,init_scale=65536"), found("fp32")
    assert len(plain) > 7 or kind in ("same", "huge")
    assert len(scaled) == len(plain)
    assert all(map(torch.equal, scaled, plain))


def test_where_nobody_looks_parameters_have_no_hooks():
    model, hooks = net(), []
    _, precision = under("fp16-mixed", model)
    for _ in range(2):
        with precision.autocast():
            y = model[0](X)
            # a hook on an activation, which does not look at gradients of parameters
            y.register_hook(lambda _: hooks.extend(p._backward_hooks for p in model.parameters()))
            loss = model[1](y).square().mean()
        precision.backward(loss)
    assert hooks == [None] * 8


def test_a_gradient_that_others_keep_is_not_unscaled_in_place():
    model, kept = nn.Linear(2, 2), []
    _, precision = under("fp16-mixed,init_scale=256", model)
    # what a hook keeps is the gradient as autograd made it, scaled; the parameter's is another
    y = model.weight.view(4)
    y.register_hook(kept.append)
    precision.backward(y.square().sum())
    assert torch.equal(kept[0].view(2, 2), 256 * model.weight.grad)


GRADIENTS = {
    "overlapping": lambda a, b, c: (torch.cat([a.view(4), b.view(6)]) + c.view(10)).square().sum(),
    "sparse": lambda a, b, c: nn.functional.embedding(
        torch.tensor([1, 1, 0]), a, sparse=True
    ).square().sum(),
    "not reached": lambda a, b, c: c.square().sum(),
}  # fmt: skip


@pytest.mark.parametrize("kind", GRADIENTS)
def test_every_element_of_a_gradient_is_unscaled_once(kind):
    def gradients(backward, held):
        backward(GRADIENTS[kind](*held))
        return [None if p.grad is None else p.grad.to_dense().clone() for p in held]

    def made():
        torch.manual_seed(0)
        return nn.ParameterList([torch.randn(2, 2), torch.randn(2, 3), torch.randn(10)])

    model, plain = made(), made()
    _, precision = under("fp16-mixed,init_scale=65536", model)
    for got, expected in zip(
        gradients(precision.backward, [*model]),
        gradients(torch.Tensor.backward, [*plain]),
        strict=True,
    ):
        assert (got is None) is (expected is None)
        assert got is None or torch.equal(got, expected)
        assert not any(p._backward_hooks for p in model)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_a_gradient_that_has_a_graph_is_unscaled_in_it():
    model = nn.Linear(3, 1)
    _, precision = under("fp16-mixed", model)
    for times in (1, 2):
        precision.backward((model.weight**3).sum(), create_graph=True)
        w = model.weight
        torch.testing.assert_close(w.grad, times * 3 * w.detach() ** 2)
        (curve,) = torch.autograd.grad(w.grad.sum(), w, retain_graph=True)
        torch.testing.assert_close(curve, times * 6 * w.detach())
    model.weight.grad = None  # the graph of its own gradient holds it
