"""AdamW, SGD and Lion against fp64 oracles and torch.optim, and as torch optimizers in use."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.errors import PrecisionError
from halfstep.optim.moments import decode
from halfstep.optim.optimizers import SGD, AdamW, Lion
from halfstep.optim.state import in_dtype, stored_moment
from halfstep.precision.masters.rounding import ROUNDING
from optim import oracles
from reference import floats
from reference.training import through_a_file

OPTIMIZERS = {"adamw": AdamW, "sgd": SGD, "lion": Lion}
MOMENTS = ["fp32", "bf16", "8bit"]
WAYS = [*ROUNDING]
MOMENT_NAMES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
}


def numbers(shape, seed: int) -> torch.Tensor:
    """fp32 of many magnitudes and both signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def parameter(shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(numbers(shape, seed).to(dtype))


def everything(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of parameters and state, by a name; clones."""
    named = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(parameters):
        named[f"{i}.weight"] = p.detach().clone()
        for key, value in optimizer.state.get(p, {}).items():
            named[f"{i}.{key}"] = torch.as_tensor(value).clone()
    return named


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


def feed(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A gradient for every parameter, the same ones for the same seed and shapes."""
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        p.grad = numbers(p.shape, 1000 * seed + i).to(p.dtype)


# --- against the definitions --------------------------------------------------------------------

CASES = [
    ("adamw", {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    ("adamw", {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("adamw", {"lr": 1e-2, "betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 1.0}),
    *(
        ("sgd", {"lr": 0.1, "momentum": m, "dampening": d, "weight_decay": w, "nesterov": n})
        for m, d, w, n in [
            *((0.0, 0.0, 0.0, False), (0.9, 0.0, 0.0, False), (0.9, 0.0, 0.1, False)),
            *((0.9, 0.5, 0.1, False), (0.9, 0.0, 0.01, True)),
            (0.0, 0.5, 0.0, False),  # torch's pseudo-code has the dampening inside `if momentum`
        ]
    ),
    ("lion", {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}),
    ("lion", {"lr": 1e-2, "betas": (0.5, 0.9), "weight_decay": 1.0}),
]


def follow(name: str, options: dict, steps: int = 25) -> None:
    """Each step from the fp32 state before it, in fp64, against what the optimizer made of it."""
    p = parameter(500)
    optimizer = OPTIMIZERS[name]([p], **options)
    doubtful = 0
    for t in range(1, steps + 1):
        before = p.detach().double().numpy()
        state = {
            key: optimizer.state[p][key].double().numpy() if t > 1 else np.zeros(500)
            for key in MOMENT_NAMES[name]
        }
        p.grad = numbers(500, t)
        optimizer.step()
        wanted = getattr(oracles, name)(before, p.grad.double().numpy(), state, t, **options)
        got = {"weight": p.detach(), **{k: optimizer.state[p][k] for k in MOMENT_NAMES[name]}}
        for key, (value, bound) in wanted.items():
            error = np.abs(got[key].double().numpy() - value)
            assert (error <= bound).all(), f"step {t}: {key} off by {(error / bound).max()} bounds"
            if name == "lion" and key == "weight":
                doubtful += (bound > options["lr"]).sum()
    assert doubtful <= 5  # of 12500: else the oracle for Lion says nothing


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_each_step_is_the_definition_s_in_fp64(name, options):
    follow(name, options)


def test_split_weights_train_as_fp32_weights_do_to_the_last_bit():
    for name, cls in OPTIMIZERS.items():
        half = parameter(777, dtype=torch.bfloat16)
        full = nn.Parameter(half.detach().float())
        ours = cls([half], lr=1e-3, weight_decay=0.1, update="split", moments="fp32")
        other = cls([full], lr=1e-3, weight_decay=0.1)
        for step in range(100):
            gradient = numbers(777, step)
            ours.step(gradients={half: gradient})
            full.grad = gradient
            other.step()
            master = ours.read_master(half)
            assert torch.equal(master, full.detach()), f"{name}, step {step}"
            wanted = floats.nearest(full.detach().double().numpy(), floats.BF16, math.inf)
            away = np.abs(half.detach().double().numpy() - wanted)
            tie = (full.detach().view(torch.int32) & 0xFFFF).numpy() == 0x8000
            assert (away[~tie] == 0).all()
        for moment in MOMENT_NAMES[name]:
            assert torch.equal(ours.state[half][moment], other.state[full][moment])
        assert not torch.equal(half.detach().float(), full.detach())  # the remainder counts


# --- options and errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("adamw", {"betas": (0.9, -0.1)}, "beta parameter at index 1: -0.1"),
        ("sgd", {"momentum": 0.0, "nesterov": True}, "Nesterov momentum requires"),
        ("lion", {"lr": float("nan")}, "learning rate: nan"),
    ],
)
def test_a_number_out_of_range_is_refused(name, options, said):
    with pytest.raises(ValueError, match=said):
        OPTIMIZERS[name]([parameter(3)], **options)


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"eps": 0}, {"betas": (1.5, 0.9)},
                                   {"weight_decay": float("nan")}])  # fmt: skip
def test_a_number_out_of_range_is_refused_in_a_group_too(wrong):
    optimizer = OPTIMIZERS["adamw"]([parameter(3)])
    with pytest.raises(PrecisionError, match="Invalid "):
        optimizer.add_param_group({"params": [parameter(3)], **wrong})
    assert len(optimizer.param_groups) == 1


def test_parameters_of_other_dtypes_or_shared_memory_are_refused():
    for dtype in (torch.float16, torch.float64, torch.complex64):
        with pytest.raises(PrecisionError, match=rf"\(3, 4\) is {dtype}; .*fp16-master"):
            AdamW([parameter((3, 4), dtype=dtype)])
    with pytest.raises(PrecisionError, match="share memory"):
        AdamW([nn.Parameter(torch.zeros(3, 1).expand(3, 4))])


def test_bf16_weights_without_a_way_are_refused_before_anything_changes():
    full, half = parameter(5), parameter(5, dtype=torch.bfloat16)
    optimizer = AdamW([full, half])
    feed(optimizer, 0)
    before = everything(optimizer)
    with pytest.raises(PrecisionError, match="bf16") as caught:
        optimizer.step()
    for way in WAYS:
        assert f"'{way}'" in str(caught.value)
    assert_same(everything(optimizer), before)


# --- gradients ----------------------------------------------------------------------------------


def test_given_gradients_and_a_multiplier_act_as_gradients_times_it():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p, q = parameter(300), parameter(300)
        one, two = AdamW([p], moments="8bit"), AdamW([q], moments="8bit")
        for step in range(3):
            gradient = numbers(300, step).to(dtype)
            kept = gradient.clone()
            p.grad = torch.full((300,), 9.0)  # not used
            one.step(gradients={p: gradient}, multiplier=0.3)
            q.grad = gradient.float() * 0.3
            two.step()
            assert torch.equal(gradient, kept)
        assert_same(everything(one), everything(two))


def test_parameters_without_a_gradient_stay_and_keep_their_step():
    first, second = parameter(5), parameter(6)
    optimizer = AdamW([first, second], moments="8bit")
    first.grad = torch.ones(5)
    before = second.detach().clone()
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state
    optimizer.step(gradients={second: torch.ones(6)})
    assert optimizer.state[first]["step"] == optimizer.state[second]["step"] == 1
    alone = parameter(6)
    alone.data.copy_(before)
    other = AdamW([alone])
    alone.grad = torch.ones(6)
    other.step()
    assert torch.equal(alone, second)  # bias corrected as a first step
    optimizer.step(gradients={})
    assert optimizer.state[first]["step"] == 1


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        *((torch.ones(shape), "shape") for shape in [(1,), (5, 1)]),
        (torch.ones(5, dtype=torch.float64), "float64"),
        (torch.sparse_coo_tensor([[1]], torch.ones(1), (5,), check_invariants=True), "sparse"),
    ],
)
def test_a_given_gradient_of_another_shape_or_dtype_is_refused(gradient, message):
    p = parameter(5)
    optimizer = AdamW([p])
    before = everything(optimizer)
    with pytest.raises(PrecisionError, match=message):
        optimizer.step(gradients={p: gradient})
    assert_same(everything(optimizer), before)


# --- shapes and strides -------------------------------------------------------------------------

LAYOUTS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
@pytest.mark.parametrize("gradient_layout", ["contiguous", "as the weight", "strided", "expanded"])
@pytest.mark.parametrize("moments", MOMENTS)
def test_weights_and_gradients_in_any_memory_order(layout, gradient_layout, moments):
    """As a contiguous weight of the same memory order, element for element."""
    shape = (4, 3, 5, 6)
    laid = LAYOUTS[layout](numbers(shape, 0).to(torch.bfloat16))
    assert not laid.is_contiguous()
    p = nn.Parameter(laid)
    order = (0, 2, 3, 1) if layout == "channels_last" else (3, 2, 1, 0)
    q = nn.Parameter(laid.permute(order).clone(memory_format=torch.contiguous_format))
    assert q.is_contiguous()
    one = AdamW([p], lr=1e-2, update="split24", moments=moments)
    two = AdamW([q], lr=1e-2, update="split24", moments=moments)
    for step in range(4):
        gradient = numbers(shape, step).to(torch.bfloat16)
        if gradient_layout == "as the weight":
            gradient = LAYOUTS[layout](gradient)
        elif gradient_layout == "strided":
            gradient = torch.stack([gradient, gradient * 0], -1)[..., 0]
        elif gradient_layout == "expanded":
            gradient = gradient[:1, :, :, :1].expand(shape)
        p.grad, q.grad = gradient, gradient.permute(order).contiguous()
        one.step()
        two.step()
        assert torch.equal(p.permute(order), q)
        assert torch.equal(one.read_master(p).permute(order), two.read_master(q))
    assert p.stride() == laid.stride()


@pytest.mark.covering
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("way", [None, *WAYS])
def test_a_weight_that_is_part_of_a_larger_tensor_is_stepped_in_its_place(moments, way):
    dtype = torch.bfloat16 if way else torch.float32
    whole = torch.zeros(10, 6, dtype=dtype).t()  # of other strides than a clone of a part
    whole[:, :4] = numbers((6, 4), 0)
    p, q = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, :4].clone())
    options = {"lr": 1e-2, "moments": moments, "update": way}
    one, two = AdamW([p], **options), AdamW([q], **options)
    if way:
        one.write_master_(p, numbers((6, 4), 1))
        two.write_master_(q, numbers((6, 4), 1))
    for step in range(10):
        one.step(gradients={p: numbers((6, 4), step)})
        two.step(gradients={q: numbers((6, 4), step)})
    assert torch.equal(p, q)
    assert p.data_ptr() == whole.data_ptr()
    assert torch.equal(whole[:, :4], p)
    assert (whole[:, 4:] == 0).all()
    assert torch.equal(one.read_master(p), two.read_master(q))
    loaded = AdamW([p], **options)
    loaded.load_state_dict(through_a_file(one.state_dict()))
    assert_same(everything(loaded), everything(one))


