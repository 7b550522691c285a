"""The tracer of the first NaN or infinity: it names the producer, and nothing that is intended."""

import math
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import (
    Cause,
    Precision,
    first_cause,
    trace_nonfinite,
)
from halfstep.diagnostics.nonfinite.first_cause import ModuleCalls
from halfstep.diagnostics.nonfinite.operations import inputs, kind_of, operation
from halfstep.precision.casting.autocast import SimulatedProducts

INF = math.inf


class Block(nn.Module):
    """x + f(x), with a residual sum that no module sees."""

    def __init__(self, width: int, bias: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        nn.init.constant_(self.fc.bias, bias)

    def forward(self, x):
        return x + self.fc(torch.tanh(self.norm(x)))


class Net(nn.Module):
    """A stack of blocks; ``biases`` is what each adds."""

    def __init__(self, *biases: float, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8, bias) for bias in biases)
        self.reentrant = checkpointing

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def trace_of(function, *args, model=None) -> Cause | None:
    with trace_nonfinite(model or nn.Identity()) as trace:
        function(*args)
    return trace.first_cause


X = torch.tensor([0.0, 3.0])


@pytest.mark.parametrize(
    ("function", "op", "kind"),
    [
        (lambda: X.half() * 30000, "aten.mul.Tensor", "overflow"),
        (lambda: (X * 1e6).half(), "aten._to_copy.default", "overflow"),
        (lambda: X.half().mul_(30000), "aten.mul_.Tensor", "overflow"),
        (lambda: torch.empty(2, dtype=torch.half).copy_(X * 1e6), "aten.copy_.default", "overflow"),
        (lambda: torch.full((2,), INF).half().copy_(X * 1e6), "aten.copy_.default", "overflow"),
        (lambda: torch.exp(X * 100, out=torch.empty(2)), "aten.exp.out", "overflow"),
        (lambda: torch.zeros(2).sub_(1).div_(X), "aten.div_.Tensor", "x / 0 or log 0"),
        (lambda: X / 0, "aten.div.Tensor", "0 / 0 or invalid"),
        (lambda: (X + 1) / 0, "aten.div.Tensor", "x / 0 or log 0"),
        (lambda: (X * 1e30) / 1e-30, "aten.div.Tensor", "overflow"),
        (lambda: torch.ones(2, 2) * 1e30 @ torch.tensor([1e30, -1e30]), "aten.mv.default", "over"),
        (lambda: torch.complex(X, X * 1e30) ** 2, "aten.pow.Tensor_Scalar", "overflow"),
        (lambda: X.log(), "aten.log.default", "x / 0 or log 0"),
        (lambda: 1 / X, "aten.reciprocal.default", "x / 0 or log 0"),
        (lambda: X / X, "aten.div.Tensor", "0 / 0 or invalid"),
        (lambda: (-X).sqrt(), "aten.sqrt.default", "0 / 0 or invalid"),
        (lambda: X[:0].mean(), "aten.mean.default", "0 / 0 or invalid"),
        (lambda: X * -INF, "aten.mul.Tensor", "inf - inf or 0 * inf"),
        (lambda: torch.full((2,), -INF) - torch.full((2,), -INF), "aten.sub.Tensor", "inf - inf"),
        (lambda: X + math.nan, "aten.add.Tensor", "not finite in the input data"),
        (lambda: X + INF, "aten.add.Tensor", "not finite in the input data"),
        (lambda: torch.tensor([1.0, math.nan]) + 1, "aten.add.Tensor", "not finite in the input"),
        (lambda: torch.full((2, 2), -INF).softmax(-1), "aten._softmax.default", "fully masked"),
    ],
)
def test_kinds(function, op, kind):
    cause = trace_of(function)
    assert cause.op == op
    assert cause.kind.startswith(kind)
    assert op in str(cause)


# What is intended


MASK = torch.full((8, 8), -INF).triu(1)
BROKEN = torch.tensor([[math.nan, 1.0], [2.0, 3.0]])


