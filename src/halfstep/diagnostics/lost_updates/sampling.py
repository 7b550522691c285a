"""Copies a few elements of every tensor before and after an optimizer's step.

It only queues copies from device to device: nothing waits, and training is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.kernels.reference import master
from halfstep.optim.moments import BLOCK
from halfstep.optim.muon import Muon
from halfstep.optim.state import CODES, REMAINDER, TOPS
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.rounding import Update, random_key
from halfstep.precision.masters.stepping import DeviceDecision

_FEW = 16  # least number of elements sampled from a tensor


@dataclass(slots=True)
class Sample:
    """Some elements of one tensor before and after a step; its tensors have shape (k,)."""

    name: str
    numel: int  # number of elements of the whole tensor
    update: Update  # rounding mode of the weight
    weight: Tensor  # the weight before the step
    # The step's gradient, before ``multiplier`` and loss scale; empty if there was none.
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    # The optimizer's state before the step; tensors of the parameter's shape are sampled.
    state: dict[str, Any] = field(default_factory=dict)
    after: Tensor = field(default_factory=lambda: torch.empty(0))  # the weight after the step
    remainder: Tensor | None = None  # the remainder before the step
    remainder_after: Tensor | None = None
    # the direction that a rule of whole tensors gets instead of the gradient, times its factor
    direction: Tensor | None = None

    def on_cpu(self) -> Sample:
        """A copy on the CPU; synchronises."""
        copy = Sample(**{f.name: _on_cpu(getattr(self, f.name)) for f in fields(self)})
        if copy.remainder is None and copy.remainder_after is not None:  # created by the step
            copy.remainder = torch.zeros_like(copy.remainder_after)
        return copy

    def value(self) -> Tensor:
        """The exact weight before the step: fp32, or fp64 for an fp64 weight."""
        if self.weight.dtype == torch.float64:
            return self.weight
        return master(self.weight, self.remainder, self.update)


@dataclass(slots=True)
class GroupSample:
    """The samples of one parameter group before and after a step."""

    options: dict[str, Any]  # the group's options at the step
    samples: list[Sample] = field(default_factory=list)  # one per tensor with a gradient
    sparse: int = 0  # number of tensors left out because their gradients are sparse
    # The samples' tensors and element indices; emptied after the step.
    places: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class StepSample:
    """The samples of one optimizer before and after a step, still on the device."""

    number: int  # number of the step, from 1
    multiplier: float | Tensor  # the step's factor of gradients
    scale: Tensor | None  # a GradScaler's scale, by which the step divides gradients
    # the flag of that scaler, or of a step on the device: above 0 if the step changes nothing
    found: Tensor | None
    late: bool  # whether a closure computes the gradients within the step
    groups: list[GroupSample] = field(default_factory=list)


class Chooser:
    """Chooses the elements to sample of each tensor, the same ones at every step."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._chosen: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def __call__(self, place: tuple[int, int], tensor: Tensor, total: int) -> Tensor:
        """Element indices, int64 in ascending order, on the tensor's device.

        ``place`` is the index of the group and of the tensor in it; the group has ``total``
        elements.
        """
        size = tensor.numel()
        key = (*place, size, tensor.device)
        if key in self._chosen:
            return self._chosen[key]
        count = min(size, max(_FEW, round(self._samples * size / total)))
        generator = torch.Generator().manual_seed(random_key(self._seed, *place))
        if size <= 4 * count:
            index = torch.randperm(size, generator=generator)[:count].sort().values
        else:  # duplicates are rare, and a permutation of a large tensor is large
            index = torch.unique(torch.randint(size, (count,), generator=generator))
        self._chosen[key] = index.to(tensor.device)
        return self._chosen[key]


def is_own(optimizer: Optimizer) -> TypeGuard[LowPrecisionOptimizer]:
    """Whether an optimizer is one of halfstep's, whose update rule can be called directly."""
    return isinstance(optimizer, LowPrecisionOptimizer)


