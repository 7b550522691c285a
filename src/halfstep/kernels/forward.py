"""The library of kernels for forward and backward passes, loaded once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import halfstep.kernels.library as native

_SOURCES = ("kernels/attention.cpp", "kernels/rows.cpp", "kernels/vectors.h")
Address = ctypes.c_void_p
_COUNT, _INT, _FLOAT = ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "halfstep_attention": (Address, _INT),
    "halfstep_attention_backward": (Address, _INT),
    "halfstep_gelu_tanh": (Address, Address, Address, _COUNT, _INT),
    "halfstep_gelu_tanh_rows": (
        *(Address, Address, Address, Address, Address, _COUNT, _COUNT, _INT),
    ),
    "halfstep_dropout": (*(Address, _INT, Address, _FLOAT, _FLOAT, ctypes.c_uint64, _COUNT, _INT),),
    "halfstep_norm": (
        *(Address, _INT, Address, Address, Address, Address, Address, _FLOAT),
        *(Address, _INT, Address, Address, _COUNT, _COUNT, _INT),
    ),
    "halfstep_norm_backward": (
        *(Address, _INT, Address, Address, _INT, Address, Address, Address, Address, Address),
        *(_COUNT, _COUNT, _INT),
    ),
    "halfstep_cross_entropy": (
        *(Address, _INT, _COUNT, Address, _COUNT, Address, Address, _COUNT, _COUNT, _INT),
    ),
    "halfstep_cross_entropy_backward": (
        *(Address, _INT, _COUNT, Address, Address, Address, Address, _COUNT),
        *(_COUNT, _COUNT, _INT),
    ),
}


@cache
def loaded() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    found = native.load_library(_SOURCES, fused=True)
    if not isinstance(found, str):
        for name, arguments in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, None
    return found


def compiled() -> bool:
    """Whether there is a library."""
    return not isinstance(loaded(), str)


def library() -> Any:
    """The library, where :func:`loaded` is known to have found it.

    Raises:
        RuntimeError: There is none.
    """
    found = loaded()
    if isinstance(found, str):
        raise RuntimeError(f"no compiled kernels: {found}")
    return found


def may_run() -> bool:
    """Whether kernels may run here: not where something wants to see torch's operators.

    Such are ``torch.compile``, a dispatch mode, functorch and forward-mode AD.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or not compiled()
    )


def is_plain(x: Any) -> bool:
    """Whether a kernel may read it: on a CPU, and of no class that changes what tensors do."""
    return type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"


def drawn_seed() -> int:
    """A seed for a kernel that draws, from torch's global generator of the CPU."""
    return int(torch.randint(2**62, (), device="cpu"))


def new(*shape: int) -> Tensor:
    """Memory for fp32 numbers, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def by_torch(grad: Tensor) -> bool:
    """Whether a backward must be made of torch's operations, and not by a kernel.

    So it is where it may be differentiated again (``create_graph=True``), and under ``vmap``, as
    in ``torch.autograd.grad(is_grads_batched=True)``, whose tensors have no memory of their own.
    """
    if torch.is_grad_enabled():
        return True
    try:
        grad.data_ptr()
    except (NotImplementedError, RuntimeError):
        return True
    return False


def differentiated(
    y: Tensor, given: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of what was given, to be differentiated again; None where none is wanted."""
    wanted = [t for t in given if t is not None and t.requires_grad]
    made = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return tuple(next(made) if t is not None and t.requires_grad else None for t in given)
