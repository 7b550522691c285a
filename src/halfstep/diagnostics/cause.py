"""What :func:`halfstep.trace_nonfinite` reports: one operation, told in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from halfstep.precision.policy import dtype_name

Kind = Literal[
    "overflow",
    "x / 0 or log 0",
    "inf - inf or 0 * inf",
    "0 / 0 or invalid",
    "fully masked row",
    "not finite in the input data",
]
_SIGNS = {"add": "+", "sub": "+", "mul": "*"}  # |a - b| is |a| + |b| at most


@dataclass(frozen=True, slots=True)
class Operand:
    """What went into an operation.

    Attributes:
        name: Of the argument, and of the parameter or buffer if it is one.
        dtype: None for a Python number.
        largest: The largest finite absolute value; 0 if there is none.
        nan: Number of NaN.
        inf: Number of infinities.
    """

    name: str
    dtype: torch.dtype | None
    largest: float
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class Cause:
    """The first operation whose output was not finite, for no fault of its inputs.

    Attributes:
        kind: What happened: ``"overflow"`` is an infinity from finite inputs that no pole explains;
            ``"not finite in the input data"`` means that the operation is only the first to read
            what came from outside: data, weights, a literal, or uninitialised memory.
        op: Such as ``"aten.add.Tensor"``.
        module: Qualified name of the innermost module in whose forward the operation ran, or, in
            the backward, in whose forward its autograd node was made; "" for the model itself.
        class_name: The module's class; "" outside of all modules.
        block: Qualified name of the item of a ``ModuleList`` (else of a ``Sequential``) that it is,
            or is in; "" if there is none.
        direction: ``"forward"`` also for what checkpointing computes again in the backward.
        dtype: Of the output.
        nan: Number of NaN in the output.
        inf: Number of infinities in it.
        elements: Its number of elements.
        inputs: What went in.
        node: The autograd node, in the backward.
        source: File and line that called the operation, in the forward.
    """

    kind: Kind
    op: str
    module: str
    class_name: str
    block: str
    direction: Literal["forward", "backward"]
    dtype: torch.dtype
    nan: int
    inf: int
    elements: int
    inputs: tuple[Operand, ...]
    node: str = ""
    source: str = ""

    @property
    def share(self) -> float:
        """Of the output, the share that is not finite."""
        return (self.nan + self.inf) / self.elements

    def __str__(self) -> str:
        maximum = torch.finfo(self.dtype).max
        where = f"{self.module or 'the model'} ({self.class_name})"
        where = f"{self.direction} of {where}" if self.class_name else "outside the model's modules"
        if self.block not in ("", self.module):
            where += f" in block {self.block}"
        if self.node:
            where += f", {self.node}"
        lines = [
            f"{self.kind}: {self.op} in {dtype_name(self.dtype)}, {where}",
            f"output: {self.inf:,} inf and {self.nan:,} NaN of {self.elements:,} elements "
            f"({100 * self.share:.3g} %)",
        ]
        for operand in self.inputs:
            form = f"{dtype_name(operand.dtype)} up to " if operand.dtype else ""
            part = f"{100 * operand.largest / maximum:.3g} % of {short(maximum)}"
            line = f"input {operand.name}: {form}{short(operand.largest)} ({part})"
            if operand.inf or operand.nan:
                line += f", and {operand.inf:,} inf, {operand.nan:,} NaN"
            lines.append(line)
        lines += self._bound(maximum)
        return "\n  ".join([*lines, f"at {self.source}"] if self.source else lines)

    def _bound(self, maximum: float) -> list[str]:
        """The sum or product that is too large, where the operation is as simple as that."""
        sign = _SIGNS.get(self.op.split(".")[1].rstrip("_"))
        if self.kind != "overflow" or sign is None or len(self.inputs) != 2:
            return []
        a, b = (operand.largest for operand in self.inputs)
        fits = (a + b if sign == "+" else a * b) <= maximum
        return [] if fits else [f"{short(a)} {sign} {short(b)} > {short(maximum)}"]


def short(value: float) -> str:
    """Three digits: ``4.10e4``; whole numbers below 100,000 in full, as 65504."""
    if value == int(value) and abs(value) < 1e5 and (value < 1e3 or value == 65504):
        return str(int(value))
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits}e{int(exponent)}"


def block_of(model: nn.Module, name: str) -> str:
    """The innermost item of a ``ModuleList`` that a module is or is in; else of a ``Sequential``.

    Args:
        model: The root.
        name: Qualified, of a module in it.

    Returns:
        Its qualified name. Items of a ``Sequential`` without children, as in an MLP, are no blocks.
    """
    parts = name.split(".") if name else []
    for container in (nn.ModuleList, nn.Sequential):
        for end in range(len(parts), 0, -1):
            found = ".".join(parts[:end])
            leaf = container is nn.Sequential and not any(model.get_submodule(found).children())
            if not leaf and isinstance(model.get_submodule(".".join(parts[: end - 1])), container):
                return found
    return ""
