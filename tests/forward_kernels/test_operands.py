"""Every compiled kernel refuses tensors that are not what it reads, before it touches memory."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from every import every
from halfstep.errors import PrecisionError
from halfstep.kernels import attention, rows

BF16, FP32 = torch.bfloat16, torch.float32
N, C = 48, 64  # rows and columns: past the ends of vectors, and several blocks of every format


def numbers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@dataclass
class Entry:
    """A function that calls a kernel, and what it takes."""

    call: Callable[..., object]
    given: dict[str, Tensor]
    free: tuple[str, ...] = ()  # whose size is the size of the others
    converted: tuple[str, ...] = ()  # those of another dtype
    by_torch: tuple[str, ...] = ()  # what torch computes where it is not on a CPU


def heads(*shape: int) -> dict[str, Tensor]:
    return {name: numbers(*shape) for name in ("q", "k", "v")}


def attended(**given: Tensor) -> object:
    mask = given.pop("mask", None)
    return attention.attend(*given.values(), mask, attention.Settings(scale=0.25))


def attended_backward(grad, q, k, v, out, lse, into) -> object:
    made = (into.clone(), torch.empty_like(k), torch.empty_like(v))
    attention.attend_backward(made, grad, q, k, v, None, out, lse, attention.Settings(scale=0.25))
    return made[1:]


def normalised_backward(x, gain, grad, mean, inverse, passed) -> object:
    return rows.norm_gradients(x, gain, grad, mean, inverse, passed)


WIDE, ROW = {"dtype": FP32}, numbers(C, dtype=FP32)
TARGETS = torch.arange(N) % C
ENTRIES = {
    "gelu's slope": Entry(rows.gelu_tanh_or_slope, {"x": numbers(N, C), "grad": numbers(N, C)}),
    "norm": Entry(
        lambda **given: rows.normalised(*given.values(), 1e-5, BF16, True),
        {"x": numbers(N, C), "gain": ROW, "bias": ROW},
        ("x",),
        ("gain", "bias"),
    ),
    "norm's backward": Entry(
        normalised_backward,
        {
            **{"x": numbers(N, C), "gain": ROW, "grad": numbers(N, C)},
            **{"mean": numbers(N, **WIDE), "inverse": numbers(N, **WIDE)},
            "passed": numbers(N, C),
        },
        (),
        ("gain",),
    ),
    "sum and norm": Entry(
        lambda **given: rows.add_and_normalise(*given.values(), 1e-5),
        {**{"x": numbers(N, C), "added": numbers(N, C)}, "shift": ROW, "gain": ROW, "bias": ROW},
    ),
    "sum": Entry(rows.add, {"x": numbers(N, C), "added": numbers(N, C), "shift": ROW}),
    "gelu of rows": Entry(rows.gelu_of_rows, {"x": numbers(N, C), "bias": ROW}, ("x",)),
    "its backward": Entry(
        lambda grad, x, bias: rows.gelu_of_rows_backward_(grad, x, bias),
        {"grad": numbers(N, C), "x": numbers(N, C), "bias": ROW},
    ),
    "cross-entropy": Entry(
        lambda logits, targets: rows.cross_entropy(logits, targets, -100),
        {"logits": numbers(N, C), "targets": TARGETS},
    ),
    "cross-entropy in place": Entry(
        lambda logits, targets: rows.softmax_errors_(logits, targets, -100),
        {"logits": numbers(N, C), "targets": TARGETS},
    ),
    "attention": Entry(
        attended, {**heads(2, 3, 20, 16), "mask": numbers(2, 3, 20, 20, dtype=FP32)}
    ),
    "attention's backward": Entry(
        attended_backward,
        {
            **{"grad": numbers(2, 3, 20, 16), **heads(2, 3, 20, 16), "out": numbers(2, 3, 20, 16)},
            **{"lse": numbers(2, 3, 20, dtype=FP32), "into": numbers(2, 3, 20, 16)},
        },
    ),
}
OPERANDS = [(name, operand) for name, entry in ENTRIES.items() for operand in entry.given]
refused = pytest.raises((PrecisionError, TypeError), match="the kernel takes")


def run(entry: Entry, **changed: Tensor) -> list[Tensor]:
    """What the function returns, of copies, as some of them are written in place."""
    kept = torch.preserve_format
    given = {k: t.clone(memory_format=kept) for k, t in entry.given.items()} | changed
    made = entry.call(**given)
    return [t for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, Tensor)]


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "converted": lambda tensor: tensor.to(torch.float16),
    "free": lambda tensor: tensor[:-1].clone(),
    "by_torch": lambda tensor: tensor.to("meta"),
}
"""What must be refused unless an entry lists the operand under that name."""


@pytest.mark.parametrize("allowed", WRONG)
def test_another_dtype_size_or_device_is_refused(allowed):
    def check(name, operand):
        entry = ENTRIES[name]
        if operand not in getattr(entry, allowed):
            with refused:
                run(entry, **{operand: WRONG[allowed](entry.given[operand])})

    every(OPERANDS, check)


def test_elements_with_gaps_are_copied_or_refused():
    def check(name, operand):
        entry = ENTRIES[name]
        given = entry.given[operand]
        gaps = torch.stack((given, given), -1)[..., 0]
        found = None
        with contextlib.suppress(PrecisionError):  # or a copy without gaps is what the kernel gets
            found = run(entry, **{operand: gaps})
        if found:
            for one, other in zip(found, run(entry), strict=True):
                assert torch.equal(one, other)

    every(OPERANDS, check)


def test_nothing_at_all_is_no_result_or_refused():
    """Of no rows, and of no columns: nothing is read where nothing is."""

    def check(name, operand, size):
        given = ENTRIES[name].given[operand]
        empty = given.new_zeros(size[: given.ndim])
        with contextlib.suppress(
            PrecisionError, TypeError, ValueError, ArithmeticError, LookupError
        ):
            assert all(part.isfinite().all() for part in run(ENTRIES[name], **{operand: empty}))

    every(((*case, size) for case in OPERANDS for size in ((0, C), (N, 0), (0, 0, 0, 0))), check)


@pytest.mark.parametrize("target", [-1, C, 2**40, -(2**63)])
def test_a_target_out_of_range_is_refused(target):
    """It would be read far outside of the logits."""
    wrong = torch.where(torch.arange(N) == 7, target, TARGETS)
    for name in ("cross-entropy", "cross-entropy in place"):
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            run(ENTRIES[name], targets=wrong)
    ignored = rows.cross_entropy(numbers(N, C), torch.full((N,), target), target)
    assert not ignored.any()
