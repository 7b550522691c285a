"""Hooks that only look at what modules return, so that a kernel need not give way to them.

A function that computes what several modules would cannot serve any hook of theirs, which may
replace what the module returns. An :class:`Onlooker` replaces nothing: the function tells it the
same tensors, and computes as it does without.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Onlooker:
    """Looks at the outputs of one module, and at the gradients with respect to them.

    Its bound methods are the module's forward hooks, and return None.
    """

    def told(self, output: Tensor, taken: Tensor | None = None) -> Callable[[Tensor], None]:
        """Look at an output that a kernel computed for the module.

        Args:
            output: As the module would return it; valid during the call.
            taken: What the module would get, likewise; None where the kernel does not say.

        Returns:
            A function that looks at the gradient with respect to it, for each backward.
        """
        raise NotImplementedError


def onlookers(module: nn.Module) -> list[Onlooker] | None:
    """Those that look at a module; None where it has another hook."""
    if module._backward_hooks or module._backward_pre_hooks:
        return None
    found: dict[Onlooker, None] = {}
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if not isinstance(owner, Onlooker):
            return None
        found[owner] = None
    return list(found)
