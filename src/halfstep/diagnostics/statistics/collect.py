"""Counts the numbers of one training step as they are made, by hooks on the model's modules.

The hooks exist during a watched step alone. Each module's outputs are counted after its forward,
and the gradients with respect to them when backward has them complete; a kernel that stands for
several modules tells theirs. Counts stay on the device until :meth:`Collector.read`.

Not counted: a forward without gradients outside of one with them, such as an evaluation or a
teacher; a forward that activation checkpointing repeats in backward; a tensor that a module passes
on as it got it from a module inside; what runs inside of ``torch.func``, as ``vmap``, where tensors
have no memory, or as a scripted module.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from halfstep.diagnostics.statistics.product_error import ProductError, ProductErrors
from halfstep.diagnostics.statistics.rounding_error import rounding_errors
from halfstep.diagnostics.statistics.values import Kind, TensorStatistics, merged
from halfstep.kernels.exponents import add_, add_difference_, empty_row
from halfstep.kernels.onlookers import Onlooker
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.portable import Hook, make_modules_plain_, make_modules_portable_
from halfstep.precision.ownership import is_ours
from halfstep.precision.policy.recipe import SCHEMES
from halfstep.precision.policy.rules import is_linear

_Key = tuple[Kind, str, torch.dtype, torch.device, float, int]


class Collector:
    """The counts of one step; hooks are attached by making it, and removed by :meth:`close`."""

    def __init__(
        self, model: nn.Module, scale: Callable[[], float], formats: Sequence[str] = ()
    ) -> None:
        """Attach hooks to every module.

        Args:
            model: The model, whose modules' names are those of the tensors.
            scale: Tells the loss scale of the backward that is running; asked once.
            formats: Names of block formats whose rounding of each tensor is measured.
        """
        self._formats = formats
        self._products = ProductErrors([name for name in formats if name in SCHEMES])
        self._rounding: dict[tuple[Kind, str], dict[str, tuple[float, float, float]]] = {}
        self._ask, self._scale = scale, 0.0
        self._rows: dict[_Key, Tensor] = {}
        self._running = _Running()
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            one = _Module(self, name or type(module).__name__, module)
            enter, leave = Hook(one.enter), Hook(one.leave)
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        self._portable = make_modules_portable_(model, is_ours)

    def close(self) -> None:
        """Remove the hooks, those that wait on tensors for their gradients included."""
        for handle in self._handles:
            handle.remove()
        make_modules_plain_(self._portable)
        self._handles, self._portable = [], []

    def add(self, kind: Kind, name: str, x: Tensor, scale: float = 1.0) -> None:
        """Count the numbers of a tensor, divided by a loss scale; this rank's part of a DTensor.

        A complex number counts as two.
        """
        x = local_part(x)
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        if x.is_sparse:
            x = x.coalesce().values()
        if not x.is_floating_point() or x.is_meta:
            return
        factor, shift = _parts(scale)
        if self._formats and (kind, name) not in self._rounding:  # of micro-batches the first
            self._rounding[kind, name] = rounding_errors(x, self._formats)
        add_(self._row((kind, name, x.dtype, x.device, factor, shift)), x, factor)

    def add_update(self, name: str, after: Tensor, before: Tensor) -> None:
        """Count how a weight changed; 16-bit ones in fp32, as their differences have more bits."""
        if after.is_complex():
            after, before = torch.view_as_real(after), torch.view_as_real(before)
        if not after.is_floating_point():
            return
        wide = torch.promote_types(after.dtype, torch.float32)
        add_difference_(self._row(("update", name, wide, after.device, 1.0, 0)), after, before)

    def _row(self, key: _Key) -> Tensor:
        if key not in self._rows:
            self._rows[key] = empty_row(key[3])
        return self._rows[key]

    @property
    def scale(self) -> float:
        """The loss scale of the step's backward."""
        return self._scale or self._ask()

    @property
    def empty(self) -> bool:
        """Whether nothing has been counted."""
        return not self._rows

    def read(self) -> list[TensorStatistics]:
        """Copy the counts to the host, in one transfer for each device."""
        read: dict[_Key, list[float]] = {}
        for device in {key[3] for key in self._rows}:
            keys = [key for key in self._rows if key[3] == device]
            rows = torch.stack([self._rows[key] for key in keys]).tolist()
            read |= dict(zip(keys, rows, strict=True))
        found: dict[tuple[Kind, str, torch.dtype], list[TensorStatistics]] = {}
        for key in self._rows:  # in the order of their first numbers
            kind, name, dtype, _, factor, shift = key
            multiplied = factor != 1
            one = TensorStatistics.from_row(
                kind, name, dtype, read[key], shift, multiplied=multiplied
            )
            if (kind, name) in self._rounding:
                one = replace(one, rounding=self._rounding[kind, name])
            found.setdefault((kind, name, dtype), []).append(one)
        return [same[0] if len(same) == 1 else merged(same) for same in found.values()]

    def enter(self) -> None:
        """A module's forward begins."""
        if torch.compiler.is_compiling():
            return
        counted = self._running.counted
        outer = bool(counted and counted[-1])
        # A checkpoint's forward has no gradients on, but is inside of one that has.
        counted.append(not _in_backward() and (torch.is_grad_enabled() or outer))

    def leave(self, name: str, output: Any, linear: nn.Module | None, args: Any) -> None:
        """It has ended with this output; ``linear`` is the module where it is such a layer."""
        if torch.compiler.is_compiling():
            return
        running = self._running.counted
        counted = running.pop() if running else False
        for key, tensor in tensors_in(output):
            evaluated = not counted and not tensor.requires_grad
            if not evaluated and not is_functorch_wrapped_tensor(tensor):
                self._output(f"{name}{key}", tensor, counted)
                if linear is not None and counted and tensor.requires_grad and args:
                    then = self._products.called(name, linear, args[0])
                    if then is not None:
                        self._handles.append(tensor.register_hook(then))  # type: ignore[no-untyped-call]

    def told(
        self, name: str, x: Tensor, linear: nn.Module | None, taken: Tensor | None
    ) -> Callable[[Tensor], None]:
        """A kernel computed a module's output; count it, and return what counts its gradient."""
        self.enter()
        then = None
        if self._running.counted.pop():
            self.add("activation", name, x)
            if linear is not None and taken is not None:
                then = self._products.called(name, linear, taken)

        def differentiated(gradient: Tensor) -> None:
            self._gradient(name, gradient)
            if then is not None:
                then(gradient)

        return differentiated

    def products(self) -> list[ProductError]:
        """What recipes would change of the products of linear layers."""
        return self._products.read()

    def _output(self, name: str, x: Tensor, counted: bool) -> None:
        version = -1 if x.is_inference() else x._version
        last = self._seen.get(id(x))
        if last is not None and last[0]() is x and last[1] == version:
            return
        self._seen[id(x)] = (weakref.ref(x), version)
        if counted:
            self.add("activation", name, x.detach())
        if x.requires_grad and x.dim():  # a loss's is 1 over and over
            wait = partial(self._gradient, name)
            self._handles.append(x.register_hook(wait))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, gradient: Tensor) -> None:
        self._scale = self.scale
        self.add("activation_gradient", name, gradient.detach(), self._scale)


