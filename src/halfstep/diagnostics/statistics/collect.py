"""Counts the numbers of one training step as they are made, by hooks on the model's modules.

The hooks exist during a watched step alone. Each module's outputs are counted after its forward,
and the gradients with respect to them when backward has them complete. Counts stay on the device
until :meth:`Collector.read`.

Not counted: a forward without gradients outside of one with them, such as an evaluation or a
teacher; a forward that activation checkpointing repeats in backward; a tensor that a module passes
on as it got it from a module inside; what runs inside of ``torch.func``, as ``vmap``, where tensors
have no memory, or as a scripted module.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from halfstep.diagnostics.module_calls import Call, ModuleCalls
from halfstep.diagnostics.statistics.values import ROW, Kind, TensorStatistics, count_into_, merged
from halfstep.precision.masters.local_part import local_part

_Key = tuple[Kind, str, torch.dtype, torch.device, float, int]


class Collector:
    """The counts of one step; hooks are attached by making it, and removed by :meth:`close`."""

    def __init__(self, model: nn.Module, scale: Callable[[], float]) -> None:
        """Attach hooks to every module.

        Args:
            model: The model, whose modules' names are those of the tensors.
            scale: Tells the loss scale of the backward that is running; asked once.
        """
        self._ask, self._scale = scale, 0.0
        self._rows: dict[_Key, Tensor] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._handles: list[RemovableHandle] = []
        self._modules = ModuleCalls(model, self._ended)
        self._modules.hook()

    def close(self) -> None:
        """Remove the hooks, those that wait on tensors for their gradients included."""
        for handle in self._handles:
            handle.remove()
        self._modules.unhook()
        self._handles = []

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
        count_into_(self._row((kind, name, x.dtype, x.device, factor, shift)), x, factor)

    def add_update(self, name: str, after: Tensor, before: Tensor) -> None:
        """Count how a weight changed; 16-bit ones in fp32, as their differences have more bits."""
        if after.is_complex():
            after, before = torch.view_as_real(after), torch.view_as_real(before)
        if not after.is_floating_point():
            return
        after, before = after.detach(), before.detach()
        wide = torch.promote_types(torch.promote_types(after.dtype, before.dtype), torch.float32)
        row = self._row(("update", name, wide, after.device, 1.0, 0))
        count_into_(row, after.to(wide) - before.to(wide))

    def _row(self, key: _Key) -> Tensor:
        if key not in self._rows:
            self._rows[key] = torch.zeros(ROW, dtype=torch.float64, device=key[3])
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
            found.setdefault((kind, name, dtype), []).append(one)
        return [same[0] if len(same) == 1 else merged(same) for same in found.values()]

    def _ended(self, call: Call, output: Any) -> None:
        """Count a module's outputs, and wait for the gradients with respect to them."""
        for key, tensor in tensors_in(output):
            evaluated = not call.learns and not tensor.requires_grad
            if not evaluated and not is_functorch_wrapped_tensor(tensor):
                self._output(f"{call.name or call.class_name}{key}", tensor, call.learns)

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
