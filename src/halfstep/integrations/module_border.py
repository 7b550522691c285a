"""Where a policy's casts happen in a model whose submodules are called from outside.

:class:`halfstep.Precision` casts at the border of ``model(...)``. A LightningModule's
``training_step`` calls ``self.net(x)`` instead and takes the loss of what comes out, so there the
border is around the outermost call of a submodule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from halfstep.precision.cast import Region, cast_floating
from halfstep.precision.policy import PrecisionPolicy


class ModuleBorder:
    """Casts at the outermost call of any submodule with parameters, while it is on.

    Floating inputs are cast to the compute dtype where the policy stores 16-bit weights, floating
    outputs to the output dtype, fp32, so that the loss is an island. Modules without parameters
    (losses, metrics, activations) are not touched. Calls from within the model's own ``forward``
    are not outermost, and neither is what activation checkpointing repeats during a backward.
    """

    def __init__(self, model: nn.Module, policy: PrecisionPolicy) -> None:
        self._policy = policy
        self._root = model
        self._on = False
        self._depth = 0
        self._handles: list[Any] = []
        if policy.compute_dtype == torch.float32:
            return
        for module in model.modules():
            if any(p.is_floating_point() for p in module.parameters()):
                self._handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ]

    def remove_(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Cast within this context."""
        before = self._on, self._depth
        self._on, self._depth = True, 0
        try:
            yield
        finally:
            self._on, self._depth = before

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._on or self._redirected(module):
            return None
        self._depth += 1
        if self._depth > 1 or module is self._root or not _is_low(module):
            return None
        dtype = self._policy.compute_dtype
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._on or self._depth == 0:  # it was not entered
            return None
        self._depth -= 1
        return cast_floating(output, self._policy.output_dtype) if self._depth == 0 else None

    def _redirected(self, module: nn.Module) -> bool:
        """Whether a strategy calls the model only to reach its ``training_step`` (DDP)."""
        own = module.__dict__.get("forward")
        if module is not self._root or own is None or isinstance(own, Region):
            return False
        return getattr(own, "__func__", own) is not type(module).forward


def _is_low(module: nn.Module) -> bool:
    return any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters())
