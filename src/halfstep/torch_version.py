"""The private names of torch that halfstep uses, and whether the installed torch has them.

There is no upper bound on torch's version: each name that torch may change is listed here and
probed once before it is used; a failure is refused by name. A test compares the list to the source.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.errors import ConfigError

LEAST = (2, 11)
"""The oldest torch that works: the first with ``Tensor.grad_dtype``."""

EVERYTHING = "everything"
TRACING = "trace_nonfinite"
SCALER = "GradScaler"
FABRIC = "the Fabric plugin"
MACHINES = "gradients over several machines"
MEMORY = "estimate"
LAUNCHER = "--nproc"


@dataclass(frozen=True, slots=True)
class Private:
    """A private name of torch, which torch may change without notice.

    Attributes:
        name: The dotted path as the source writes it, or ``Class.attribute`` of an instance.
        needed_by: The feature that cannot work without it.
        works: A probe that raises, or returns False, where the name is missing or has changed.
    """

    name: str
    needed_by: str
    works: Callable[[], Any]


def _have(path: str) -> Callable[[], Any]:
    """A probe that a dotted name exists; modules on its path are imported as needed."""

    def probe() -> bool:
        parts = path.split(".")
        found: Any = importlib.import_module(parts[0])
        for i, part in enumerate(parts[1:], start=2):
            if hasattr(found, part):
                found = getattr(found, part)
            else:  # not imported so far; or hidden by its package, as torch.optim.optimizer is
                found = importlib.import_module(".".join(parts[:i]))
        return True

    return probe


def _norm() -> bool:
    (found,) = torch._foreach_norm([torch.tensor([3.0, 4.0])], 2, dtype=torch.float32)
    return bool(found == 5)


def _multiply() -> bool:
    tensors = [torch.ones(2)]
    torch._foreach_mul_(tensors, torch.tensor(2.0))
    return bool((tensors[0] == 2).all())


def _add() -> bool:
    tensors = [torch.ones(())]
    torch._foreach_add_(tensors, 1)
    return bool(tensors[0] == 2)


def _copy() -> bool:
    tensors = [torch.zeros(2, dtype=torch.bfloat16)]
    torch._foreach_copy_(tensors, [torch.ones(2)])
    return bool((tensors[0] == 1).all())


def _zero() -> bool:
    tensors = [torch.ones(2)]
    torch._foreach_zero_(tensors)
    return bool((tensors[0] == 0).all())


def _backward_pass_autocast() -> bool:
    config: Any = importlib.import_module("torch._functorch.config")
    with config.patch(backward_pass_autocast="off"):
        return bool(config.backward_pass_autocast == "off")


def _composite() -> bool:
    """Probe what casting/simulate.py asks: ``mm`` has its own kernel, ``matmul`` is composite."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    aten = torch.ops.aten
    composed: Any = aten.matmul.default
    return bool(composed.has_kernel_for_dispatch_key(key)) and not bool(
        aten.mm.default.has_kernel_for_dispatch_key(key)
    )


def _fake() -> bool:
    # by name: importing it takes as long as a third of torch
    module = importlib.import_module("torch._subclasses.fake_tensor")
    with module.FakeTensorMode(allow_non_fake_inputs=True):
        return bool(torch.ones(2, device="cpu").untyped_storage().nbytes() == 8)


def _sequence() -> bool:
    node: Any = (torch.ones(1, requires_grad=True) * 2).grad_fn
    return isinstance(node._sequence_nr(), int)


def _graph_task() -> bool:
    return isinstance(torch._C._current_graph_task_id(), int)


def _scaler_has(*names: str) -> Callable[[], Any]:
    def probe() -> bool:
        scaler = torch.amp.GradScaler("cpu", enabled=True)
        scaler.scale(torch.ones(()))
        return all(hasattr(scaler, name) for name in names)

    return probe


