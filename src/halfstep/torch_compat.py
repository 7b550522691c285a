"""The private names of torch that halfstep uses, and whether the installed torch has them.

There is no upper bound on torch's version. A private name may go in any release: each is listed
here and looked up once before it is used, and one that is gone is refused by name. A test compares
the list with the source.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import torch

from halfstep.errors import ConfigError

LEAST = (2, 11)
"""The oldest torch that works: the first with ``Tensor.grad_dtype``."""

EVERYTHING = "everything"
PRIVATE = {
    EVERYTHING: (
        "torch._foreach_norm torch._foreach_mul_ torch._foreach_mul torch._foreach_copy_ "
        "torch._foreach_sub_ torch._foreach_zero_ torch._functorch.config torch._C "
        "torch.autograd.forward_ad._current_level torch.ops.aten._trilinear "
        "torch.ops.aten._native_multi_head_attention torch.ops.aten._transformer_encoder_layer_fwd "
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu "
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward "
        "torch.utils._python_dispatch.TorchDispatchMode torch.nn.modules.batchnorm._NormBase "
        "torch.nn.modules.module._has_any_global_hook "
        "torch.optim.optimizer._global_optimizer_pre_hooks "
        "torch.optim.optimizer._global_optimizer_post_hooks "
        "torch._C._functorch.is_functorch_wrapped_tensor "
        "Module._parameters Module._modules Module._forward_pre_hooks Module._forward_hooks "
        "Module._forward_pre_hooks_with_kwargs Module._backward_hooks Module._backward_pre_hooks "
        "Tensor._backward_hooks Tensor._version Tensor._values"
    ),
    "trace_nonfinite": (
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack "
        "torch._C._current_graph_task_id torch._C._current_autograd_node "
        "torch._C._autograd._get_sequence_nr Node._sequence_nr"
    ),
    "GradScaler": (
        "GradScaler._scale GradScaler._growth_tracker GradScaler._growth_interval "
        "GradScaler._per_optimizer_states GradScaler._enabled GradScaler._device "
        "GradScaler._check_scale_growth_tracker "
        "GradScaler._found_inf_per_device"
    ),
    "estimate": "torch._subclasses.fake_tensor",
}
"""Names by the feature that needs them; ``Class._name`` is an attribute of an instance."""


def require_torch(*needed_by: str) -> None:
    """Refuse a torch that lacks private names which halfstep uses.

    Args:
        needed_by: The features to check besides :data:`EVERYTHING`.

    Raises:
        ConfigError: Naming torch's version, the names that it lacks and what needs them.
    """
    for feature in (EVERYTHING, *needed_by):
        lost = missing(feature)
        if lost:
            raise ConfigError(
                f"torch {torch.__version__} is not one that halfstep can use for {feature}: "
                f"{', '.join(lost)} is missing; take a newer halfstep, or torch 2.13"
            )


@functools.cache
def missing(feature: str) -> tuple[str, ...]:
    """List the names that a feature needs and this torch lacks; looked up once per process."""
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < LEAST:
        return (f"a torch of version {LEAST[0]}.{LEAST[1]} or newer",)
    return tuple(name for name in PRIVATE.get(feature, "").split() if not _exists(name))


def _exists(name: str) -> bool:
    root, *rest = name.split(".")
    found: Any = torch if root == "torch" else _INSTANCES[root]()
    for count, part in enumerate(rest, start=1):
        try:
            if not hasattr(found, part):  # a module that was not imported so far, or is hidden
                found = importlib.import_module(".".join([root, *rest[:count]]))
            else:
                found = getattr(found, part)
        except (ImportError, RuntimeError):  # torch.ops raises the second one
            return False
    return True


_INSTANCES: dict[str, Callable[[], Any]] = {
    "Module": torch.nn.Module,
    "Tensor": lambda: torch.ones(1),
    "Node": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "GradScaler": lambda: torch.amp.GradScaler("cpu", enabled=True),
}
