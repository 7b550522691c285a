"""The compiled kernel gives the bits of the torch operations; and what happens without one."""

import copy
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep import Precision
from halfstep.errors import PrecisionError
from halfstep.optim import optimizers
from halfstep.optim.kernels.cpu import native_kernel
from halfstep.optim.kernels.reference import Plan, run_torch
from halfstep.optim.moments import zeros
from halfstep.optim.optimizers import AdamW
from halfstep.optim.rules import ADAMW, DIRECTED, LION, SGD, Algorithm
from halfstep.optim.state import Batch, StepTask
from halfstep.precision.masters.rounding import ROUNDING

RULES = {"adamw": ADAMW, "sgd": SGD, "lion": LION, "directed": DIRECTED}
OPTIONS = {
    "adamw": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False},
    "lion": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "directed": {"lr": 1e-2, "weight_decay": 0.1},
}
BF16_WAYS = [(torch.bfloat16, way) for way in ROUNDING]
WAYS = [(torch.float32, "nearest"), *BF16_WAYS]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
MOMENTS = ["fp32", "bf16", "8bit"]
# Around a block of 128, a thread's piece of 8192, and the torch operations' chunk of 32768.
SIZES = [1, 127, 128, 129, 8191, 8192, 8193, 32767, 32768, 32769]

# Where gradients are not finite: (start, stride).
SPECIAL = {"nan": (5, 97), "inf": (6, 101), "-inf": (7, 103)}


@pytest.fixture
def fresh_build(tmp_path, monkeypatch):
    """A test that may build anew, in a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HALFSTEP_KERNEL", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CXXFLAGS", raising=False)
    native_kernel.cache_clear()
    yield tmp_path
    native_kernel.cache_clear()


def tasks_for(
    algorithm: Algorithm, dtype: torch.dtype, update: str, moments: str, gradient: torch.dtype,
    sizes: list[int], seed: int,
) -> list[StepTask]:  # fmt: skip
    """Tasks as the optimizer makes them at the start, with numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for stream, size in enumerate(sizes):
        spread = torch.randn(size, generator=generator).mul(3).exp()
        weight = (torch.randn(size, generator=generator) * spread).to(dtype)
        if size > 4:
            weight[:4] = torch.tensor([0.0, -0.0, 1e-39, 3e38]).to(dtype)
        kept = ROUNDING[update].remainder_dtype if dtype == torch.bfloat16 else None
        pairs = [zeros(weight, moments) for _ in algorithm.moments]
        made.append(
            StepTask(
                weight=weight,
                remainder=None if kept is None else torch.zeros(size, dtype=kept),
                moments=tuple(values for values, _ in pairs),
                tops=tuple(tops for _, tops in pairs),
                gradient=torch.empty(size, dtype=gradient),
                stream=stream,
            )
        )
    return made


