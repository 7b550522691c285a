"""The library of kernels for forward and backward passes, loaded once."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
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
    if not have_numbers():
        return _Nothing()
    found = loaded()
    if isinstance(found, str):
        raise RuntimeError(f"no compiled kernels: {found}")
    return found


def may_run() -> bool:
    """Whether kernels may run here: not where something wants to see torch's operators.

    Such are ``torch.compile``, a dispatch mode, functorch and forward-mode AD.
    """
    if not have_numbers():
        return bool(_shapes.kernels)
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or not compiled()
    )


class _Shapes(threading.local):
    """Whether this thread's tensors are shapes alone, of which class, and whether kernels run."""

    kind: type[Tensor] | None = None
    kernels = False


_shapes = _Shapes()


class _Nothing:
    """A library whose functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@contextlib.contextmanager
def on_shapes(kind: type[Tensor], *, kernels: bool) -> Iterator[None]:
    """A context in which tensors of a class stand for those of a CPU by shape and dtype alone.

    Where kernels run, they make their results, save what they save, and compute nothing.
    """
    before = (_shapes.kind, _shapes.kernels)
    _shapes.kind, _shapes.kernels = kind, kernels
    try:
        yield
    finally:
        _shapes.kind, _shapes.kernels = before


def have_numbers() -> bool:
    """Whether tensors hold numbers to look at: not inside :func:`on_shapes`."""
    return _shapes.kind is None


def is_plain(x: Any) -> bool:
    """Whether a kernel may read it: on a CPU, and of no class that changes what tensors do."""
    known = type(x) in (Tensor, nn.Parameter) or type(x) is _shapes.kind
    return known and x.device.type == "cpu"


def cast_copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter in another dtype, contiguous and marked as what it is, for who counts memory."""
    copy = parameter.to(dtype).contiguous()
    if copy is not parameter:
        copy.is_cast_copy = True  # type: ignore[attr-defined]
    return copy


def drawn_seed() -> int:
    """A seed for a kernel that draws, from torch's global generator of the CPU."""
    if not have_numbers():
        return 0
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


def address(x: Tensor | None, count: int, *dtypes: torch.dtype) -> int | None:
    """What :func:`halfstep.kernels.library.address` gives; null where there are no numbers."""
    return native.address(x, count, *dtypes) if have_numbers() else None


def strided_address(
    x: Tensor, shape: Sequence[int], dtype: torch.dtype, *, rows: bool = True
) -> int | None:
    """The same of :func:`halfstep.kernels.library.strided_address`."""
    return native.strided_address(x, shape, dtype, rows=rows) if have_numbers() else None
