"""fp16 arithmetic on a CPU, fast enough to live with: fp32 products with fp16 rounding.

torch multiplies fp16 matrices on most CPUs with scalar code. Inside :func:`simulated_fp16` every
matrix product, convolution and attention over fp16 CPU tensors runs instead as: operands to fp32
(exact), the fp32 kernel, the result rounded once to fp16. That is what a tensor core does: fp16
operands, exact products, fp32 accumulation, one rounding. So overflow becomes inf at 65520, values
below 2^-25 become 0, and only the order of the fp32 additions differs from torch's own kernel.

Attention differs in one more place: the fp32 kernel does not round the softmax probabilities to
fp16 between its two products.

The mode sits below autograd and autocast, so it must be entered around the forward AND the
backward; :class:`halfstep.Precision` does both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

# Operators whose fp16 CPU kernels are scalar. All floating outputs take the operands' dtype, except
# that attention returns its log-sum-exp in fp32 (output 1), which must stay so for the backward.
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.addbmm.default,
        _aten._trilinear.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
        _aten.vdot.default,
        _aten.addr.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
        # Fused evaluation paths of torch.nn: whole in fp32, rounded to fp16 at their end.
        _aten._native_multi_head_attention.default,
        _aten._transformer_encoder_layer_fwd.default,
    }
)
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default


def _is_half(value: object) -> bool:
    if isinstance(value, list | tuple):  # the operands of einsum
        return any(_is_half(item) for item in value)
    return isinstance(value, Tensor) and value.dtype == torch.float16 and value.device.type == "cpu"


def _is_other_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float16


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is defined by other operators, whose kernels are the ones to replace."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _map(convert: Callable[[Tensor], Tensor], when: torch.dtype, values: Any) -> Any:
    """Convert every tensor of dtype ``when`` in a flat or once nested argument list."""
    if isinstance(values, Tensor):
        return convert(values) if values.dtype == when else values
    if isinstance(values, tuple | list):
        return type(values)(_map(convert, when, value) for value in values)
    return values


class SimulatedHalf(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reroute fp16 CPU products through fp32 kernels while the mode is entered."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not any(_is_half(arg) for arg in args):
            return func(*args, **kwargs)
        attention = func is _ATTENTION or func is _ATTENTION_BACKWARD
        if func in _PRODUCTS and any(_is_other_floating(arg) for arg in args):
            return func(*args, **kwargs)  # torch refuses operands of two dtypes; so be it
        if not attention and func not in _PRODUCTS:
            # Without gradients a composite such as linear arrives whole: take it apart.
            with self:
                parts = func.decompose(*args, **kwargs) if _is_composite(func) else NotImplemented
            return func(*args, **kwargs) if parts is NotImplemented else parts
        args = _map(Tensor.float, torch.float16, args)
        kwargs = {key: _map(Tensor.float, torch.float16, value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if func is _ATTENTION:
            return (result[0].half(), *result[1:])
        return _map(Tensor.half, torch.float32, result)


def simulated_fp16() -> SimulatedHalf:
    """A context in which fp16 products on CPU tensors run through fp32 kernels.

    Returns:
        A re-entrant-safe context manager; enter a new one each time. Tensors on other devices and
        of other dtypes are untouched.

    Example:
        >>> a, b = torch.full((1, 2), 256.0).half(), torch.full((2, 1), 256.0).half()
        >>> with simulated_fp16():
        ...     print((a @ b).item())
        inf
    """
    return SimulatedHalf()  # type: ignore[no-untyped-call]
