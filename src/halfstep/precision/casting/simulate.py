"""Simulates 16-bit products on a CPU without instructions for them, by fp32 products.

torch multiplies fp16 matrices on most CPUs with scalar code, and bf16 ones too where the processor
has no bf16 instructions. Inside ``SimulatedProducts(torch.float16)`` (or bf16) every matrix
product, convolution and attention over fp16 (bf16) CPU tensors instead converts its operands to
fp32 (exactly), runs the fp32 kernel, and rounds the result once to 16 bits. A tensor core does the
same: 16-bit operands, exact products, fp32 accumulation, one rounding. So fp16 overflows to inf at
65520 and is 0 below 2^-25; only the order of fp32 additions differs from torch's own kernel.

Attention differs in one more place: the fp32 kernel does not round the softmax probabilities to
16 bits between its two products.

The mode sits below autograd and autocast, so it must be entered around the forward AND the
backward; :class:`halfstep.Precision` does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

# Operators whose 16-bit CPU kernels are scalar. Their floating outputs have the operands' dtype,
# except attention's log-sum-exp (output 1), which must stay fp32 for the backward.
_PRODUCTS = frozenset(
    {
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        *(_aten.addbmm.default, _aten._trilinear.default, _aten.mv.default, _aten.addmv.default),
        *(_aten.dot.default, _aten.vdot.default, _aten.addr.default),
        *(_aten.convolution.default, _aten.convolution_backward.default),
        # Fused layers of torch.nn: they run wholly in fp32 and are rounded at their end.
        _aten._native_multi_head_attention.default,
        _aten._transformer_encoder_layer_fwd.default,
        *(_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default),
    }
)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_REROUTED = _PRODUCTS | {
    _ATTENTION,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def _holds(value: object, dtype: torch.dtype) -> bool:
    if isinstance(value, list | tuple):  # the operands of einsum
        return any(_holds(item, dtype) for item in value)
    return isinstance(value, Tensor) and value.dtype == dtype and value.device.type == "cpu"


def _is_other_floating(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is composed of other operators, whose kernels are to be replaced."""
    if func.namespace == "prim":  # a query such as a tensor's device, which runs no kernel
        return False
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _map(values: Any, when: torch.dtype, to: torch.dtype) -> Any:
    """Convert every tensor of dtype ``when``, in nested argument lists too, to dtype ``to``."""
    if isinstance(values, Tensor):
        return values.to(to) if values.dtype == when else values
    if isinstance(values, tuple | list):
        return type(values)(_map(value, when, to) for value in values)
    return values


class SimulatedProducts(TorchDispatchMode):
    """Reroute 16-bit CPU products through fp32 kernels while the mode is entered.

    Re-entrant; tensors on other devices and of other dtypes are untouched.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Example:
        >>> a, b = torch.full((1, 2), 256.0).half(), torch.full((2, 1), 256.0).half()
        >>> with SimulatedProducts(torch.float16):
        ...     print((a @ b).item())
        inf
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # the casting modes have already seen this call; what it runs is not the model's own call
        with torch._C.DisableTorchFunction():
            return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, through fp32 if it is a 16-bit product."""
        low = self.dtype
        rerouted = func in _REROUTED
        if not (rerouted or _is_composite(func)) or not any(_holds(arg, low) for arg in args):
            return func(*args, **kwargs)
        if func in _PRODUCTS and any(_is_other_floating(arg, low) for arg in args):
            return func(*args, **kwargs)  # torch refuses operands of two dtypes, here too
        if not rerouted:
            # Without gradients a composite such as linear arrives whole, so decompose it.
            with self:
                parts = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if parts is NotImplemented else parts
        wide = _map(args, low, torch.float32)
        named = {key: _map(value, low, torch.float32) for key, value in kwargs.items()}
        result = func(*wide, **named)
        if func is _ATTENTION:
            return (result[0].to(low), *result[1:])
        return _map(result, torch.float32, low)