# --- saving and loading -------------------------------------------------------------------------


def model_of(name: str, way: str, moments: str, seed: int = 0):
    """Two groups, three parameters, one of them fp32 and one channels_last."""
    image = numbers((4, 3, 5, 6), seed).to(torch.bfloat16).to(memory_format=torch.channels_last)
    parameters = [
        parameter((30, 20), seed, torch.bfloat16),
        parameter(130, seed + 1),
        nn.Parameter(image),
    ]
    groups = [{"params": parameters[:1], "lr": 1e-2}, {"params": parameters[1:]}]
    optimizer = OPTIMIZERS[name](groups, lr=1e-3, update=way, moments=moments, seed=3)
    return parameters, optimizer


@pytest.mark.covering
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_bit_after_save_and_load(name, way, moments):
    parameters, optimizer = model_of(name, way, moments)
    for step in range(3):
        feed(optimizer, step)
        optimizer.step()
    saved = through_a_file({"model": [p.detach() for p in parameters], "o": optimizer.state_dict()})
    others, resumed = model_of(name, way, moments, seed=9)
    with torch.no_grad():
        for p, value in zip(others, saved["model"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["o"])
    assert_same(everything(resumed), everything(optimizer))
    kept = copy.deepcopy(saved["o"]["state"])
    for step in range(3, 8):
        feed(optimizer, step)
        feed(resumed, step)
        optimizer.step()
        resumed.step()
        assert_same(everything(resumed), everything(optimizer))
    # the loaded state is a copy: going on has not changed what was saved
    for number, entry in saved["o"]["state"].items():
        assert_same(entry, kept[number])


@pytest.mark.parametrize("target", MOMENTS)
@pytest.mark.parametrize("source", MOMENTS)
def test_moments_are_converted_between_formats(source, target):
    p = parameter(1000)
    saver = AdamW([p], moments=source)
    for step in range(4):
        feed(saver, step)
        saver.step()
    state = saver.state[p]

    def read(held: dict, name: str, signed: bool) -> torch.Tensor:
        return decode(*stored_moment(held, name), signed=signed).double()

    q = parameter(1000)
    loader = AdamW([q], moments=target)
    loader.load_state_dict(through_a_file(saver.state_dict()))
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        assert stored_moment(loader.state[q], name)[0].dtype == {
            "fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8
        }[target]  # fmt: skip
        old, new = read(state, name, signed), read(loader.state[q], name, signed)
        if MOMENTS.index(target) <= MOMENTS.index(source):
            assert torch.equal(old, new)  # as fine or finer: exact
        else:
            bits = {"bf16": 7, "8bit": 3}[target]
            # in a window the gap is below 2^-bits of the number; below it, of the block's largest
            top = old.abs().view(-1, 125).amax(1).max()
            allowed = old.abs() * 2.0**-bits + (top * 2.0**-14 if target == "8bit" else 0)
            assert ((new - old).abs() <= allowed).all()
            assert not torch.equal(old, new)
            assert abs((new.mean() - old.mean()) / old.abs().mean()) < 0.01  # no drift
    assert loader.state[q]["step"] == 4
    feed(loader, 5)
    loader.step()


def test_a_remainder_is_taken_where_both_keep_the_same_kind():
    p = parameter(100, dtype=torch.bfloat16)
    saver = AdamW([p], update="split")
    feed(saver, 0)
    saver.step()
    assert (saver.state[p]["remainder"] != 0).any()
    for way in WAYS:
        q = nn.Parameter(p.detach().clone())
        loader = AdamW([q], update=way)
        loader.load_state_dict(through_a_file(saver.state_dict()))
        if way == "split":
            assert torch.equal(loader.read_master(q), saver.read_master(p))
        else:
            assert torch.equal(loader.read_master(q), p.detach().float())
        feed(loader, 1)
        loader.step()


def stepped(moments: str = "8bit", shape: tuple[int, ...] = (10, 30), way: str = "split"):
    p = parameter(shape, dtype=torch.bfloat16)
    optimizer = AdamW([p], update=way, moments=moments)
    feed(optimizer, 0)
    optimizer.step()
    return p, optimizer


MISFITS = {
    "another shape": lambda s: s["state"][0].update(exp_avg_codes=torch.zeros(30, 10)),
    "a moment less": lambda s: s["state"][0].pop("exp_avg_sq_codes"),
    "a group more": lambda s: s["param_groups"].append(s["param_groups"][0]),
    "another remainder": lambda s: s["state"][0].update(
        remainder=torch.zeros(3, dtype=torch.int16)
    ),
    "no tops": lambda s: s["state"][0].pop("exp_avg_tops"),
    "no values": lambda s: s["state"][0].update(exp_avg_codes=torch.zeros(10, 30, device="meta")),
    "a number": lambda s: s["state"][0].update(exp_avg_codes=1.0),
    "sparse": lambda s: s["state"][0].update(exp_avg_codes=torch.zeros(10, 30).to_sparse()),
    "no count": lambda s: s["state"][0].update(step=torch.tensor(math.nan)),
    "short tops": lambda s: s["state"][0].update(exp_avg_tops=torch.zeros(1, dtype=torch.uint8)),
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change):
    p, optimizer = stepped()
    before, groups = everything(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] += 5
    state["param_groups"][0]["lr"] = 77.0
    change(state)
    with pytest.raises((PrecisionError, ValueError)):
        optimizer.load_state_dict(state)
    assert_same(everything(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups
    assert optimizer.param_groups[0]["params"][0] is p


def in_order(value: torch.Tensor, last: bool) -> torch.Tensor:
    form = torch.channels_last if last else torch.contiguous_format
    return value.contiguous(memory_format=form)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_state_saved_in_another_memory_order_goes_on(moments, last):
    """The oracle: what the moments stand for is the same element for element."""
    shape = (4, 3, 5, 6)
    p = nn.Parameter(in_order(numbers(shape, 0), last))
    q = nn.Parameter(in_order(numbers(shape, 0), not last))
    saver, loader = AdamW([p], moments=moments), AdamW([q], moments=moments)
    for step in range(3):
        feed(saver, step)
        saver.step()
    q.data.copy_(p.detach())
    loader.load_state_dict(through_a_file(saver.state_dict()))
    old = in_dtype(saver.state[p], torch.float32)["exp_avg"]
    new = in_dtype(loader.state[q], torch.float32)["exp_avg"]
    # of 3 mantissa bits where other blocks are made, and below the window of a block's largest
    allowed = old.abs() / 8 + old.abs().max() * 2.0**-14 if moments == "8bit" else 0.0
    assert ((new - old).abs() <= allowed).all()
    feed(saver, 3)
    feed(loader, 3)
    saver.step()
    loader.step()
    if moments == "fp32":  # other formats draw their noise in memory order
        assert torch.equal(p, q)
    else:
        assert (p - q).abs().max() <= 0.25 * 1e-3 * 2
    before = stored_moment(loader.state[q], "exp_avg")[0].clone()
    feed(loader, 4)
    loader.step()
    after = stored_moment(loader.state[q], "exp_avg")[0]
    assert not torch.equal(after, before), "the moment stands still"
