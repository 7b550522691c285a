"""Every door and every companion of a training loop, with layers below 16 bits."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from every import every
from halfstep.precision.low_bit.linear import USES, compiled, operands
from halfstep.precision.policy.devices import cpu_has_bf16
from halfstep.precision.policy.recipe import Recipe
from reference import blocks

POLICY = "nvfp4,simulate=yes"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def made(policy=POLICY, seed=0, model=None):
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block()) if model is None else model
    optimizer = halfstep.optim.AdamW(model.parameters(), lr=1e-3)
    return model, halfstep.Precision(policy, model, optimizer)


def batch(seed=1):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))


def gradients(run, policy=POLICY):
    model, precision = made(policy)
    with precision.autocast():
        loss = run(model, batch().requires_grad_()).float().square().mean()
    precision.backward(loss)
    return [p.grad.clone() for p in model.parameters()]


# torch's own warnings: where Dynamo breaks its graph, and where it traces an autograd.Function
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        "mxfp8,simulate=yes",
        "bf16-split,recipe=fp8,simulate=yes",
        "bf16-mixed,recipe=fp8/bf16/mxfp8,simulate=yes",
    ],
)
def test_a_forward_in_other_clothes_has_the_same_gradients_bit_by_bit(policy):
    whole = policy != POLICY and cpu_has_bf16()  # random bits and simulated matmuls break it

    def compiled(model, x):
        return torch.compile(model, backend="aot_eager", fullgraph=whole)(x)

    def check(run):
        plain = gradients(lambda model, x: model(x), policy)
        for a, b in zip(plain, gradients(run, policy), strict=True):
            assert torch.equal(a, b)

    every(
        [
            (lambda model, x: checkpoint(model, x, use_reentrant=False),),
            (lambda model, x: checkpoint(model, x, use_reentrant=True),),
            (compiled,),
            (lambda model, x: model(input=x),),
            (lambda model, x: model(x.view(2, 16, 64)).view(32, 64),),
        ],
        check,
    )


@pytest.mark.slow
@pytest.mark.skipif(not cpu_has_bf16(), reason="no compiled recipe is reached here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's imports
def test_operands_compiled_have_the_bits_of_the_definition():
    """Of fp32 tensors, whose rounding to bf16 compiled code would leave out; with an infinity."""
    for scheme, what in itertools.product(("fp8", "fp8-block", "mxfp8", "nvfp4-nearest"), USES):
        compiled.cache_clear()
        torch._dynamo.reset()
        x = torch.from_numpy(blocks.piece("blocks apart", 256))
        x[130, 40] = float("inf") if what == "inputs" else 1.0
        for native in (frozenset[str](), frozenset([scheme])):
            given = what, x, Recipe(*[scheme] * 3), native, (True, True), (None, None)
            for found, expected in zip(compiled(what)(*given), operands(*given), strict=True):
                for a, b in zip(found, expected, strict=True):
                    assert (a is None) == (b is None)
                    if a is not None:
                        a, b = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (a, b))
                        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
                        assert a.stride() == b.stride()


STORED = "bf16-split,recipe=mxfp8,simulate=yes"


def evaluated(model, context):
    with torch.no_grad(), context:
        return model(batch())


@pytest.mark.parametrize("policy", ["mxfp8,simulate=yes", STORED])
def test_a_copy_is_plain(policy):
    model, precision = made(policy)
    precision.step(model_loss(model, precision))
    copied, plain = copy.deepcopy(model), nn.Sequential(Block(), Block())
    plain.load_state_dict(copied.state_dict())
    assert not any("forward" in vars(module) for module in copied.modules())
    assert torch.equal(evaluated(copied, torch.no_grad()), evaluated(plain, torch.no_grad()))
    assert "forward" in vars(model[0].up)
    precision.close()
    assert "forward" not in vars(model[0].up)


def model_loss(model, precision):
    with precision.autocast():
        return model(batch()).float().square().mean()


@pytest.mark.parametrize(
    ("policy", "without"), [("mxfp8,simulate=yes", "bf16-mixed"), (STORED, "bf16-split")]
)
def test_a_model_is_plain_in_the_context_of_another_policy_without_a_recipe(policy, without):
    model, precision = made(policy)
    plain, _ = made(without)
    plain.load_state_dict(model.state_dict())
    own = evaluated(model, precision.autocast())
    for other in ("bf16-mixed", "fp16-mixed"):
        expected = evaluated(plain, halfstep.autocast(other, "cpu"))
        assert torch.equal(evaluated(model, halfstep.autocast(other, "cpu")), expected), other
        assert not torch.equal(expected.float(), own.float())
    assert torch.equal(evaluated(model, precision.autocast()), own)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own, as Dynamo traces a Function
def test_a_wrapper_changes_no_random_bit():
    """torch.compile puts a prefix before the names, by which they go."""
    found = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
        torch.manual_seed(0)
        inner = nn.Sequential(Block(), Block())
        model, precision = made(POLICY, model=wrap(inner))
        for seed in range(3):
            with precision.autocast():
                loss = model(batch(seed)).square().mean()
            precision.step(loss)
        found.append([p.tolist() for p in inner.parameters()])
    assert found[0] == found[1]


def test_a_conv1d_layer_rounds_as_a_linear_layer_of_its_transposed_weight():
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(128, 64)
    linear = nn.Linear(64, 128)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias.copy_(torch.randn(128)))
    found = []
    for layer in (conv, linear):
        model, precision = made("mxfp8,simulate=yes", model=nn.Sequential(layer))
        x = batch().requires_grad_()
        with precision.autocast():
            y = model(x)
        y.square().sum().backward()
        weight = layer.weight.grad.t() if layer is conv else layer.weight.grad
        found.append((y, x.grad, weight, layer.bias.grad))
    for a, b in zip(*found, strict=True):
        # one bf16 rounding: layouts may add up in another order
        assert torch.allclose(a, b, rtol=2**-7, atol=2**-7 * float(b.detach().abs().max()))


RECIPES = ("fp8", "fp8-block", "mxfp8", "nvfp4")


def wide(recipe, x):
    """Output and gradients of a layer with features for every recipe's blocks."""
    torch.manual_seed(0)
    model, precision = made(f"{recipe},simulate=yes", model=nn.Sequential(nn.Linear(128, 128)))
    x = x.requires_grad_() if x.is_floating_point() else x
    with precision.autocast():
        y = model(x)
    precision.backward(y.float().square().sum())
    return y.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "laid",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack((x, x), 2).flatten(1)[:, ::2],
        lambda x: x[:1].expand(len(x), -1),
        lambda x: x.view(5, 8, 128).transpose(0, 1),
    ],
    ids=["transposed", "every second number", "expanded", "transposed dims"],
)
def test_any_memory_order_has_the_bits_of_a_contiguous_input(recipe, laid):
    x = laid(torch.randn(40, 128, generator=torch.Generator().manual_seed(1)))
    assert not x.is_contiguous()
    one, two = wide(recipe, x.detach()), wide(recipe, x.detach().contiguous())
    assert torch.equal(one[0], two[0])
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_single_vector_is_one_token_and_none_leaves_no_gradient(recipe):
    x = torch.randn(128, generator=torch.Generator().manual_seed(1))
    one, two = wide(recipe, x.clone()), wide(recipe, x[None].clone())
    assert torch.equal(one[0], two[0][0])
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    for shape in ((0, 128), (3, 0, 128)):
        y, found = wide(recipe, torch.zeros(shape))
        assert y.shape == shape
        assert not any(g.any() for g in found)


def test_an_input_that_is_no_activation_is_refused_as_by_torchs_own_layer():
    """As bf16 numbers, integers would lose their last bits."""
    for dtype in (torch.int64, torch.complex64, torch.float64):
        with pytest.raises(RuntimeError, match=r"same dtype|expected m1 and m2"):
            wide("fp8", torch.ones(4, 128).to(dtype))


@pytest.mark.filterwarnings("ignore::UserWarning")  # such layouts are in beta
def test_an_input_that_is_not_strided_is_refused_in_a_line():
    model, precision = made("nvfp4,simulate=yes")
    x = batch()
    nested = torch.nested.nested_tensor
    odd = [nested([x, x[:3]]), nested([x, x[:3]], layout=torch.jagged), x.to_sparse()]
    for given, what in zip(odd, ("nested", "nested", "torch.sparse_coo"), strict=True):
        with precision.autocast(), pytest.raises(halfstep.PrecisionError, match=rf"got {what}; ke"):
            model[0].up(given)