def fill_gradients(tasks: list[StepTask], seed: int, special: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for task in tasks:
        size = len(task.gradient)
        spread = torch.randn(size, generator=generator).mul(3).exp()
        values = torch.randn(size, generator=generator) * spread
        values[:: max(1, size // 7)] = 0.0
        if size > 6:  # subnormal in fp16; the last in fp32 too
            values[1:5] = torch.tensor([6e-8, -3e-6, 2e-39, -0.0])
        if special:
            for number, (start, stride) in SPECIAL.items():
                values[start::stride] = float(number)
        task.gradient.copy_(values)


def copies(tasks: list[StepTask]) -> list[StepTask]:
    return [replace(copy.deepcopy(task), gradient=task.gradient) for task in tasks]


def parts(task: StepTask) -> dict[str, torch.Tensor]:
    named = {"weight": task.weight}
    if task.remainder is not None:
        named["remainder"] = task.remainder
    for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True)):
        named |= {f"moment {i}": codes, f"tops {i}": tops}
    return named


def assert_same_bits(
    left: list[StepTask], right: list[StepTask], where: str, special: bool = False
) -> None:
    """All bits are the same, but that a NaN may be any NaN.

    With ``special`` gradients, an 8-bit code that a NaN was stored as may have either sign.
    """
    for a, b in zip(left, right, strict=True):
        for (name, x), y in zip(parts(a).items(), parts(b).values(), strict=True):
            if special and x.dtype == torch.uint8 and name.startswith("moment"):
                x, y = x.clone(), y.clone()
                for start, step in SPECIAL.values():
                    x[start::step] &= 0x7F
                    y[start::step] &= 0x7F
            if x.is_floating_point():  # NaN only in the same places; else the same bits
                nan = x.isnan()
                assert torch.equal(nan, y.isnan()), f"{where}: NaN of {name}, {len(x)} elements"
                integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
                x, y = x.view(integer)[~nan], y.view(integer)[~nan]
            assert torch.equal(x, y), f"{where}: {name}, {(x != y).sum()} of {len(x)} differ"


def plan_for(rule: str, update: str, moments: str, step: int, **options: object) -> Plan:
    algorithm = RULES[rule]
    constants = algorithm.constants({**OPTIONS[rule], **options}, step)
    return Plan(algorithm, constants, update, moments, 0.7, 11, step)


def compare(kernel, rule, gradient, moments, dtype, update, sizes, steps, special=False):
    tasks = tasks_for(RULES[rule], dtype, update, moments, gradient, sizes, seed=1)
    start = copies(tasks)
    other = copies(tasks)
    for step in range(1, steps + 1):
        fill_gradients(tasks, step, special=special and step == 2)
        plan = plan_for(rule, update, moments, step)
        run_torch(Batch(tasks), plan)
        kernel.run(Batch(other), plan)
        where = f"{rule} {gradient} {moments} {dtype} {update} step {step}"
        assert_same_bits(tasks, other, where, special)
    for task, before in zip(tasks, start, strict=True):
        if not special and len(task.weight) > 100:
            kept = [(x != y).any() for x, y in zip(task.moments, before.moments, strict=True)]
            assert all(kept), "nothing moved"
    return tasks


def pairs(rule: str, moments: str) -> list[tuple[torch.dtype, tuple[torch.dtype, str]]]:
    """Each way with one kind of gradient, another one for the next rule and the next moments."""
    shift = [*RULES].index(rule) + MOMENTS.index(moments)
    return [(GRADIENTS[(i + shift) % 3], way) for i, way in enumerate(WAYS)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits_at_every_size(kernel, rule, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ways = [
            (torch.bfloat16, "split24", "8bit"),
            (torch.bfloat16, "stochastic", "bf16"),
            (torch.float32, "nearest", "fp32"),
        ]
        for dtype, update, moments in ways if threads == 1 else ways[:1]:
            steps = 2 if threads == 1 else 1  # threads that share a core are slow
            compare(kernel, rule, torch.bfloat16, moments, dtype, update, SIZES, steps)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits_in_every_pair(kernel, rule, moments):
    for gradient, (dtype, update) in pairs(rule, moments):
        compare(kernel, rule, gradient, moments, dtype, update, [1, 129, 1000], 3)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_that_are_not_finite(kernel, rule, moments):
    for gradient, (dtype, update) in pairs(rule, moments):
        tasks = compare(kernel, rule, gradient, moments, dtype, update, [300], 3, special=True)
        weight = tasks[0].weight
        if rule == "lion":  # sign(NaN) is 0 in torch: the weight only decays
            assert weight.isfinite().all()
        elif rule == "directed":  # an infinite direction makes an infinite weight, which stays
            for start, stride in SPECIAL.values():
                assert not weight[start::stride].isfinite().any()
        else:
            for start, stride in SPECIAL.values():
                assert weight[start::stride].isnan().all()
            # an 8-bit block with a NaN is NaN throughout, and every block here has one
            assert moments == "8bit" or weight.isfinite().sum() > 200


def test_a_kernel_call_reads_and_writes_nothing_else(kernel):
    """The tensors lie inside larger ones whose rest must not change."""
    rest = 64

    def inside(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fill = 77 if not values.is_floating_point() else 7.0
        whole = torch.full((len(values) + 2 * rest,), fill, dtype=values.dtype)
        whole[rest:-rest] = values
        return whole, whole[rest:-rest]

    for dtype, update in WAYS:
        (task,) = tasks_for(ADAMW, dtype, update, "8bit", torch.bfloat16, [200], seed=1)
        held = [inside(x) for x in (task.weight, *task.moments, *task.tops, task.gradient)]
        left = None if task.remainder is None else inside(task.remainder)
        moved = StepTask(
            held[0][1],
            None if left is None else left[1],
            (held[1][1], held[2][1]),
            (held[3][1], held[4][1]),
            held[5][1],
            0,
        )
        fill_gradients([moved], 1)
        kernel.run(Batch([moved]), plan_for("adamw", update, "8bit", 1))
        for whole, _ in held if left is None else [*held, left]:
            around = torch.cat([whole[:rest], whole[-rest:]])
            assert (around == (77 if not whole.is_floating_point() else 7.0)).all()


# --- building -----------------------------------------------------------------------------------


def step_once() -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 300).to(torch.bfloat16))
    parameter.grad = torch.linspace(1, -2, 300).to(torch.bfloat16)
    AdamW([parameter], update="split", moments="8bit").step()
    return parameter.detach()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_without_a_compiler_the_torch_operations_step_and_the_reason_is_told(
    fresh_build, monkeypatch
):
    compiled = step_once()
    native_kernel.cache_clear()
    monkeypatch.setenv("PATH", str(fresh_build))
    assert native_kernel() == "no C++ compiler (g++, c++ or clang++) on the PATH"
    assert torch.equal(step_once(), compiled)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo 'no licence' >&2; exit 3", "no licence"),
        ("[ $1 = --version ] && echo 1.0 && exit 0; echo 'cannot compile' >&2; exit 1", "compile"),
        ("exit 0", ""),  # says that all is well, and writes nothing
        (None, "No such file"),
    ],
)
def test_a_broken_compiler(fresh_build, monkeypatch, text, told):
    broken = fresh_build / "broken-cxx"
    if text is not None:
        script(broken, text)
    monkeypatch.setenv("CXX", str(broken))
    reason = native_kernel()
    assert isinstance(reason, str)
    assert "broken-cxx failed: " in reason
    assert told in reason
    assert "\n" not in reason
    step_once()
    folder = fresh_build / "cache" / "halfstep" / "kernels"
    assert not folder.exists() or not list(folder.iterdir()), "left-overs of a build"


