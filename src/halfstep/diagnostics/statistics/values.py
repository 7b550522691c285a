"""What is known of the numbers of one tensor: how many have which exponent, and their extremes.

It is made from a row of 282 fp64 counts: zeros; one count for each exponent from -149 (the smallest
fp32 number) to 127; infinities; NaN; the sum of the finite squares; the largest finite magnitude.
Counts of several tensors add up in one row, and are kept as JSON in ``numerics.jsonl``.

**Source:** IEEE 754-2019, 3.3: a number m 2^e with 1 <= m < 2 has the exponent e; fp32's
subnormal numbers have those from -149 to -127.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from halfstep.diagnostics.module_calls import Call, ModuleCalls
from halfstep.precision.casting.autocast import tensors_in
from halfstep.precision.masters.local_part import local_part

Kind = Literal["weight", "activation", "activation_gradient", "gradient"]
LEAST, MOST = -149, 127
"""The exponents of the smallest and of the largest fp32 number."""
ZEROS, FIRST, INFINITE, NOT_A_NUMBER = 0, 1, 278, 279
"""Positions in a row; the exponent e is at ``FIRST + e - LEAST``."""
SQUARES, LARGEST, ROW = 280, 281, 282
_COPIES = 64
_AT_ONCE = 1 << 22


@torch.no_grad()
def count_into_(row: Tensor, x: Tensor) -> None:
    """Count a tensor's numbers in a row; nothing waits for the device.

    Args:
        row: ``(282,)`` fp64, zeros at first, on the tensor's device.
        x: Floating-point, of any shape. Exponents of fp64 numbers beyond those of fp32 count as
            the nearest that fp32 has.
    """
    x = x.detach()
    for part in torch.split(x.reshape(-1), _AT_ONCE) if x.numel() else ():
        magnitude = (part if part.dtype == torch.float64 else part.float()).abs()
        finite = magnitude.isfinite()
        numbers = torch.where(finite, magnitude, 0.0)
        exponent = torch.frexp(numbers).exponent - 1  # frexp has mantissas from 1/2 to 1
        at = exponent.clamp(LEAST, MOST) + (FIRST - LEAST)
        at = torch.where(numbers == 0, ZEROS, at)
        at = torch.where(finite, at, torch.where(magnitude.isnan(), NOT_A_NUMBER, INFINITE))
        # Many threads of a GPU that add to one count wait for each other, so there are copies.
        copy = torch.arange(len(at), device=at.device) % _COPIES
        counts = torch.zeros(_COPIES * SQUARES, dtype=torch.int64, device=at.device)
        counts.scatter_add_(0, at + copy * SQUARES, torch.ones_like(copy))
        row[:SQUARES] += counts.view(_COPIES, SQUARES).sum(0)
        row[SQUARES] += numbers.double().square().sum()
        row[LARGEST] = torch.maximum(row[LARGEST], numbers.amax().double())


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """The numbers of one tensor in one step, or of all calls and micro-batches together.

    Gradients are as they would be without a loss scale.
    """

    kind: Kind
    """``"weight"`` and ``"gradient"`` of a parameter; ``"activation"``, the output of a module,
    and ``"activation_gradient"``, the loss's gradient with respect to it."""
    name: str
    """Of the parameter or module, in the model; ``name[1]`` is the second tensor of several that a
    module returns."""
    dtype: str
    """In which the numbers were, such as ``"bfloat16"``."""
    elements: int
    """How many numbers there are."""
    absmax: float
    """The largest finite magnitude; 0 where there is none."""
    rms: float
    """The root of the mean square of the finite numbers; 0 where there is none."""
    zeros: int
    """Numbers that are exactly 0."""
    nan: int
    """Numbers that are NaN."""
    inf: int
    """Infinities of either sign."""
    exponents: Mapping[int, int]
    """How many finite numbers that are not 0 have the exponent e: 2^e <= |x| < 2^(e+1)."""

    @property
    def nonzero(self) -> int:
        """How many finite numbers are not 0."""
        return self.elements - self.zeros - self.nan - self.inf

    @classmethod
    def from_row(
        cls,
        kind: Kind,
        name: str,
        dtype: torch.dtype,
        row: Sequence[float],
        scale: float = 1.0,
    ) -> Self:
        """Read a row of counts of numbers that were multiplied by a loss scale.

        One that is no power of two moves the exponents by the nearest one.
        """
        shift = round(-math.log2(scale))
        raw = {e: int(n) for e, n in enumerate(row[FIRST : FIRST + MOST - LEAST + 1], LEAST) if n}
        zeros, nan, inf = int(row[ZEROS]), int(row[NOT_A_NUMBER]), int(row[INFINITE])
        finite = zeros + sum(raw.values())
        return cls(
            kind=kind,
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            elements=finite + nan + inf,
            absmax=row[LARGEST] / scale,
            # an fp64 square may overflow, and the mean is at most the maximum
            rms=min(math.sqrt(row[SQUARES] / max(finite, 1)), row[LARGEST]) / scale,
            zeros=zeros,
            nan=nan,
            inf=inf,
            exponents={e + shift: count for e, count in raw.items()},
        )


