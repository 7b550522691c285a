"""The report of the first NaN or infinity: one operation in full detail, and its remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from halfstep.diagnostics.nonfinite.remedies import REMEDIES, Change, Kind, Role
from halfstep.precision.policy.policy import dtype_name
from halfstep.shown import as_html

_SIGNS = {"add": "+", "sub": "+", "mul": "*"}  # |a - b| is |a| + |b| at most


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of the reported operation.

    Attributes:
        name: The argument's name, and the parameter's or buffer's if it is one.
        dtype: The dtype of a tensor; None for a Python number.
        largest: The largest finite absolute value; 0 if there is none.
        nan: Number of NaN.
        inf: Number of infinities.
        role: ``"parameter"``, ``"buffer"``, ``"number"``, ``"unwritten"`` (memory of torch.empty),
            or empty.
    """

    name: str
    dtype: torch.dtype | None
    largest: float
    nan: int
    inf: int
    role: Role = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """The first operation whose output was not finite, for no fault of its inputs.

    Attributes:
        kind: What happened: ``"overflow"`` is an infinity from finite inputs that no pole explains;
            ``"not finite in the input data"`` means that the operation is only the first to read
            values from outside: data, weights, a literal, or uninitialised memory.
        op: The operation's name, such as ``"aten.add.Tensor"``.
        module: Qualified name of the innermost module in whose forward the operation ran, or, in
            the backward, in whose forward its autograd node was made; "" for the model itself.
        class_name: The module's class; "" outside of all modules.
        block: Qualified name of the item of a ``ModuleList`` (else of a ``Sequential``) that the
            module is, or is in; "" if there is none.
        direction: ``"forward"`` or ``"backward"``; recomputation by checkpointing is forward.
        dtype: The dtype of the output.
        nan: Number of NaN in the output.
        inf: Number of infinities in the output.
        elements: Number of elements of the output.
        inputs: The operation's inputs.
        node: The autograd node, in the backward.
        source: File and line that called the operation: in the forward, and in the backward of an
            ``autograd.Function`` written in Python.
        cause_class: What went wrong, such as ``"overflow in attention scores"``: a class with one
            remedy.
        shape: Shape of the output that is not finite.
        rows: Indices, along its first dim, of the rows that are not finite; 16 at most.
        gain: The median over the model's matrices of rms * sqrt(fan in), of the order of 1 in
            healthy models; 0 if it has none.
        micro_batch: Number of the micro-batch in which it happened, from 1; 0: not known.
        micro_batches: Number of micro-batches of the step; 0: not known.
        samples: The rows of that micro-batch that make the NaN, from 0; empty if not known, or if
            it is none of them in particular.
        rank: The process that met it; 0 if there is one only.
        ranks: Number of processes of the run.
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
    cause_class: str = "overflow"
    shape: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    gain: float = 0.0
    micro_batch: int = 0
    micro_batches: int = 0
    samples: tuple[int, ...] = ()
    rank: int = 0
    ranks: int = 1

    @property
    def remedy(self) -> str:
        """What to do about it: the line to change, or the setting."""
        text, change = REMEDIES[self.cause_class]
        if change == "range" and self.dtype == torch.float16:
            text += "; or train in bf16-mixed, whose range is that of fp32"
        return text

    @property
    def change(self) -> Change:
        """What a run can change without a change of code: ``"range"``, ``"rate"``, ``"data"``."""
        change = REMEDIES[self.cause_class].change
        return "" if change == "range" and self.dtype != torch.float16 else change

    @property
    def place(self) -> str:
        """Direction, module, block and node, as words."""
        where = f"{self.module or 'the model'} ({self.class_name})"
        where = f"{self.direction} of {where}" if self.class_name else "outside the model's modules"
        if self.block not in ("", self.module):
            where += f" in block {self.block}"
        return f"{where}, {self.node}" if self.node else where

    @property
    def coordinates(self) -> str:
        """Rank, micro-batch and sample, as far as known; empty if none of them is."""
        words = []
        if self.ranks > 1:
            words.append(f"rank {self.rank}")
        if self.micro_batches:
            words.append(f"micro-batch {self.micro_batch} of {self.micro_batches}")
        if self.samples:
            listed = ", ".join(map(str, self.samples))
            words.append(f"sample{'s' if len(self.samples) > 1 else ''} {listed}")
        return ", ".join(words)

    @property
    def summary(self) -> str:
        """The cause in one line: class, operation, place, largest input and source line."""
        form = dtype_name(self.dtype)
        line = f"{self.cause_class}: {self.op} in {form}, {self.place}"
        largest = max((operand.largest for operand in self.inputs), default=0.0)
        if self.kind == "overflow":
            maximum = torch.finfo(self.dtype).max
            part = f"{100 * largest / maximum:.3g} % of {short(maximum)}"
            line += f", inputs up to {short(largest)} ({part})"
        line += "".join(f", {o.name}" for o in self.inputs if o.role == "parameter" and o.nan)
        line += f", at {self.source}" if self.source else ""
        return f"{line}; {self.coordinates}" if self.coordinates else line

    def to_json(self) -> dict[str, Any]:
        """The cause as values that ``json.dumps`` writes: dtypes by name."""
        table = asdict(self)
        table["dtype"] = dtype_name(self.dtype)
        for operand in table["inputs"]:
            operand["dtype"] = dtype_name(operand["dtype"]) if operand["dtype"] else None
        table["share_of_format"] = {
            o.name: o.largest / torch.finfo(self.dtype).max for o in self.inputs
        }
        return {**table, "remedy": self.remedy}

    @property
    def share(self) -> float:
        """The share of the output's elements that are not finite."""
        return (self.nan + self.inf) / self.elements

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def __str__(self) -> str:
        maximum = torch.finfo(self.dtype).max
        lines = [
            f"{self.kind}: {self.op} in {dtype_name(self.dtype)}, {self.place}",
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
        lines += [self.coordinates] if self.coordinates else []
        lines += [f"at {self.source}"] if self.source else []
        named = "" if self.cause_class == self.kind else f"{self.cause_class}: "
        return "\n  ".join([*lines, f"to do: {named}{self.remedy}"])

    def _bound(self, maximum: float) -> list[str]:
        """The sum or product that overflows, as text, if the operation is that simple."""
        sign = _SIGNS.get(self.op.split(".")[1].rstrip("_"))
        if self.kind != "overflow" or sign is None or len(self.inputs) != 2:
            return []
        a, b = (operand.largest for operand in self.inputs)
        fits = (a + b if sign == "+" else a * b) <= maximum
        return [] if fits else [f"{short(a)} {sign} {short(b)} > {short(maximum)}"]


def short(value: float) -> str:
    """A number with three digits, as ``4.10e4``; integers below 1000, and 65504, in full."""
    if value == int(value) and abs(value) < 1e5 and (value < 1e3 or value == 65504):
        return str(int(value))
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits}e{int(exponent)}"


def block_of(model: nn.Module, name: str) -> str:
    """The innermost item of a ``ModuleList`` (else ``Sequential``) that is or holds a module.

    Items of a ``Sequential`` without children, as in an MLP, do not count as blocks.
    """
    parts = name.split(".") if name else []
    for container in (nn.ModuleList, nn.Sequential):
        for end in range(len(parts), 0, -1):
            found = ".".join(parts[:end])
            leaf = container is nn.Sequential and not any(model.get_submodule(found).children())
            if not leaf and isinstance(model.get_submodule(".".join(parts[: end - 1])), container):
                return found
    return ""
