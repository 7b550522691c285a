"""What replaces the forward of a single module."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Region:
    """A callable that replaces ``forward`` in a module's attributes and wraps the original.

    Unlike a pair of hooks, it cannot leave the context open when a forward is interrupted, holds no
    state between calls (recursion, threads, recomputation), and is traced, copied and pickled with
    its module; parameters, buffers and the keys of ``state_dict`` are untouched.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced = module.__dict__.get("forward")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, whose signature ``inspect`` shows."""
        return self.replaced or MethodType(type(self.module).forward, self.module)

    def inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own forward."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)