def masked_attention():
    """-inf by every usual way, and softmax over it."""
    scores = torch.randn(4, 4, requires_grad=True)
    upper = torch.ones(4, 4).triu(1).bool()
    out = [
        scores.masked_fill(upper, -INF).softmax(-1),
        scores.clone().masked_fill_(upper, -INF).softmax(-1),
        torch.where(upper, -INF, scores).softmax(-1),
        torch.where(upper, torch.tensor(-INF), scores).log_softmax(-1)[:, 0],
        (scores + torch.full((4, 4), -INF).triu(1)).softmax(-1),
        (scores + MASK[:4, :4]).softmax(-1),
        F.scaled_dot_product_attention(scores, scores, scores, attn_mask=~upper),
        F.scaled_dot_product_attention(*[scores[None, None]] * 3, is_causal=True),
        torch.full((4,), INF).minimum(scores[0]),
    ]
    sum(o.sum() for o in out).backward()
    assert scores.grad.isfinite().all()


def uninitialised_memory():
    bits = torch.empty(64, dtype=torch.int16).fill_(0x7E00)  # NaN in fp16
    real = torch.Tensor.new_empty(X, 64)
    for value in (torch.empty(64), torch.empty_like(real), real):
        value.normal_()
        value.zero_()
    half = torch.empty(64, dtype=torch.half)
    half.view(torch.int16).copy_(bits)  # behind the tracer's back, as an allocator's garbage
    half[:32] = 1
    half.index_copy_(0, torch.arange(32, 48), torch.ones(16).half())
    half[:48].add_(1)
    half.view(8, 8).t()
    half[48:] = 0
    return half.sum()


def views_and_integers():
    view = BROKEN.t()[0].unsqueeze(0).expand(2, 2)
    return view.isnan(), BROKEN.argmax(), BROKEN[1].sum(), torch.arange(3), BROKEN.nan_to_num()


def ctc_loss():
    """Logarithms of probabilities may be infinite."""
    scores = torch.randn(10, 2, 5, requires_grad=True)
    lengths = torch.full((2,), 10), torch.full((2,), 3)
    F.ctc_loss(scores.log_softmax(-1), torch.ones(2, 3, dtype=torch.long), *lengths).backward()


def sum_beyond_fp32():
    torch.full((8,), 3e38).neg()


@pytest.mark.parametrize(
    "run", [masked_attention, uninitialised_memory, views_and_integers, ctc_loss, sum_beyond_fp32]
)
def test_what_is_intended_is_no_cause(run):
    assert trace_of(run) is None


def test_an_infinity_in_a_buffer_is_meant():
    model = nn.BatchNorm1d(2)
    model.register_buffer("smallest", torch.full((2,), INF))
    assert trace_of(lambda: model.smallest[:1] + X[:1], model=model) is None
    model.running_mean[0] = math.nan
    model.eval()
    cause = trace_of(lambda: model(torch.ones(3, 2)), model=model)
    assert any("= running_mean" in i.name and i.nan == 1 for i in cause.inputs)


def test_attention_with_an_overflow_or_without_a_key():
    """Rules for fused kernels, some of which only CUDA has."""
    func = torch.ops.aten._scaled_dot_product_efficient_attention.default
    query, half = torch.ones(1, 1, 2, 4), torch.tensor([[0.0, -INF], [-INF, -INF]])
    for mask, bad, kind in (
        (half, math.nan, "fully masked row"),
        (half[:1], math.nan, "overflow"),  # of the scores
        (half, INF, "overflow"),
    ):
        out = torch.full((1, 1, 2, 4), bad)
        given = inputs(operation(func), (query, query, query, mask, True), {}, {})
        assert kind_of(operation(func), given, [out], nan=math.isnan(bad)) == kind


