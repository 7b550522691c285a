"""The report of the first NaN or infinity: one operation in full detail, its class and remedy.

:func:`cause_class` names what went wrong where the operation's own facts decide it, and
:func:`remedy_of` what to do about it in the format at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from halfstep.diagnostics.nonfinite.operations import MATMULS, SUMS, Kind, Operation
from halfstep.precision.policy.policy import dtype_name
from halfstep.precision.recovery import GO_BACK

REMEDIES = {
    "weight not finite": GO_BACK,
    "buffer not finite": (
        "reset the buffer, as by module.reset_running_stats(), or load it from a checkpoint"
    ),
    "data not finite": (
        "leave these rows out of the data, those where not torch.isfinite(x).all(), or mend what "
        "made them"
    ),
    "not finite outside the batch": (
        "look where it was made: the batch is finite, and no operation in sight made it, as where "
        "NumPy or another thread did, or it is data that the batch does not hold"
    ),
    "literal not finite": "replace the literal by a finite one, such as torch.finfo(x.dtype).max",
    "unwritten memory": "write it before it is read: torch.zeros(...), not torch.empty(...)",
    "overflow in attention scores": (
        "scale before the matmul, q = q * head_dim ** -0.5, or normalise q and k"
    ),
    "overflow in a matmul": "scale an operand down before the matmul",
    "overflow in a sum": (
        "add in fp32: x.float() + y.float(), x.float().sum(); or scale down what is added"
    ),
    "overflow in a cast": (
        "clamp before the cast, x.clamp(-m, m).to(dtype) with m = torch.finfo(dtype).max, or keep "
        "the tensor in fp32"
    ),
    "overflow of a mask": (
        "add the mask once, and make it boolean or use torch.finfo(dtype).min / 4, of which two "
        "are not -inf"
    ),
    "overflow in the backward": (
        "a lower loss scale cures it where a scale made it; otherwise scale the loss down, or "
        "clamp what this operation reads"
    ),
    "overflow": "clamp the operand, or compute this operation in fp32: x.float()",
    "own autograd.Function": "check its backward by torch.autograd.gradcheck in fp64",
    "fully masked row": (
        "let every row see one key at least, or clear it: scores.masked_fill(mask.all(-1, True), 0)"
    ),
    "log or division of zero": "keep what it reads off its pole, as by x + eps",
    "invalid operation": "keep what it reads in its domain, as by x.clamp(least, most)",
    "inf - inf": (
        "use a large finite number in place of the infinity, such as torch.finfo(dtype).min / 4"
    ),
    "infinity of a mask": (
        "the loss or a gradient reads it: leave what is masked out of them, or mask by a finite "
        "number, such as -1e4"
    ),
    "every target is ignored": (
        "leave out batches whose every target is ignore_index or has weight 0, or divide a sum: "
        "F.cross_entropy(..., reduction='sum') / count.clamp_min(1)"
    ),
    "eps too small": (
        "raise the optimizer's eps, torch.finfo(dtype).tiny at least: the update divides by 0"
    ),
}
"""A class of causes to what to do about it; overflows as in fp16, whose range fp32 exceeds."""

_ROWS = [
    ("acos asin atanh erfinv",
     "keep the operand off -1 and 1, and within: x.clamp(eps - 1, 1 - eps)"),
    ("acosh", "keep the operand above 1: x.clamp_min(1 + eps).acosh()"),
    ("logit special_ndtri", "keep the operand off 0 and 1, and within: x.clamp(eps, 1 - eps)"),
    # eps, not 0: at 0 the gradient of a root is infinite
    ("sqrt", "keep the operand of the root above zero: x.clamp_min(eps).sqrt(), (x + eps).sqrt()"),
    ("pow rsqrt lgamma digamma polygamma", "keep the operand above zero: x.clamp_min(eps)"),
    ("mean var std var_mean std_mean nll_loss_forward",
     "leave out what is empty, and give a variance of one element correction=0"),
    ("log log2 log10 xlogy",
     "keep the operand of the logarithm above its pole: x.clamp_min(eps).log()"),
    ("log1p special_xlog1py",
     "keep the operand of the logarithm above its pole, -1: x.clamp_min(eps - 1).log1p()"),
    ("_ctc_loss", "leave out inputs too short for their targets, or set zero_infinity=True"),
    ("_linalg_slogdet", "the matrix is singular: add eps * torch.eye(n) to it"),
    ("_linalg_svd _linalg_eigh linalg_eig",
     "the gradient of the vectors divides by differences of singular values or eigenvalues, and "
     "some are equal: add noise, x + eps * torch.randn_like(x), or use the values alone"),
    ("native_layer_norm native_batch_norm native_group_norm cudnn_batch_norm _fused_rms_norm",
     "raise the normalisation's eps, as to 1e-5: it divides by the root of variance + eps, which "
     "is not above 0"),
    ("_weight_norm_interface", "a row of the weight's direction is 0: initialise it off zero"),
    ("bmm baddbmm",
     "scale an operand down before the matmul (attention scores: q = q * head_dim ** -0.5)"),
    ("div reciprocal remainder fmod",
     "divide by what is not 0: y / (x + eps), total / count.clamp_min(1)"),
]  # fmt: skip
OF_OPERATION = {name: text for names, text in _ROWS for name in names.split()}
"""An operation to what to do at its pole, outside of its domain, or where it overflows."""

Role = Literal["", "parameter", "buffer", "unwritten", "number"]


def cause_class(
    kind: Kind, known: Operation, operands: Sequence[Operand], *, backward: bool, zero_divisor: bool
) -> str:
    """The class of a cause, a key of :data:`REMEDIES`, by what its operation is and has read."""
    if kind == "not finite in the input data":
        roles = [operand.role for operand in operands if operand.nan or operand.inf]
        return next((name for role, name in _OF_ROLE.items() if role in roles), "data not finite")
    if zero_divisor and known.base.endswith("addcdiv"):
        return "eps too small"
    if kind == "0 / 0 or invalid":
        if known.base.startswith("_fused_adam"):
            return "eps too small"
        # a mean over the targets' weights; where there is no target, it has no operand
        if known.base.startswith("nll_loss") and "self" in [o.name for o in operands]:
            return "every target is ignored"
        return "log or division of zero" if backward and zero_divisor else "invalid operation"
    if kind != "overflow":
        return _OF_KIND[kind]
    if backward:
        return "overflow in the backward"
    if known.base in ("_to_copy", "copy", "to"):
        return "overflow in a cast"
    if known.attention or known.base in MATMULS:
        return f"overflow in {'attention scores' if known.attention else 'a matmul'}"
    tensors = sum(operand.dtype is not None for operand in operands)
    added = known.base in SUMS or (known.base in ("add", "sub") and tensors == 2)
    return "overflow in a sum" if added else "overflow"


_OF_ROLE = {
    "parameter": "weight not finite",
    "buffer": "buffer not finite",
    "unwritten": "unwritten memory",
    "number": "literal not finite",
}
_OF_KIND = {
    "fully masked row": "fully masked row",
    "inf - inf or 0 * inf": "inf - inf",
    "x / 0 or log 0": "log or division of zero",
    "infinity that is meant": "infinity of a mask",
}


def remedy_of(
    name: str, form: str, base: str = "", largest: Operand | None = None, *, fits: bool = False
) -> str:
    """What to do about a class of causes in a format such as ``"fp16"``: the line to change.

    ``base`` is the operation's name, such as ``"exp"``, and ``largest`` its largest input;
    ``fits``: in fp32 the batch has been run, and is finite.
    """
    text, narrow = REMEDIES[name], form == "fp16"
    if name in ("log or division of zero", "invalid operation", "overflow in a matmul"):
        text = OF_OPERATION.get(base, text)
        if form.startswith("complex") and "clamp_min(eps)" in text:  # which torch cannot
            text = REMEDIES["log or division of zero"]
    if not name.startswith("overflow") or name == "overflow of a mask":
        return text
    size = f"{largest.name} is up to {short(largest.largest)}" if largest else "its operand"
    if largest and largest.role == "parameter" and name != "overflow in the backward":
        text = f"reload or shrink the weight: {size}"
    elif base in ("exp", "expm1"):
        bound = {"fp16": 11.09, "fp64": 709.7}.get(form, 88.7)
        text = f"clamp the argument: x.clamp(max={bound})"
    elif not narrow and name == "overflow in the backward":
        text = f"scale the loss down, or clamp what this operation reads: {size}"
    elif not narrow and name not in ("overflow in a cast", "overflow in attention scores"):
        text = f"clamp or scale down what it reads: {size}"
    return f"{text}; or train in bf16-mixed, whose range is that of fp32" if fits else text


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
        source: File and line that called the operation; in the backward, those of the forward that
            made the autograd node, or of an ``autograd.Function`` written in Python.
        cause_class: What went wrong, such as ``"overflow in attention scores"``: a class with one
            remedy.
        samples: The rows of the batch, from 0, that make it: each of them does so alone, and the
            rest of the batch is finite. Empty where that is not so, or was not tried.
        micro_batch: Number of the micro-batch in which it happened, from 1; 0: not known.
        micro_batches: Number of micro-batches of the step; 0: not known.
        fits_fp32: Whether the batch was run in fp32, too, and is finite there.
        slower: What to do where the loss had left its past before this step; else empty.
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
    samples: tuple[int, ...] = ()
    micro_batch: int = 0
    micro_batches: int = 0
    fits_fp32: bool = False
    slower: str = ""

    @property
    def diverged(self) -> bool:
        """Whether the loss had left its past, for which no sample is to blame, by its weights."""
        of_weights = "overflow", "weight not finite", "log or div", "invalid operation", "inf - inf"
        return bool(self.slower) and self.cause_class.startswith(of_weights)

    @property
    def remedy(self) -> str:
        """What to do about it: the line to change, or the setting."""
        if self.diverged:
            return self.slower
        largest = max(self.inputs, key=lambda operand: operand.largest, default=None)
        base = self.op.split(".")[1].rstrip("_") if "." in self.op else self.op
        base = base.removeprefix("_foreach_")
        forward = self.node.partition("Backward")[0].lower()  # "SqrtBackward0" is that of sqrt
        base = next((name for name in OF_OPERATION if name.replace("_", "") == forward), base)
        form, fits = dtype_name(self.dtype), self.fits_fp32
        text = remedy_of(self.cause_class, form, base, largest, fits=fits)
        named = self.cause_class == "data not finite" and self.samples
        return f"{text}: {self._where()[0]}" if named else text

    def _where(self) -> list[str]:
        """Which samples, and which micro-batch, as words."""
        numbers = ", ".join(map(str, self.samples))
        of = f"sample{'s' * (len(self.samples) > 1)} {numbers}" if self.samples else ""
        micro = f"micro-batch {self.micro_batch} of {self.micro_batches}"
        return list(filter(None, [of, micro if self.micro_batches > 1 else ""]))

    @property
    def summary(self) -> str:
        """The cause in one line: class, operation, place, largest input, line and samples."""
        line = self._operation(self.cause_class)
        largest = max((operand.largest for operand in self.inputs), default=0.0)
        if self.kind == "overflow":
            line += f", inputs up to {short(largest)}{self._share_of(largest)}"
        line += f", at {self.source}" if self.source else ""
        return "; ".join([line, *self._where()])

    def _operation(self, what: str) -> str:
        where = f"{self.direction} of {self.module or 'the model'} ({self.class_name})"
        where = where if self.class_name else "outside the model's modules"
        where = f"{where}, {self.node}" if self.node else where
        return f"{what}: {self.op} in {dtype_name(self.dtype)}, {where}"

    def _share_of(self, value: float) -> str:
        """How much of the format's range a value takes, where that is worth a word."""
        most = torch.finfo(self.dtype).max
        share = 100 * value / most
        return f" ({share:.3g} % of {short(most)})" if share >= 0.01 else ""

    def to_json(self) -> dict[str, Any]:
        """The cause as values that ``json.dumps`` writes: dtypes by name."""
        table = asdict(self)
        table["dtype"] = dtype_name(self.dtype)
        for operand in table["inputs"]:
            operand["dtype"] = dtype_name(operand["dtype"]) if operand["dtype"] else None
        return {**table, "slower": self.slower * self.diverged, "remedy": self.remedy}

    def __str__(self) -> str:
        lines = [
            self._operation(self.kind),
            f"output: {self.inf:,} inf and {self.nan:,} NaN of {self.elements:,} elements "
            f"({100 * (self.nan + self.inf) / self.elements:.3g} %)",
            *map(self._input, self.inputs),
        ]
        lines += self._where()
        lines += [f"at {self.source}"] if self.source else []
        what = "" if self.cause_class == self.kind else f"{self.cause_class}: "
        return "\n  ".join([*lines, f"to do: {what}{self.remedy}"])

    def _input(self, operand: Operand) -> str:
        """An input's range, and what in it is not finite."""
        form = f"{dtype_name(operand.dtype)} up to " if operand.dtype else ""
        line = f"input {operand.name}: {form}{short(operand.largest)}"
        line += self._share_of(operand.largest)
        if operand.inf or operand.nan:
            line = f"{line}, and {operand.inf:,} inf, {operand.nan:,} NaN"
        return line


def short(value: float) -> str:
    """A number with three digits; fp16's largest in full."""
    return "65504" if value == 65504 else f"{value:.3g}"
