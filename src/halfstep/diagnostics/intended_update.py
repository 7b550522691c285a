"""What an optimizer step would have done to some elements, had their weights been held in fp64.

The step is replayed on the sampled elements alone, on the CPU and afterwards, so it costs the loop
nothing: by the update rule itself for halfstep's optimizers, and by a second optimizer of the same
class for others. That is right for rules that treat every element by itself: most do.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from halfstep.diagnostics.sampling import Sample
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.moments import decode_elements
from halfstep.optim.state import stored_moment

# Every element by itself, as torch.optim documents them.
_ELEMENTWISE = frozenset(
    {optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
     optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD}
)  # fmt: skip
# Rows, columns, products of matrices or a history of whole gradients: a sample says nothing.
_WHOLE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
_PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


def is_own(optimizer: Optimizer) -> TypeGuard[LowPrecisionOptimizer]:
    """Whether it is one of halfstep's, whose rule can be called by itself."""
    return isinstance(optimizer, LowPrecisionOptimizer)


def why_unknown(kind: type[Optimizer], samples: Sequence[Sample]) -> str:
    """Why a class's updates cannot be replayed on single elements; empty if they can."""
    if kind.__name__ in _WHOLE or any(sample.whole for sample in samples):
        return f"{kind.__name__} does not update every element by itself"
    return ""


def is_documented(optimizer: Optimizer) -> bool:
    """Whether the replay is right by the optimizer's definition, not only by what is observed."""
    return type(optimizer) in _ELEMENTWISE or is_own(optimizer)


def intended_updates(
    optimizer: Optimizer, options: dict[str, Any], samples: Sequence[Sample], multiplier: float
) -> list[Tensor] | str:
    """Replay a step in fp64.

    Args:
        optimizer: Only its class is used.
        options: Its group's options at the step, all plain numbers.
        samples: Of that group, on the CPU.
        multiplier: What the step multiplies every gradient by.

    Returns:
        For each sample the change of its elements, fp64 of shape (k,); or why it is not known.
    """
    if is_own(optimizer) and options.get("maximize"):
        multiplier = -multiplier
    gradients = [sample.gradient.double() * multiplier for sample in samples]
    if is_own(optimizer):
        return _by_rule(optimizer, options, samples, gradients)
    reason = why_unknown(type(optimizer), samples)
    if reason:
        return reason
    try:
        return _by_twin(type(optimizer), options, samples, gradients)
    except Exception as error:  # somebody's class: anything may go wrong
        return f"replaying {type(optimizer).__name__} on single elements failed ({error})"


