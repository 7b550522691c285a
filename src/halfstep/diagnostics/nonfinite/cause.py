"""The report of the first NaN or infinity: one operation in full detail, its class and remedy.

:data:`REMEDIES` has all classes and what to do about them; :func:`cause_class` chooses one by the
facts that the trace has about the operation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from halfstep.precision.policy.policy import dtype_name

REMEDIES = {
    "weights diverged": (
        "lower the learning rate, lengthen the warm-up, or clip gradients (max_norm=1.0) where "
        "nothing does yet"
    ),
    "weight not finite": (
        "go back to a checkpoint whose weights are finite; what wrote it (an update at too high a "
        "learning rate, an initialisation, a cast) ran before this step"
    ),
    "buffer not finite": (
        "reset the buffer, as by module.reset_running_stats(), or load it from a checkpoint; an "
        "earlier forward wrote it"
    ),
    "data not finite": (
        "clean the data: x = torch.nan_to_num(x), or leave out rows where not "
        "torch.isfinite(x).all()"
    ),
    "literal not finite": "replace the literal by a finite one, such as torch.finfo(x.dtype).max",
    "unwritten memory": (
        "write the tensor before it is read: torch.zeros(...) in place of torch.empty(...)"
    ),
    "overflow in attention scores": (
        "scale before the product, q = q * head_dim ** -0.5, or normalise q and k; or call "
        "F.scaled_dot_product_attention, which keeps the scores in fp32"
    ),
    "overflow in a residual sum": (
        "keep the residual stream in fp32, x = x.float() + branch(x).float(), or scale the branch "
        "down at its initialisation"
    ),
    "overflow in a product": (
        "scale the layer's input or weight down, or compute this layer in fp32: with "
        "torch.autocast(x.device.type, enabled=False): y = layer(x.float())"
    ),
    "overflow in the loss": (
        "compute the loss in fp32, loss_fn(logits.float(), targets), and sum before dividing by "
        "counts only where the sum fits"
    ),
    "overflow in a cast": (
        "clamp before the cast, x.clamp(-m, m).to(dtype) with m = torch.finfo(dtype).max, or keep "
        "the tensor in fp32"
    ),
    "overflow of a mask": (
        "add the mask once, and make it boolean or use torch.finfo(dtype).min / 4: two times "
        "torch.finfo(dtype).min is -inf, and a row of -inf alone has no softmax"
    ),
    "overflow in the backward": (
        "a lower loss scale cures it where a scale made it; otherwise scale the loss down or "
        "clamp what this operation divides by, and check its inputs' range"
    ),
    "overflow": "clamp the operand, or compute this operation in fp32: x.float()",
    "own autograd.Function": (
        "check its backward by torch.autograd.gradcheck in fp64, and decorate forward and "
        "backward with torch.amp.custom_fwd(cast_inputs=torch.float32) and torch.amp.custom_bwd"
    ),
    "fully masked row": (
        "let every row see one key at least, or clear such rows: scores.masked_fill(mask.all(-1, "
        "keepdim=True), 0)"
    ),
    "log or division of zero": (
        "keep the operand above zero: x.clamp_min(eps).log(), y / (x + eps); in a backward (x + "
        "eps).sqrt() and x.norm() of a row that is not 0"
    ),
    "invalid operation": (
        "keep the operand in the function's domain: x.clamp_min(0).sqrt(), and no mean of nothing "
        "or 0 / 0"
    ),
    "inf - inf": (
        "the infinity was allowed when it was made: use a large finite number there, such as "
        "torch.finfo(dtype).min / 4, or x.masked_fill(...) after this operation"
    ),
}
"""A class of causes to what to do about it."""

Kind = Literal[
    "overflow",
    "x / 0 or log 0",
    "inf - inf or 0 * inf",
    "0 / 0 or invalid",
    "fully masked row",
    "not finite in the input data",
]
Role = Literal["", "parameter", "buffer", "unwritten", "number"]
Change = Literal["", "range", "rate", "data"]


CHANGES: Mapping[str, Change] = {
    "weights diverged": "rate",
    "data not finite": "data",
    **dict.fromkeys(
        (
            "overflow in attention scores",
            "overflow in a residual sum",
            "overflow in a product",
            "overflow in the loss",
            "overflow in a cast",
            "overflow in the backward",
            "overflow",
        ),
        "range",
    ),
}
"""Class of a cause to what a run can change without a change of code: a policy with more range, the
learning rate, or leaving out the batch."""


def remedy_of(name: str, form: str) -> str:
    """What to do about a class of causes in a format: the line to change, or the setting."""
    text = REMEDIES[name]
    wider = CHANGES.get(name) == "range" and form == "fp16"
    return f"{text}; or train in bf16-mixed, whose range is that of fp32" if wider else text


_BIG_GAIN = 10.0
"""The median gain (rms * sqrt(fan in)) of matrices above which a model's weights have diverged: at
a usual initialisation, and in trained models, it is of the order of 1."""
_LOSS = re.compile(r"loss|entropy|criterion", re.IGNORECASE)
_POLE = re.compile(r"(Log|Sqrt|Rsqrt|Div|Reciprocal|Pow|Norm|LinalgVectorNorm|Dist|Cdist)\w*?Back")
_ATTENTION = re.compile(r"att(ention|n)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the trace knows of the operation that made the first NaN or infinity."""

    kind: Kind
    base: str  # the operation's name without namespace and overload, such as "add"
    product: bool  # whether it is a matmul, a convolution or a sum
    attention: bool  # whether it is a whole attention
    node: str | None  # the autograd node that runs it; None in the forward
    own: bool  # whether it ran in an autograd.Function of the user
    module: str
    class_name: str
    called_by: str  # file and function that called it
    dims: int  # number of dimensions of the output
    roles: Sequence[Role]  # of the operands that are not finite
    tensors: int  # number of operands that are tensors
    mask: bool  # whether infinities came from a mask that no longer fitted
    gain: float  # the median gain of the model's matrices
    after: bool  # whether a module's forward has ended before


