"""A look below the simulation: in which dtype operators really reach torch's kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = (
    *("mm", "mv", "dot", "linear", "conv", "matmul", "einsum", "product_attention"),
    *("encoder_layer", "multi_head", "rnn_layer"),
)


class Witness(TorchDispatchMode):
    """Records the operators of every mode entered after it, with their operands' dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[torch.dtype]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat = [t for a in args for t in (a if isinstance(a, list | tuple) else [a])]
        flat = [t for t in flat if isinstance(t, Tensor)]
        self.seen.append((str(func), {t.dtype for t in flat if t.is_floating_point()}))
        return func(*args, **(kwargs or {}))

    def products_in(self, low: torch.dtype) -> list[str]:
        """The products that reached a kernel in a 16-bit format."""
        return [
            name
            for name, dtypes in self.seen
            if low in dtypes and any(word in name for word in _PRODUCTS)
        ]


def low_products(work: Callable[[], object], inside: AbstractContextManager[object]) -> list[str]:
    """The products that still reach a kernel in fp16 or bf16 while a context is entered."""
    with Witness() as witness, inside:
        work()
    assert witness.seen
    return witness.products_in(torch.float16) + witness.products_in(torch.bfloat16)
