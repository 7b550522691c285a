"""What is refused before a step is taken, and that a refusal changes nothing."""

import inspect
from itertools import product

import pytest
import torch
from torch import nn

from every import every
from halfstep import Precision, PrecisionError
from reference.training import (
    CPU_POLICIES,
    MASTERS,
    OPTIMIZERS,
    PURE,
    batches,
    loss_of,
    mlp,
    mse,
    scaled,
)

MIXED = ("fp32", "bf16-mixed", "fp16-mixed")


def refused(name, model, optimizer, message: str) -> None:
    """Making Precision must raise, and leave parameters, groups and hooks as they were."""
    before = [(p, p.dtype, p.detach().clone()) for p in model.parameters()]
    groups = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(PrecisionError, match=message):
        Precision(name, model, optimizer)
    for parameter, (same, dtype, values) in zip(model.parameters(), before, strict=True):
        assert parameter is same
        assert parameter.dtype == dtype
        assert torch.equal(parameter, values)
        assert not parameter._post_accumulate_grad_hooks
    for group, old in zip(optimizer.param_groups, groups, strict=True):
        assert all(a is b for a, b in zip(group["params"], old, strict=True))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_no_parameter_got_a_gradient(name):
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    precision = Precision(scaled(name), model, optimizer)
    extra = torch.ones((), requires_grad=True)
    precision.backward(extra * 2)  # a loss that reaches none of the optimizer's parameters
    with pytest.raises(PrecisionError, match="no parameter of the optimizer got a gradient"):
        precision.step()
    loss = loss_of(model, precision)
    result = precision.step(loss)
    assert result.applied
    # the failed step's loss (2) is not left over; bf16 computing leaves a few 2^-8
    assert result.loss == pytest.approx(loss.item(), rel=2.0**-20, abs=0)


@pytest.mark.parametrize("name", CPU_POLICIES)
def test_an_optimizer_of_other_tensors(name):
    model, other = mlp(), mlp()
    message = r"holds 4 tensors that are not parameters of the model \(first: number 0\)"
    refused(name, model, OPTIMIZERS["sgd"](other.parameters()), message)
    message = r"holds 1 tensors .*first: number 4"
    extra = nn.Parameter(torch.ones(2))
    refused(name, model, OPTIMIZERS["sgd"]([*model.parameters(), extra]), message)


STOCK = {
    **{name: {} for name in ["ASGD", "Rprop", "Adafactor"]},
    **{n: {"eps": 1e-3} for n in ["Adadelta", "Adagrad", "AdamW", "Adamax", "NAdam", "RAdam"]},
    "RMSprop": {"eps": 1e-3},
    "SGD": {"momentum": 0.9},
}


@pytest.mark.parametrize("name", [*MASTERS, *PURE])
def test_an_optimizer_that_holds_state_goes_on_as_if_that_were_loaded_afterwards(name):
    """Adagrad's is there from the start; others have stepped."""

    def check(kind, stepped):
        results = []
        for loaded in (False, True):
            model = mlp()
            made = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **STOCK[kind])
            if stepped:
                mse(model(batches(1)[0][0]), batches(1)[0][1]).backward()
                made.step()
            state = made.state_dict()
            if loaded:
                made = type(made)(model.parameters(), lr=0.01, **STOCK[kind])
            precision = Precision(scaled(name), model, made)
            if loaded:
                made.load_state_dict(state)
            for _ in range(2):
                assert precision.step(loss_of(model, precision)).applied
            results.append([p.tolist() for p in model.parameters()])
        assert results[0] == results[1]

    # torch's load rounds single numbers of these two to 16 bits, where there are no masters
    kinds = [k for k in STOCK if name in MASTERS or k not in ("ASGD", "NAdam")]
    every(product(kinds, (False, True)), check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MIXED)
def test_trainable_weights_that_are_not_fp32_under_a_policy_that_keeps_fp32(name, dtype):
    model = mlp()
    model[2].to(dtype)
    word = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    message = rf"2 of 4 parameters are {word}: 2\.weight, 2\.bias; .*model\.float\(\)"
    refused(name, model, OPTIMIZERS["sgd"](model.parameters()), message)


@pytest.mark.parametrize(
    ("kind", "least"), [("AdamW", 0.0055), ("NAdam", 0.0055), ("RMSprop", 0.0017)]
)
def test_the_refusal_of_eps_names_one_that_keeps_steps_as_large_as_in_fp32(kind, least):
    """(1 - beta) g^2 is 0 in fp16 below 2^-25, of g = 0.0055; 1 - beta is 0.001, and 0.01."""

    def moved(policy, eps):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=2.0**-6, eps=eps)
        precision = Precision(policy, model, optimizer)
        with precision.autocast():
            loss = model(torch.ones(1, 1)).sum() * least * 0.99
        precision.step(loss)
        return 1 - model.weight.item()

    for eps in ("1e-08", "1e-06"):
        with pytest.raises(PrecisionError, match=rf"={eps} .* eps >= {least}, or policy fp16-mas"):
            moved("fp16-pure", float(eps))
    assert moved("fp16-pure", 2.0**-13) > 8 * 2.0**-6  # which is allowed, as weights stay finite
    assert 0 < moved("fp16-pure", least) <= moved("fp32", 1e-8) + 2.0**-12  # half a gap of weights