def plain(value: Any) -> Any:
    """A group's option without tensors: a learning rate may be one; synchronises then."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(plain(part) for part in value)
    return value


@torch.no_grad()
def _by_rule(
    optimizer: LowPrecisionOptimizer,
    options: dict[str, Any],
    samples: Sequence[Sample],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    changes = []
    for sample, gradient in zip(samples, gradients, strict=True):
        value = sample.value().double()
        first, second, constants = _before(optimizer.algorithm, options, sample)
        moved = optimizer.algorithm.move(value, gradient, first, second, constants)[0]
        changes.append(moved - value)
    return changes


def slowdowns(
    optimizer: Optimizer, options: dict[str, Any], samples: Sequence[Sample], multiplier: float
) -> list[Tensor]:
    """How many times smaller each update is than it would be with an fp32 second moment.

    Weight decay, which knows no moments, is left out on both sides.

    Args:
        optimizer: As for :func:`intended_updates`, like the other arguments.
        options: Its group's.
        samples: Of that group, on the CPU.
        multiplier: What the step multiplies every gradient by.

    Returns:
        For each sample fp64 of shape (k,); 1 where the second moment is kept in fp32, where there
        is none, and where the element does not move.
    """
    factors = []
    for sample in samples:
        factor = torch.ones(sample.weight.shape, dtype=torch.float64)
        if is_own(optimizer) and sample.exact is not None:
            rule, rest = optimizer.algorithm, torch.zeros_like(factor)
            first, second, constants = _before(rule, options, sample)
            gradient = sample.gradient.double() * multiplier
            now, exact = (
                rule.move(rest, gradient, first, v, constants)[0].abs()
                for v in (second, sample.exact.double())
            )
            factor = torch.where(exact > 0, exact / now, factor)
        factors.append(factor)
    return factors


def _before(
    rule: Algorithm, options: dict[str, Any], sample: Sample
) -> tuple[Tensor, Tensor, tuple[float, ...]]:
    """First and second moment in fp64, and the constants of the step that follows."""
    first, *rest = (_moment(name, sample, signed=i == 0) for i, name in enumerate(rule.moments))
    constants = rule.constants(options, int(sample.state.get("step", 0)) + 1)
    return first, rest[0] if rest else first, constants


def _moment(name: str, sample: Sample, *, signed: bool) -> Tensor:
    """A sampled moment in fp64, whatever its format."""
    values, tops = stored_moment(sample.state, name)
    if values is None:
        return torch.zeros(sample.weight.shape, dtype=torch.float64)
    if tops is None:
        return values.double()
    return decode_elements(values, tops, signed=signed).double()


def _by_twin(
    kind: type[Optimizer],
    options: dict[str, Any],
    samples: Sequence[Sample],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    values = [sample.value().double() for sample in samples]
    twins = [nn.Parameter(value.clone()) for value in values]
    plain = options | {key: value for key, value in _PLAIN.items() if key in options}
    known = inspect.signature(kind).parameters
    make = cast(Any, kind)
    twin: Optimizer = make(twins, **{k: v for k, v in plain.items() if k in known})
    twin.param_groups[0].update(plain)
    for parameter, sample, gradient in zip(twins, samples, gradients, strict=True):
        parameter.grad = gradient
        if sample.state:
            twin.state[parameter] = {k: _in_fp64(v) for k, v in sample.state.items()}
    twin.step()
    return [t.detach() - value for t, value in zip(twins, values, strict=True)]


def _in_fp64(value: Any) -> Any:
    """State as the twin keeps it: vectors in fp64, counters as they are."""
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.dim() and value.is_floating_point() else value.clone()


def half_gap(value: Tensor, direction: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance from a number to its neighbour: what a smaller update rounds back from.

    Args:
        value: Numbers of ``dtype``, in fp64, any shape.
        direction: The sign says on which side; below a power of two the gap is half as wide.
        dtype: A floating dtype.

    Returns:
        fp64, of the same shape.

    **Source:** IEEE 754-2019, 4.3.1, round to nearest.
    """
    info = torch.finfo(dtype)
    fraction, exponent = torch.frexp(value.abs())  # fraction in [1/2, 1)
    narrow = (fraction == 0.5) & (value * direction < 0)
    smallest = torch.tensor(info.tiny, dtype=torch.float64).frexp().exponent
    exponent = torch.where(value == 0, smallest, exponent - narrow.int())
    gap = torch.ldexp(torch.full_like(value, info.eps), exponent.clamp(smallest) - 1)
    return gap / 2


def stored_half_gap(sample: Sample, value: Tensor, direction: Tensor) -> Tensor:
    """Half the gap of what a sample's weights are stored in, remainder included.

    Args:
        sample: On the CPU.
        value: What its weights stand for, fp64.
        direction: The updates.

    Returns:
        fp64. With stochastic rounding every update counts that changes the fp32 sum before it.
    """
    if sample.update == "nearest":
        return half_gap(value, direction, sample.weight.dtype)
    fine = half_gap(value, direction, torch.float32)
    if sample.update == "kahan" and sample.remainder is not None:
        return torch.maximum(
            fine, half_gap(sample.remainder.double(), direction, sample.remainder.dtype)
        )
    return fine