def cause_class(facts: Facts) -> str:
    """The class of a cause, a key of :data:`REMEDIES`."""
    if facts.kind == "not finite in the input data":
        return _of_input(facts)
    if facts.mask:
        return "overflow of a mask"
    if facts.kind == "fully masked row":
        return "fully masked row"
    if facts.gain > _BIG_GAIN:
        return "weights diverged"
    if facts.own:
        return "own autograd.Function"
    if facts.kind == "0 / 0 or invalid" and _POLE.match(facts.node or ""):
        return "log or division of zero"
    others = {
        "x / 0 or log 0": "log or division of zero",
        "0 / 0 or invalid": "invalid operation",
        "inf - inf or 0 * inf": "inf - inf",
    }
    return others.get(facts.kind) or _of_overflow(facts)


def _of_input(facts: Facts) -> str:
    roles = {
        "parameter": "weight not finite",
        "buffer": "buffer not finite",
        "unwritten": "unwritten memory",
        "number": "literal not finite",
    }
    for role, name in roles.items():
        if role in facts.roles:
            return name
    return "own autograd.Function" if facts.own else "data not finite"


def _of_overflow(facts: Facts) -> str:
    if facts.node is not None:
        return "overflow in the backward"
    inside = bool(facts.module)
    if _LOSS.search(facts.base) or (not inside and _LOSS.search(facts.called_by)):
        return "overflow in the loss"
    outside = not facts.class_name and (facts.after or facts.dims == 0)
    if outside or _LOSS.search(facts.class_name):
        return "overflow in the loss"
    in_attention = bool(_ATTENTION.search(f"{facts.module}.{facts.class_name}"))
    scores = facts.base in ("bmm", "baddbmm", "matmul", "einsum")
    added = facts.base in ("add", "mul", "div") and facts.dims >= 4
    if facts.attention or (in_attention and (scores or added)):
        return "overflow in attention scores"
    if facts.base in ("_to_copy", "copy", "to"):
        return "overflow in a cast"
    if facts.base in ("add", "sub") and facts.tensors == 2:
        return "overflow in a residual sum"
    return "overflow in a product" if facts.product else "overflow"


