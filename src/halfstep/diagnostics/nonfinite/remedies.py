"""The classes of causes of a NaN or an infinity, and what to do about each.

:data:`CHANGES` has all classes, and words.toml their names and remedies; :func:`cause_class`
chooses the class from the facts that the trace has about the operation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from halfstep.words import Phrase, Told

_told = Told("halfstep.diagnostics.nonfinite")

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
    "weight not finite": "rate",
    "buffer not finite": "",
    "data not finite": "data",
    "literal not finite": "",
    "unwritten memory": "",
    "overflow in attention scores": "range",
    "overflow in a residual sum": "range",
    "overflow in a product": "range",
    "overflow in the loss": "range",
    "overflow in a cast": "range",
    "overflow of a mask": "",
    "overflow in the backward": "range",
    "overflow": "range",
    "own autograd.Function": "",
    "fully masked row": "",
    "log or division of zero": "",
    "invalid operation": "",
    "inf - inf": "",
}
"""Class of a cause to what a run can change without a change of code: a policy with more range, the
learning rate, or leaving out the batch. words.toml has the line of code to change."""


def class_in_words(name: str) -> Phrase:
    """The name of a class of causes, in each language."""
    return _told.phrase(f"class {name}")


def remedy(name: str, form: str) -> Phrase:
    """What to do about a class of causes in a format: the line to change, or the setting."""
    text = _told.phrase(f"remedy {name}")
    wider = CHANGES[name] == "range" and form == "fp16"
    return _told.phrase("or_bf16", remedy=text) if wider else text


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
    base: str
    """The operation's name without namespace and overload, such as ``add``."""
    product: bool
    """Whether it is a matrix product, a convolution or a sum."""
    attention: bool
    """Whether it is a whole attention."""
    node: str | None
    """The autograd node that runs it; None in the forward."""
    own: bool
    """Whether it ran in an ``autograd.Function`` that is neither torch's nor halfstep's."""
    module: str
    class_name: str
    called_by: str
    """File and function that called it."""
    dims: int
    """Number of dimensions of the output."""
    roles: Sequence[Role]
    """Roles of the operands that are not finite."""
    tensors: int
    """Number of operands that are tensors."""
    mask: bool
    """Whether infinities came from a mask that no longer fitted."""
    gain: float
    """The median gain of the model's matrices."""
    after: bool
    """Whether a module's forward has ended before."""


def cause_class(facts: Facts) -> str:
    """The class of a cause, a key of :data:`CHANGES`."""
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