PARTS = ["weight", "remainder", "gradient", "moments", "tops"]
WRONG = {
    "another dtype": lambda tensor: tensor.to(torch.int64),
    "too few elements": lambda tensor: tensor[:-1].clone(),
    "gaps": lambda tensor: torch.stack((tensor, tensor), -1)[:, 0],
    "another device": lambda tensor: tensor.to("meta"),
}


@pytest.mark.covering
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_task_that_is_not_what_the_plan_says_is_refused(kernel, part, wrong):
    plan = plan_for("adamw", "split", "8bit", 1)
    good, task = tasks_for(ADAMW, torch.bfloat16, "split", "8bit", torch.float32, [300, 300], 1)
    good.gradient.zero_()
    task.gradient.zero_()
    held = getattr(task, part)
    if isinstance(held, tuple):
        setattr(task, part, (held[0], WRONG[wrong](held[1])))
    else:
        setattr(task, part, WRONG[wrong](held))
    before = good.weight.clone()
    with pytest.raises(PrecisionError, match="the kernel takes"):
        kernel.run(Batch([good, task]), plan)
    assert torch.equal(good.weight, before)


def test_the_norm_of_gradients_of_another_dtype_or_device_is_refused(kernel):
    given_back = torch.ones(3)
    given_back.untyped_storage().resize_(0)
    for wrong in (torch.ones(3, dtype=torch.float64), torch.ones(3, device="meta"), given_back):
        with pytest.raises(PrecisionError, match="the kernel takes"):
            kernel.norm([torch.ones(3), wrong])


def test_a_late_group_steps_with_the_moments_that_were_loaded(each_kernel):
    """They are 8-bit, by the optimizer's word; and fp32 where somebody has put such there."""

    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        model[2].requires_grad_(False)
        optimizer = optimizers.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        precision = Precision("bf16-split,moments=8bit", model, optimizer)
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        return model, optimizer, precision

    def step(model, precision):
        with precision.autocast():
            loss = model(torch.randn(8, 64)).float().square().mean()
        return precision.step(loss)

    model, optimizer, precision = begun()
    step(model, precision)
    step(model, precision)
    saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, precision)])
    precision.close()
    parts = model, optimizer, precision = begun()
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    late = optimizer.state[model[2].weight]
    assert late.pop("momentum_buffer_codes").dtype == torch.uint8
    del late["momentum_buffer_tops"]
    late["momentum_buffer"] = torch.full_like(late["remainder"], 0.01, dtype=torch.float32)
    dtypes = {name: value.dtype for name, value in late.items()}
    before = model[2].weight.detach().clone(), late["momentum_buffer"].clone()
    assert step(model, precision).applied
    late = optimizer.state[model[2].weight]
    assert {name: value.dtype for name, value in late.items()} == dtypes
    assert not torch.equal(model[2].weight, before[0])
    moved = late["momentum_buffer"] - 0.9 * before[1]  # the gradient, whose largest is below 1
    assert 0 < float(moved.abs().max()) < 1