class _Module(Onlooker):
    """Tells the collector of one module."""

    def __init__(self, collector: Collector, name: str, module: nn.Module) -> None:
        self._collector, self._name = collector, name
        self._linear = module if is_linear(module) else None

    def enter(self, module: nn.Module, args: Any) -> None:
        self._collector.enter()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._collector.leave(self._name, output, self._linear, args)

    def told(self, output: Tensor, taken: Tensor | None = None) -> Callable[[Tensor], None]:
        return self._collector.told(self._name, output, self._linear, taken)


class _Running(threading.local):
    """The forwards that a thread is running: another one may evaluate the model meanwhile."""

    def __init__(self) -> None:
        self.counted: list[bool] = []
        """Whether each is counted, the inner ones last."""


def tensors_in(output: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's output with their keys: none for one tensor, or the first of some.

    An output may be a tensor, or a tuple, list, mapping or dataclass of outputs.
    """
    if isinstance(output, Tensor):
        yield key, output
        return
    if isinstance(output, Mapping):
        parts = [(f"{key}[{name}]", part) for name, part in output.items()]
    elif isinstance(output, tuple | list):
        parts = [(f"{key}[{i}]" if i else key, part) for i, part in enumerate(output)]
    elif is_dataclass(output) and not isinstance(output, type):
        parts = [(f"{key}[{f.name}]", getattr(output, f.name)) for f in fields(output)]
    else:
        return
    for inner, part in parts:
        yield from tensors_in(part, inner)


def _parts(scale: float) -> tuple[float, int]:
    """1 / scale as a factor and a power of two; the factor of a power of two is 1.

    Factors are between 1/2 and 1, so that a product neither overflows nor becomes 0.
    """
    if not 0 < scale < math.inf:
        return 1.0, 0
    fraction, exponent = math.frexp(1 / scale)
    return (1.0, exponent - 1) if fraction == 0.5 else (fraction, exponent)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