SWITCHES = [{"fused": True}, {"foreach": True}, {"maximize": True}]


@pytest.mark.parametrize("name", PURE)
def test_a_step_of_torchs_that_is_applied_moves_16_bit_weights_or_is_refused(name):
    """torch's fused kernel of SGD for a CPU takes 16-bit weights and leaves them as they are."""

    def check(kind, switch):
        moves = []
        for options in (STOCK[kind], STOCK[kind] | switch):
            model = mlp()
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.0625, **options)
            before = [p.tolist() for p in model.parameters()]
            precision = Precision(scaled(name), model, optimizer)
            if kind == "SGD" and "fused" in options:
                loss = loss_of(model, precision)
                with pytest.raises(PrecisionError, match=r"SGD.step\(\) left . of 4 tensors"):
                    precision.step(loss)
                return
            assert precision.step(loss_of(model, precision)).applied
            after = zip(model.parameters(), before, strict=True)
            moves.append(torch.cat([(p.float() - torch.tensor(q)).flatten() for p, q in after]))
        plain, other = moves
        assert other.any()
        plain = -plain if "maximize" in switch else plain
        torch.testing.assert_close(plain, other, rtol=0, atol=2.0**-7)  # two gaps of bf16 weights

    taken = {k: inspect.signature(getattr(torch.optim, k)).parameters for k in STOCK}
    every([(k, s) for k in STOCK for s in SWITCHES if {*s} <= {*taken[k]}], check)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_torch_jit_and_a_step_that_needs_a_closure():
    class Sharpness(torch.optim.SGD):
        def step(self, closure, *args, **kwargs):
            raise NotImplementedError

    for name in CPU_POLICIES:
        for made in (torch.jit.script(nn.ReLU()), torch.jit.trace(nn.ReLU(), torch.ones(1))):
            model = mlp().append(made)
            refused(scaled(name), model, torch.optim.SGD(model.parameters()), "^3 is a torch.jit")
        for kind in (torch.optim.LBFGS, Sharpness):
            model = mlp()
            refused(name, model, kind(model.parameters()), rf"{kind.__name__}.* needs closure")


@pytest.mark.parametrize("name", ["fp16-master", "fp16-pure"])
def test_a_weight_that_its_new_format_cannot_hold(name):
    # 1e5 becomes inf in fp16: the first forward would be NaN, and the weight is lost for good.
    model = mlp()
    with torch.no_grad():
        model[2].weight[1, 3] = 1e5
    refused(name, model, OPTIMIZERS["sgd"](model.parameters()), r"2\.weight")


def test_a_model_without_parameters_or_on_two_devices():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(PrecisionError, match="one device, found none: it has no parameters"):
        Precision("fp32", nn.ReLU(), optimizer)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(PrecisionError, match="one device, found cpu, meta"):
        Precision("fp32", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_complex_and_fp64_parameters_are_refused_by_their_kind():
    for name in CPU_POLICIES:
        for dtype in (torch.complex64, torch.float64):
            model = mlp()
            model.register_parameter("odd", nn.Parameter(torch.ones(3, dtype=dtype)))
            refused(scaled(name), model, OPTIMIZERS["sgd"](model.parameters()), "real numbers of")


def test_buffers_that_16_bits_have_broken_already():
    def check(name, broken):
        model = mlp()
        model.register_buffer(name, torch.rand(3))
        Precision("bf16-pure", model, OPTIMIZERS["sgd"](model.parameters())).close()
        model = mlp().to(torch.bfloat16)
        model.register_buffer(name, torch.rand(3).to(torch.bfloat16))
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        if broken:
            message = f"buffer {name} is bf16 already.*let the policy cast it"
            refused("bf16-pure", model, optimizer, message)
        else:
            Precision("bf16-pure", model, optimizer)

    broken = "inv_freq rope_cache freqs cos_cached sin rotary_table running_mean router_bias"
    fine = "scale weight_ema cost sinew frequency_penalty compose attn_mask masked_bias"
    every([*((n, True) for n in broken.split()), *((n, False) for n in fine.split())], check)


@pytest.mark.parametrize("name", [*MASTERS, *PURE])
def test_norms_are_judged_by_their_weights_and_named_together(name):
    def optimizer(model):
        return OPTIMIZERS["sgd"](model.parameters())

    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 2))
    precision = Precision(scaled(name), plain, optimizer(plain))
    with precision.autocast():
        loss = plain(torch.randn(8, 4)).square().mean()
    assert precision.step(loss).applied
    assert plain[1].running_mean.dtype == torch.float32
    other = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    wide = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), other)
    rule = r"1 is a BatchNorm1d .*keep_fp32=type:BatchNorm1d\|type:InstanceNorm2d$"
    refused(name, wide, optimizer(wide), rule)
