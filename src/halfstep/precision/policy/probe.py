"""Finds out whether a device computes a format rightly: operations on it against fp64 on the CPU.

It is for devices about which halfstep has no measurements, as a Mac's GPU: what it finds holds for
this machine, this system and this torch, and for the operations below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_SIZE = 64


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def _attention(x: Tensor, w: Tensor) -> Tensor:
    q, k = (t.view(1, 4, 16, _SIZE) for t in (x, w))
    return functional.scaled_dot_product_attention(q, k, k, is_causal=True)


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return functional.layer_norm(x, (_SIZE,), weight=w[0])


def _loss(x: Tensor, w: Tensor) -> Tensor:
    targets = torch.arange(_SIZE, device=x.device)
    return functional.cross_entropy((x @ w).float(), targets)


def _convolution(x: Tensor, w: Tensor) -> Tensor:
    return functional.conv2d(x.view(1, 4, 16, _SIZE), w.view(16, 4, 8, 8))


def _large_sum(x: Tensor, w: Tensor) -> Tensor:
    """A product whose sums pass 65504 on the way and come back: right only in fp32 sums."""
    sign = torch.ones_like(w)
    sign[_SIZE // 2 :] = -1
    return (0 * x + 100) @ (100 * sign + w.round())  # integers, so that nothing is rounded before


_PROBES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _product, _attention, _norm, _loss, _convolution, _large_sum,
)  # fmt: skip


# Operations whose results CUDA's autocast documents in fp32, and one that it runs in 16 bits.
_LISTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "linear": (lambda x: functional.linear(x, x), False),
    "softmax": (lambda x: x.softmax(-1), True),
    "log_softmax": (lambda x: x.log_softmax(-1), True),
    "layer_norm": (lambda x: functional.layer_norm(x, (_SIZE,)), True),
    "exp": (lambda x: x.exp(), True),
    "log": (lambda x: x.abs().log(), True),
    "pow": (lambda x: x.pow(2), True),
    "sum": (lambda x: x.sum(), True),
    "norm": (lambda x: x.norm(), True),
    "mse_loss": (lambda x: functional.mse_loss(x, 0 * x), True),
}


@cache
def failed_lists(device: torch.device, dtype: torch.dtype) -> str:
    """Compare what ``torch.autocast`` casts on a device with what it documents for CUDA.

    A policy that casts operation by operation means CUDA's lists, on every device.

    Returns:
        What differs, for the user; empty if nothing does.
    """
    low = torch.ones(_SIZE, _SIZE, dtype=dtype)
    for name, (run, fp32) in _LISTS.items():
        try:
            with torch.autocast(device.type, dtype=dtype):
                found = run(low.to(device)).dtype
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return f"autocast: {_first_line(error)}"
        if found != (torch.float32 if fp32 else dtype):
            said = str(found).removeprefix("torch.")
            return f"autocast: {name} comes in {said}"
    return ""


@cache
def failed_probe(device: torch.device, dtype: torch.dtype) -> str:
    """Run each probe forward and backward on a device, and compare with fp64 on the CPU.

    Returns:
        What is wrong, for the user; empty if every probe is right.
    """
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(_SIZE, _SIZE, generator=generator).to(dtype) for _ in range(2))
    for probe in _PROBES:
        name = probe.__name__.strip("_").replace("_", " ")
        try:
            exact = _outcomes(probe, x.double(), w.double())
            found = _outcomes(probe, x.to(device), w.to(device))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return f"{name}: {_first_line(error)}"
        for part, a, b in zip(("result", "first gradient", "second gradient"), found, exact,
                              strict=True):  # fmt: skip
            # Results are rounded to the format, and sums of up to 256 products to fp32: a few
            # units of the format, and a random walk of 16 and a margin of 4 in fp32's.
            limit = 8 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
            off = float((a.cpu().double() - b).abs().max() / b.abs().max().clamp_min(1e-30))
            if not off <= limit:
                return f"{name}: its {part} is off by {off:.2g} of the largest element"
    return ""


def _first_line(error: Exception) -> str:
    return f"{str(error).splitlines()[0]:.80}"


def _outcomes(
    probe: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A probe's result and the gradients of both operands."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    result = probe(x, w)
    of_x, of_w = torch.autograd.grad(result, (x, w), torch.ones_like(result))
    return result.detach(), of_x, of_w