def test_an_overflow_beside_a_mask_is_one():
    mask = torch.tensor([0.0, -INF]).half()
    cause = trace_of(lambda: torch.tensor([60000.0, 1.0]).half() * 2 + mask)
    assert cause.op == "aten.mul.Tensor"
    large = torch.tensor([60000.0, 1.0]).half()
    cause = trace_of(lambda: torch.stack([large, mask]) + large)
    assert (cause.op, cause.kind) == ("aten.add.Tensor", "overflow")
    assert trace_of(lambda: mask + large) is None


# Modules, and what they return


@pytest.mark.covering
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grad", ["grad", "no_grad", "inference"])
def test_simulated_products_are_named_whichever_mode_is_outside(grad, low):
    """Their operands are converted to fp32 and their result back; that is not what is reported."""
    size = 200.0 if low == torch.float16 else 2.0**64
    simulated = partial(SimulatedProducts, low)
    a = torch.full((2, 4), size, dtype=low)
    contexts = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    context = contexts.get(grad, torch.inference_mode)
    model, seen = nn.Identity(), []
    for outer, inner in ((0, 1), (1, 0)):
        trace = trace_nonfinite(model)
        modes = [trace, simulated()]
        with context(), modes[outer], modes[inner]:
            F.linear(a, a)
        cause = trace.first_cause
        assert (cause.kind, cause.dtype) == ("overflow", low)
        assert [i.dtype for i in cause.inputs] == [low] * 2
        assert [i.largest for i in cause.inputs] == [size, size]
        seen.append(cause.op)
    assert set(seen) <= {"aten.mm.default", "aten.linear.default"}


# Backward


@pytest.mark.parametrize("checkpointing", [None, False, True])  # True: reentrant
def test_an_overflow_of_the_backward_names_node_and_module(checkpointing):
    model = Net(0.0, 0.0, 0.0, checkpointing=checkpointing)
    for parameter in model.layers[1].fc.parameters():
        parameter.register_hook(lambda g: g)
    with torch.no_grad():
        model.layers[1].fc.weight.fill_(1e20)
        model.layers[1].norm.weight.fill_(0.0)
    x = torch.randn(2, 8, requires_grad=True)
    with trace_nonfinite(model) as trace:
        (model(x).mean() * 1e25).backward()
    cause = trace.first_cause
    assert (cause.direction, cause.kind) == ("backward", "overflow")
    assert (cause.module, cause.class_name) == ("layers.1.fc", "Linear")
    assert (cause.op, cause.node) == ("aten.mm.default", "AddmmBackward0")
    assert "test_first_cause.py:36" in cause.source  # of the forward
    assert "backward of layers.1.fc (Linear), AddmmBackward0" in str(cause)
    model.zero_grad()
    x.grad = None
    with trace_nonfinite(model) as trace:
        model(x).mean().backward()
    assert trace.first_cause is None
    assert hooks(model) == 0


def test_an_overflow_while_gradients_add_up():
    model = nn.Linear(2, 1, bias=False)
    x = torch.full((1, 2), 3e38)
    with trace_nonfinite(model) as trace:
        for _ in range(2):
            (model(x) * 0 + (model.weight * x).sum()).backward()
    cause = trace.first_cause
    assert (cause.op, cause.direction) == ("aten.add_.Tensor", "backward")
    assert cause.node == "AccumulateGrad of weight"
    assert cause.inputs[0].largest == pytest.approx(3e38)  # before the sum


class Again(nn.Module):
    """Fails only when the backward runs it again."""

    def forward(self, x):
        again = torch._C._current_graph_task_id() != -1
        return ((x * 0).log() if again else x.exp()).square()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_in_the_backward_is_a_forward(reentrant):
    model = nn.Sequential(nn.Identity(), Again())
    with trace_nonfinite(model) as trace:
        y = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
        y.sum().backward()
    cause = trace.first_cause
    assert (cause.op, cause.module, cause.direction) == ("aten.log.default", "1", "forward")


