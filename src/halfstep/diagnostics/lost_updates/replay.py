"""Replays an optimizer step on sampled elements as if their weights were held in fp64.

The replay runs later, on the CPU and on the sampled elements only, so it costs the loop nothing. It
uses the update rule itself for halfstep's optimizers, and a second optimizer of the same class for
others. That is valid for element-wise rules, which most are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from halfstep.diagnostics.lost_updates.sampling import (
    Chooser,
    Sample,
    is_own,
    local,
    sampled_state,
)
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.muon import Muon
from halfstep.optim.rules import Algorithm
from halfstep.optim.storage.moments import decode_elements
from halfstep.optim.storage.state import stored_moment
from halfstep.precision.masters.stepping import DeviceDecision

# Optimizers whose rule is element-wise according to torch.optim's documentation.
_ELEMENTWISE = frozenset(
    {optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
     optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD}
)  # fmt: skip
# These use rows, columns, matrix products or whole gradients, so that a sample cannot be replayed.
_WHOLE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
_PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


def is_documented(optimizer: Optimizer) -> bool:
    """Whether the optimizer is documented as element-wise, so that its replay is valid."""
    return type(optimizer) in _ELEMENTWISE or is_own(optimizer)


def intended_updates(
    optimizer: Optimizer, options: dict[str, Any], samples: Sequence[Sample], multiplier: float
) -> list[Tensor] | str:
    """Replay a step in fp64.

    Args:
        optimizer: The optimizer, of which only the class is used.
        options: Its group's options at the step, all plain numbers.
        samples: The samples of that group, on the CPU.
        multiplier: The step's factor of every gradient.

    Returns:
        For each sample the change of its elements, fp64 of shape (k,); or why it is not known.
    """
    if is_own(optimizer) and options.get("maximize"):
        multiplier = -multiplier
    gradients = [sample.gradient.double() * multiplier for sample in samples]
    if is_own(optimizer):
        unseen = isinstance(optimizer, Muon) and optimizer.is_directed(options)
        if unseen and any(sample.direction is None for sample in samples):
            return f"the direction of {type(optimizer).__name__} was given to another meter"
        return _by_rule(optimizer, options, samples, gradients)
    kind = type(optimizer)
    if kind.__name__ in _WHOLE or any(sample.whole for sample in samples):
        return f"{kind.__name__} does not update every element by itself"
    try:
        return _by_twin(kind, options, samples, gradients)
    except Exception as error:  # a user's class may raise anything
        return f"replaying {kind.__name__} on single elements failed ({error})"


def plain(value: Any) -> Any:
    """A group's option with tensors, such as a learning rate, as numbers; may synchronise."""
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
    rule = optimizer.algorithm_of(options)
    for sample, gradient in zip(samples, gradients, strict=True):
        value = sample.value().double()
        first, second, constants = _before(rule, options, sample)
        given = gradient if sample.direction is None else sample.direction.double()
        moved = rule.move(value, given, first, second, constants)[0]
        changes.append(moved - value)
    return changes


def slowdowns(
    optimizer: Optimizer, options: dict[str, Any], samples: Sequence[Sample], multiplier: float
) -> list[Tensor]:
    """How many times smaller each update is than it would be with an fp32 second moment.

    Weight decay, which does not use moments, is excluded on both sides. The arguments are those of
    :func:`intended_updates`.

    Returns:
        For each sample fp64 of shape (k,); 1 where the second moment is kept in fp32, where there
        is none, and where the element does not move.
    """
    factors = []
    for sample in samples:
        factor = torch.ones(sample.weight.shape, dtype=torch.float64)
        if is_own(optimizer) and sample.exact is not None:
            rule, rest = optimizer.algorithm_of(options), torch.zeros_like(factor)
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
    state, shape = sample.state, sample.weight.shape
    found = [_moment(m, state, signed=i == 0) for i, m in enumerate(rule.moments)]
    zero = torch.zeros(shape, dtype=torch.float64)
    first, *rest = (zero if m is None else m for m in found or [None])
    constants = rule.constants(options, int(state.get("step", 0)) + 1)
    return first, rest[0] if rest else first, constants


def _moment(name: str, state: Mapping[str, Any], *, signed: bool) -> Tensor | None:
    """A sampled moment in fp64, whatever its format; None before the first step."""
    values, tops = stored_moment(state, name)
    if values is None:
        return None
    decoded = values if tops is None else decode_elements(values, tops, signed=signed)
    return decoded.double()