# The report of one operation.


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
        gain: The median over the model's matrices of rms * sqrt(fan in), of the order of 1 in
            healthy models; 0 if it has none.
        micro_batch: Number of the micro-batch in which it happened, from 1; 0: not known.
        micro_batches: Number of micro-batches of the step; 0: not known.
    """

    kind: Kind
    op: str
    module: str
    class_name: str
    direction: Literal["forward", "backward"]
    dtype: torch.dtype
    nan: int
    inf: int
    elements: int
    inputs: tuple[Operand, ...]
    node: str = ""
    source: str = ""
    cause_class: str = "overflow"
    gain: float = 0.0
    micro_batch: int = 0
    micro_batches: int = 0

    @property
    def remedy(self) -> str:
        """What to do about it: the line to change, or the setting."""
        return remedy_of(self.cause_class, dtype_name(self.dtype))

    @property
    def change(self) -> Change:
        """What a run can change without a change of code: ``"range"``, ``"rate"``, ``"data"``."""
        change = CHANGES.get(self.cause_class, "")
        return "" if change == "range" and self.dtype != torch.float16 else change

    @property
    def place(self) -> str:
        """Direction, module and node, as words."""
        where = f"{self.direction} of {self.module or 'the model'} ({self.class_name})"
        where = where if self.class_name else "outside the model's modules"
        return f"{where}, {self.node}" if self.node else where

    def _micro_batch(self) -> str:
        if not self.micro_batches:
            return ""
        return f"micro-batch {self.micro_batch} of {self.micro_batches}"

    @property
    def summary(self) -> str:
        """The cause in one line: class, operation, place, largest input and source line."""
        line = self._operation(self.cause_class)
        largest = max((operand.largest for operand in self.inputs), default=0.0)
        if self.kind == "overflow":
            line += f", inputs up to {short(largest)} ({self._share_of(largest)})"
        for operand in self.inputs:
            if operand.role == "parameter" and operand.nan:
                line += f", {operand.name}"
        line += f", at {self.source}" if self.source else ""
        where = self._micro_batch()
        return line + f"; {where}" if where else line

    def _operation(self, what: str) -> str:
        form = dtype_name(self.dtype)
        return f"{what}: {self.op} in {form}, {self.place}"

    def _share_of(self, value: float) -> str:
        """How much of the format's range a value takes."""
        most = torch.finfo(self.dtype).max
        return f"{100 * value / most:.3g} % of {short(most)}"

    def to_json(self) -> dict[str, Any]:
        """The cause as values that ``json.dumps`` writes: dtypes by name."""
        table = asdict(self)
        table["dtype"] = dtype_name(self.dtype)
        for operand in table["inputs"]:
            operand["dtype"] = dtype_name(operand["dtype"]) if operand["dtype"] else None
        return {**table, "remedy": self.remedy}

    def __str__(self) -> str:
        lines = [
            self._operation(self.kind),
            f"output: {self.inf:,} inf and {self.nan:,} NaN of {self.elements:,} elements "
            f"({100 * (self.nan + self.inf) / self.elements:.3g} %)",
            *map(self._input, self.inputs),
        ]
        where = self._micro_batch()
        lines += [where] if where else []
        lines += [f"at {self.source}"] if self.source else []
        what = "" if self.cause_class == self.kind else f"{self.cause_class}: "
        return "\n  ".join([*lines, f"to do: {what}{self.remedy}"])

    def _input(self, operand: Operand) -> str:
        """An input's range, and what in it is not finite."""
        form = f"{dtype_name(operand.dtype)} up to " if operand.dtype else ""
        share = self._share_of(operand.largest)
        line = f"input {operand.name}: {form}{short(operand.largest)} ({share})"
        if operand.inf or operand.nan:
            line = f"{line}, and {operand.inf:,} inf, {operand.nan:,} NaN"
        return line


def short(value: float) -> str:
    """A number with three digits, as ``4.10e4``; integers below 1000, and 65504, in full."""
    if value == int(value) and abs(value) < 1e5 and (value < 1e3 or value == 65504):
        return str(int(value))
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits}e{int(exponent)}"
