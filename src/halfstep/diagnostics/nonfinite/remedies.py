"""The classes of causes of a NaN or an infinity, and what to do about each.

:data:`REMEDIES` is the only table: a class is one of its keys, and :func:`cause_class` chooses the
key from the facts that the trace has about the operation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Remedy(NamedTuple):
    """What to do about one class of causes."""

    text: str
    """The line to change."""
    change: Change = ""
    """What a run can change without a change of code: a policy with more range, the learning rate,
    or leaving out the batch."""


REMEDIES: Mapping[str, Remedy] = {
    "weights diverged": Remedy(
        "lower the learning rate, lengthen the warm-up, or clip: precision.step(max_norm=1.0)",
        "rate",
    ),
    "weight not finite": Remedy(
        "go back to a checkpoint whose weights are finite; what wrote it (an update at too high a "
        "learning rate, an initialisation, a cast) ran before this step",
        "rate",
    ),
    "buffer not finite": Remedy(
        "reset the buffer, as by module.reset_running_stats(), or load it from a checkpoint; an "
        "earlier forward wrote it"
    ),
    "data not finite": Remedy(
        "clean the data: x = torch.nan_to_num(x), or leave out rows where not "
        "torch.isfinite(x).all()",
        "data",
    ),
    "literal not finite": Remedy(
        "replace the literal by a finite one, such as torch.finfo(x.dtype).max"
    ),
    "unwritten memory": Remedy(
        "write the tensor before it is read: torch.zeros(...) in place of torch.empty(...)"
    ),
    "overflow in attention scores": Remedy(
        "scale before the product, q = q * head_dim ** -0.5, or normalise q and k; or call "
        "F.scaled_dot_product_attention, which keeps the scores in fp32",
        "range",
    ),
    "overflow in a residual sum": Remedy(
        "keep the residual stream in fp32, x = x.float() + branch(x).float(), or scale the branch "
        "down at its initialisation",
        "range",
    ),
    "overflow in a product": Remedy(
        "scale the layer's input or weight down, or compute this layer in fp32: with "
        "torch.autocast(x.device.type, enabled=False): y = layer(x.float())",
        "range",
    ),
    "overflow in the loss": Remedy(
        "compute the loss in fp32, loss_fn(logits.float(), targets), and sum before dividing by "
        "counts only where the sum fits",
        "range",
    ),
    "overflow in a cast": Remedy(
        "clamp before the cast, x.clamp(-m, m).to(dtype) with m = torch.finfo(dtype).max, or keep "
        "the tensor in fp32",
        "range",
    ),
    "overflow of a mask": Remedy(
        "add the mask once, and make it boolean or use halfstep.mask_value(dtype): two times "
        "torch.finfo(dtype).min is -inf, and a row of -inf alone has no softmax"
    ),
    "overflow in the backward": Remedy(
        "a lower loss scale cures it where a scale made it; otherwise scale the loss down or clamp "
        "what this operation divides by, and check its inputs' range",
        "range",
    ),
    "overflow": Remedy("clamp the operand, or compute this operation in fp32: x.float()", "range"),
    "own autograd.Function": Remedy(
        "check its backward by torch.autograd.gradcheck in fp64, and decorate forward and backward "
        "with torch.amp.custom_fwd(cast_inputs=torch.float32) and torch.amp.custom_bwd"
    ),
    "fully masked row": Remedy(
        "let every row see one key at least, or clear such rows: "
        "scores.masked_fill(mask.all(-1, keepdim=True), 0)"
    ),
    "log or division of zero": Remedy(
        "keep the operand above zero: x.clamp_min(eps).log(), y / (x + eps); in a backward "
        "(x + eps).sqrt() and x.norm() of a row that is not 0"
    ),
    "invalid operation": Remedy(
        "keep the operand in the function's domain: x.clamp_min(0).sqrt(), and no mean of nothing "
        "or 0 / 0"
    ),
    "inf - inf": Remedy(
        "the infinity was allowed when it was made: use a large finite number there, such as "
        "halfstep.mask_value(dtype), or x.masked_fill(...) after this operation"
    ),
}
"""Class of a cause to its remedy."""

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