def _by_twin(
    kind: type[Optimizer],
    options: dict[str, Any],
    samples: Sequence[Sample],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    if kind in _ELEMENTWISE and len(samples) > 1:
        whole = _joined(samples)
        if whole is not None:  # one tensor steps in a fraction of the time of many small ones
            (moved,) = _by_twin(kind, options, [whole], [torch.cat([*gradients])])
            return [*torch.split(moved, [len(gradient) for gradient in gradients])]
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


def _joined(samples: Sequence[Sample]) -> Sample | None:
    """All samples as one, with their exact weights; None where their states differ in more."""
    first = samples[0]
    shared = {k: v for k, v in first.state.items() if not isinstance(v, Tensor) or not v.dim()}
    for sample in samples:
        if sample.state.keys() != first.state.keys():
            return None
        if any(bool(sample.state[key] != value) for key, value in shared.items()):
            return None
    apart = first.state.keys() - shared.keys()
    if not all(sample.state[key].dim() for sample in samples for key in apart):
        return None  # a weight without dimensions
    state = {key: torch.cat([sample.state[key] for sample in samples]) for key in apart}
    weight = torch.cat([sample.value().double() for sample in samples])
    return Sample("", len(weight), "nearest", weight, state={**shared, **state})


def _in_fp64(value: Any) -> Any:
    """A state value for the fp64 optimizer: tensors with dims in fp64, counters as they are."""
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.dim() and value.is_floating_point() else value.clone()


# Second moments of the sampled elements in fp32, for an optimizer that keeps its own in less.
#
# A replay from the stored moments shows what weights lose, but not what moments lose: if 8 bits
# store an element's second moment too large, its update is too small, and so is the replayed one.
# Therefore the second moment of the sampled elements is also averaged in fp32 at every step, from
# the gradients that the step gets. This gathers a few thousand gradients and does not wait.


_Place = tuple[int, int]  # index of the group, and of the tensor in it


class ExactMoments:
    """fp32 second moments of the sampled elements of groups that keep them in less than fp32."""

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose
        self._values: dict[_Place, Tensor] = {}
        self._index: dict[_Place, Tensor] = {}
        self._steps: dict[_Place, Tensor | None] = {}

    def get(self, place: _Place) -> Tensor | None:
        """The moments after the last step, fp32 of shape (k,); None if the optimizer keeps fp32."""
        return self._values.get(place)

    def prepare(self, optimizer: Optimizer) -> None:
        """Before a step: start from the stored moments if the last step did not lead to this one.

        That is so at the first step, and after a state was loaded or parameters were changed: the
        step counter is another tensor then.
        """
        for number, group in enumerate(optimizer.param_groups):
            if not _is_coarse(optimizer, group):
                continue
            for j, parameter in enumerate(group["params"]):
                state, place = optimizer.state.get(parameter, {}), (number, j)
                step = state.get("step")
                index = self._index.get(place)
                follows = index is not None and index.device == parameter.device
                if not follows or step is not self._steps[place]:
                    index = self._choose(place, local(parameter.detach()), group["params"])
                    sampled = sampled_state(state, parameter, index)
                    stored = _moment("exp_avg_sq", sampled, signed=False)
                    zeros = torch.zeros(index.shape, device=index.device)
                    self._values[place] = zeros if stored is None else stored.float()
                    self._index[place], self._steps[place] = index, step

    def update(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        """After a step of one of halfstep's optimizers: update the moments by its gradients."""
        if not self._values:
            return
        given = kwargs.get("gradients")
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        multiplier = kwargs.get("multiplier", 1.0)
        if isinstance(multiplier, DeviceDecision):
            found, multiplier = multiplier.found, multiplier.multiplier
        for number, group in enumerate(optimizer.param_groups):
            # Only the gathering is per tensor, the rest per group and dtype: this runs every step.
            gathered: dict[torch.dtype, list[tuple[_Place, Tensor]]] = {}
            for j, parameter in enumerate(group["params"]):
                index = self._index.get((number, j))
                gradient = parameter.grad if given is None else given.get(parameter)
                if index is not None and gradient is not None:
                    chosen = torch.take(local(gradient), index)
                    gathered.setdefault(chosen.dtype, []).append(((number, j), chosen))
                    self._steps[number, j] = optimizer.state[parameter].get("step")
            for members in gathered.values():
                places, parts = zip(*members, strict=True)
                g = torch.cat(parts).float() * multiplier
                if scale is not None:
                    g = g / scale
                beta2 = plain(group["betas"])[1]
                before = torch.cat([self._values[place] for place in places])
                after = torch.addcmul(before * beta2, g * (1 - beta2), g)
                if found is not None:  # a step that does nothing
                    after = torch.where(found > 0, before, after)
                kept = torch.split(after, [len(part) for part in parts])
                self._values.update(zip(places, kept, strict=True))


def _is_coarse(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a group's second moments are kept in less than fp32."""
    several = is_own(optimizer) and len(optimizer.algorithm_of(group).moments) > 1
    return several and group["moments"] not in (None, "fp32")