# Counting them as they are made in a step.

_Key = tuple[Kind, str, torch.dtype, torch.device]


class Collector:
    """The counts of one step; hooks are attached by making it, and removed by :meth:`close`.

    Each module's outputs are counted after its forward, and the gradients with respect to them when
    backward has them complete. Counts stay on the device until :meth:`read`.

    Not counted: a forward without gradients outside of one with them, such as an evaluation or a
    teacher; a forward that activation checkpointing repeats in backward; a tensor that a module
    passes on as it got it from a module inside; what runs inside of ``torch.func``, as ``vmap``,
    where tensors have no memory, or as a scripted module.
    """

    def __init__(self, model: nn.Module, scale: Callable[[], float]) -> None:
        """Attach hooks to every module.

        Args:
            model: The model, whose modules' names are those of the tensors.
            scale: Tells the loss scale of the backward that is running; asked once.
        """
        self._ask, self._scale = scale, 0.0
        self._rows: dict[_Key, Tensor] = {}
        self._scales: dict[_Key, float] = {}
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

    def gradient(self, name: str, gradient: Tensor, scale: float) -> None:
        """Count a parameter's finished gradient."""
        self.add("gradient", name, gradient, scale)

    def before(self, name: str, weight: Tensor) -> None:
        """Count a weight before the update."""
        self.add("weight", name, weight)

    def after(self, name: str, weight: Tensor) -> None:
        """Leave the update to :class:`halfstep.LayerHealth`."""

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
        key = (kind, name, x.dtype, x.device)
        if key not in self._rows:
            self._rows[key] = torch.zeros(ROW, dtype=torch.float64, device=x.device)
        self._scales[key] = scale if 0 < scale < math.inf else 1.0
        count_into_(self._rows[key], x)

    @property
    def scale(self) -> float:
        """The loss scale of the step's backward."""
        return self._scale or self._ask()

    @property
    def empty(self) -> bool:
        """Whether nothing has been counted."""
        return not self._rows

    def read(self) -> list[TensorStatistics]:
        """Copy the counts to the host, in one transfer, in the order of their first numbers."""
        first = next(iter(self._rows.values()))
        rows = torch.stack([row.to(first.device) for row in self._rows.values()]).tolist()
        return [
            TensorStatistics.from_row(*key[:3], row, self._scales[key])
            for key, row in zip(self._rows, rows, strict=True)
        ]

    def _ended(self, call: Call, output: Any) -> None:
        """Count a module's outputs, and wait for the gradients with respect to them."""
        for i, tensor in enumerate(tensors_in(output)):
            evaluated = not call.learns and not tensor.requires_grad
            if not evaluated and not is_functorch_wrapped_tensor(tensor):
                name = f"{call.name or call.class_name}{f'[{i}]' if i else ''}"
                self._output(name, tensor, call.learns)

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