def before_step(
    optimizer: Optimizer,
    number: int,
    choose: Chooser,
    names: Mapping[Tensor, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> StepSample:
    """Sample everything that step ``number`` is about to use.

    ``args`` are the step's as hooks get them: the optimizer, and perhaps a closure. ``gradients``
    and ``multiplier`` in ``kwargs`` are used if the optimizer is halfstep's.
    """
    own = is_own(optimizer)
    given: Mapping[Tensor, Tensor] | None = kwargs.get("gradients") if own else None
    multiplier = kwargs.get("multiplier", 1.0) if own else 1.0
    found = getattr(optimizer, "found_inf", None)
    if isinstance(multiplier, DeviceDecision):
        found, multiplier = multiplier.found, multiplier.multiplier
    step = StepSample(
        number,
        _copy(multiplier),
        _copy(getattr(optimizer, "grad_scale", None)),
        _copy(found),
        late=(args[1] if len(args) > 1 else kwargs.get("closure")) is not None,
    )
    for number, group in enumerate(optimizer.param_groups):
        step.groups.append(_sample_group(optimizer, number, group, choose, names, given, step.late))
    if isinstance(optimizer, Muon):
        optimizer.on_direction = _directions(step)
    return step


def _sample_group(
    optimizer: Optimizer,
    number: int,
    group: dict[str, Any],
    choose: Chooser,
    names: Mapping[Tensor, str],
    given: Mapping[Tensor, Tensor] | None,
    late: bool,
) -> GroupSample:
    own, own_names = is_own(optimizer), group.get("param_names")
    found = GroupSample(
        {k: _copy(v) for k, v in group.items() if k not in ("params", "param_names")}
    )
    total = sum(local(each).numel() for each in group["params"])
    for j, parameter in enumerate(group["params"]):
        gradient = parameter.grad if given is None else given.get(parameter)
        tensor = local(parameter.detach())
        if not tensor.numel() or (gradient is None and not late):
            continue
        if gradient is not None and gradient.is_sparse:
            found.sparse += 1
            continue
        index = choose((number, j), tensor, total)
        name = own_names[j] if own_names else f"tensor {j} of shape {tuple(parameter.shape)}"
        update = group["update"] if own and tensor.dtype == torch.bfloat16 else None
        sample = Sample(
            names.get(parameter, name),
            tensor.numel(),
            update or "nearest",
            torch.take(tensor, index),
            state=sampled_state(optimizer.state.get(parameter, {}), parameter, index),
        )
        if gradient is not None:
            sample.gradient = torch.take(local(gradient), index)
        if own:
            sample.remainder = sample.state.pop(REMAINDER, None)
        found.samples.append(sample)
        found.places.append((parameter, index))
    return found


def _directions(step: StepSample) -> Callable[[Tensor, Tensor, float], None]:
    """Takes the directions of a step's sampled elements, while it runs."""
    wanted = {
        parameter: (sample, index)
        for group in step.groups
        for sample, (parameter, index) in zip(group.samples, group.places, strict=True)
    }

    def take(parameter: Tensor, direction: Tensor, factor: float) -> None:
        if parameter in wanted:
            sample, index = wanted[parameter]
            sample.direction = torch.take(direction, index).float() * factor

    return take


def after_step(optimizer: Optimizer, step: StepSample) -> None:
    """Sample the weights and remainders after the step, into the result of :func:`before_step`."""
    own = is_own(optimizer)
    if isinstance(optimizer, Muon):
        optimizer.on_direction = None
    for group in step.groups:
        for (parameter, index), sample in zip(group.places, group.samples, strict=True):
            sample.after = torch.take(local(parameter.detach()), index)
            held = optimizer.state.get(parameter, {}).get(REMAINDER) if own else None
            if held is not None:
                sample.remainder_after = torch.take(held, index)
            if step.late and parameter.grad is not None and not parameter.grad.is_sparse:
                sample.gradient = torch.take(local(parameter.grad), index)
        group.places = []


def sampled_state(state: Mapping[str, Any], parameter: Tensor, index: Tensor) -> dict[str, Any]:
    """The state of some elements; values without the parameter's shape are copied whole."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and key.endswith(TOPS):
            codes = local(state[key.removesuffix(TOPS) + CODES])
            found[key] = torch.take(value, _in_memory(index, codes) // BLOCK)
        elif isinstance(value, Tensor) and value.shape == parameter.shape:
            found[key] = torch.take(local(value), index)
        else:
            found[key] = _copy(value)
    return found


def _in_memory(index: Tensor, tensor: Tensor) -> Tensor:
    """The memory offsets of elements given by their indices, for a dense tensor."""
    if tensor.is_contiguous():
        return index
    place = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        place += index % size * stride
        index = index // size
    return place


def local(tensor: Tensor) -> Tensor:
    """This process' part of a tensor; the type check avoids slow look-ups of attributes."""
    return tensor if type(tensor) in (Tensor, nn.Parameter) else local_part(tensor)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_cpu(held) for key, held in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