class Reporting(nn.Module):
    """Two nodes in the forward; the backward of the second says where it takes itself to be."""

    def __init__(self, say) -> None:
        super().__init__()
        self.say = say

    def forward(self, x):
        say = self.say

        class Probe(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                say()
                return grad

        return Probe.apply(x * 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_modules_of_a_backward_in_another_thread(reentrant):
    """As on CUDA: numbers of autograd's nodes are each thread's own, and start at 0."""
    places, model = [], nn.Sequential()
    for _ in range(3):
        model.append(Reporting(lambda: places.append(calls.place({}))))
    calls = ModuleCalls(model)
    loss = []

    def forward():
        calls.hook()  # a trace is entered in the thread whose forwards it follows
        x = torch.ones(2, requires_grad=True)
        y = model[0](x)
        y = checkpoint(lambda y: model[2](model[1](y)), y, use_reentrant=reentrant)
        loss.append(model[0](y).sum())

    for work in (forward, lambda: loss[0].backward()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    calls.unhook()
    assert [p.module for p in places] == ["0", "2", "1", "0"]
    assert {place[1:] for place in places} == {("Reporting", "backward", "ProbeBackward")}


def test_what_the_check_tries_out_is_no_cause():
    """A norm beyond fp32 is taken again in fp64."""
    big = nn.Linear(2, 1, bias=False)
    precision = Precision("fp32", big, torch.optim.SGD(big.parameters(), lr=0.0))
    with trace_nonfinite(big) as trace:
        assert precision.step((big.weight * 1e30).sum()).applied
    assert trace.first_cause is None


# Manners


def test_a_trace_changes_no_bit():
    def run(traced):
        torch.manual_seed(1)
        model = Net(0.0, 0.0)
        precision = Precision("bf16-mixed", model, torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            x = F.dropout(torch.randn(4, 8), 0.5)
            if traced:
                with trace_nonfinite(model) as trace:
                    with precision.autocast():
                        loss = F.dropout(model(x), 0.1).square().mean()
                    precision.step(loss)
                assert trace.first_cause is None
            else:
                with precision.autocast():
                    loss = F.dropout(model(x), 0.1).square().mean()
                precision.step(loss)
        return [*model.parameters(), torch.rand(3)]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


class Failing(nn.Module):
    def forward(self, x):
        raise KeyError("mine")


def test_hooks_go_on_exceptions_and_the_trace_can_go_on():
    model = nn.Sequential(nn.Linear(2, 2), Failing())
    trace = trace_nonfinite(model)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(hooks(model)))
    with pytest.raises(KeyError, match="mine"), trace:
        model(X)
    assert (seen, hooks(model)) == ([7], 1)  # two on each of three modules, and this one
    assert trace.first_cause is None
    with trace:  # caught inside: the modules' stack must be empty again
        with pytest.raises(KeyError):
            model(X)
        X.log()
    assert (trace.first_cause.module, trace.first_cause.class_name) == ("", "")


@pytest.mark.parametrize(
    "policy", ["fp32", "bf16-mixed", "bf16-master", "fp16-pure", "fp8,simulate=yes"]
)
def test_the_line_is_the_users_whatever_casts_around_it(policy):
    model = nn.Sequential(nn.Linear(4, 4))
    precision = Precision(policy, model, torch.optim.SGD(model.parameters(), 0.1))
    x = torch.ones(2, 4).index_fill(0, torch.tensor(1), math.inf)
    cause = first_cause(precision, lambda: model(x).square().mean())
    assert cause is not None
    assert __file__ in cause.source


def test_a_compiled_loss_is_what_it_was_after_a_search():
    model, x = nn.Linear(6, 6), torch.randn(8, 6)
    loss = torch.compile(lambda x: model(x).square().mean(), backend="eager")
    assert first_cause(model, loss, x) is None
    precision = Precision("bf16-mixed", model, torch.optim.SGD(model.parameters(), 0.1))
    with precision.autocast():
        assert loss(x).shape == ()