_ATEN = (
    "_trilinear",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_SCALER = (
    "_scale",
    "_growth_tracker",
    "_growth_interval",
    "_per_optimizer_states",
    "_enabled",
    "_device",
    "_check_scale_growth_tracker",
    "_check_inf_per_device",
    "_found_inf_per_device",
)
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"


def _hooks_of_a_tensor() -> bool:
    weight = nn.Parameter(torch.ones(1))
    handle = weight.register_hook(lambda g: None)  # type: ignore[no-untyped-call]
    return handle.id in (weight._backward_hooks or {})


PRIVATE: tuple[Private, ...] = (
    Private("torch._foreach_norm", EVERYTHING, _norm),
    Private("torch._foreach_mul_", EVERYTHING, _multiply),
    Private("torch._foreach_mul", EVERYTHING, lambda: torch._foreach_mul([torch.ones(1)], 2.0)),
    Private("torch._foreach_copy_", EVERYTHING, _copy),
    Private("torch._foreach_add_", EVERYTHING, _add),
    Private("torch._foreach_zero_", EVERYTHING, _zero),
    Private("torch._functorch.config", EVERYTHING, _backward_pass_autocast),
    Private("torch._subclasses.fake_tensor", MEMORY, _fake),
    Private("torch._C", EVERYTHING, _composite),
    Private(
        "torch.autograd.forward_ad._current_level",
        EVERYTHING,
        lambda: torch.autograd.forward_ad._current_level == -1,
    ),
    *(
        Private(f"torch.ops.aten.{name}", EVERYTHING, _have(f"torch.ops.aten.{name}.default"))
        for name in _ATEN
    ),
    *(
        Private(name, EVERYTHING, _have(name))
        for name in (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.nn.modules.batchnorm._NormBase",
            "torch.nn.modules.module._has_any_global_hook",
            "torch.optim.optimizer._global_optimizer_pre_hooks",
            "torch.optim.optimizer._global_optimizer_post_hooks",
        )
    ),
    Private("Module._parameters", EVERYTHING, lambda: "weight" in nn.Linear(1, 1)._parameters),
    Private("Module._modules", EVERYTHING, lambda: "0" in nn.Sequential(nn.ReLU())._modules),
    Private("Module._forward_pre_hooks", EVERYTHING, lambda: not nn.Module()._forward_pre_hooks),
    Private("Module._forward_hooks", EVERYTHING, lambda: not nn.Module()._forward_hooks),
    Private(
        "Module._forward_pre_hooks_with_kwargs",
        EVERYTHING,
        lambda: not nn.Module()._forward_pre_hooks_with_kwargs,
    ),
    Private("Module._backward_hooks", EVERYTHING, lambda: not nn.Module()._backward_hooks),
    Private("Module._backward_pre_hooks", EVERYTHING, lambda: not nn.Module()._backward_pre_hooks),
    Private("Tensor._backward_hooks", EVERYTHING, _hooks_of_a_tensor),
    Private("Tensor._version", EVERYTHING, lambda: torch.ones(1).add_(1)._version == 1),
    Private(
        "Tensor._values",
        EVERYTHING,
        lambda: torch.eye(2).to_sparse().coalesce()._values().numel() == 2,
    ),
    Private(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        TRACING,
        _have("torch.utils._python_dispatch._get_current_dispatch_mode_stack"),
    ),
    Private(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        EVERYTHING,
        lambda: not torch._C._functorch.is_functorch_wrapped_tensor(torch.ones(1)),
    ),
    Private("torch._C._current_graph_task_id", TRACING, _graph_task),
    Private("torch._C._current_autograd_node", TRACING, _have("torch._C._current_autograd_node")),
    Private(
        "torch._C._autograd._get_sequence_nr",
        TRACING,
        _have("torch._C._autograd._get_sequence_nr"),
    ),
    Private("Node._sequence_nr", TRACING, _sequence),
    *(Private(f"GradScaler.{name}", SCALER, _scaler_has(name)) for name in _SCALER),
    Private("torch._dynamo", FABRIC, _have("torch._dynamo.eval_frame.OptimizedModule")),
    Private(
        "ProcessGroup._get_backend", MACHINES, _have("torch.distributed.ProcessGroup._get_backend")
    ),
    Private(
        "Options._timeout",
        MACHINES,
        _have("torch._C._distributed_c10d.Backend.Options._timeout"),
    ),
    *(
        Private(f"LocalElasticAgent.{name}", LAUNCHER, _have(f"{_AGENT}.{name}"))
        for name in ("_start_workers", "_monitor_workers", "_shutdown")
    ),
)


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
                f"{', '.join(lost)} is missing or has changed; take a newer halfstep, or torch 2.13"
            )


@functools.cache
def missing(feature: str) -> tuple[str, ...]:
    """The names that a feature needs and this torch lacks; probed once per process."""
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < LEAST:
        return (f"a torch of version {LEAST[0]}.{LEAST[1]} or newer",)
    with torch.random.fork_rng(devices=()):  # probes that make layers draw their weights
        return tuple(p.name for p in PRIVATE if p.needed_by == feature and not _works(p))


def _works(private: Private) -> bool:
    try:
        return bool(private.works())
    except Exception:  # whatever a changed function raises
        return False
