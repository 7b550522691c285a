"""A few elements of every tensor, copied before and after an optimizer's step.

Only copies from device to device are queued: nothing waits, and nothing of the training is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.optim.storage.moments import BLOCK
from halfstep.optim.storage.state import CODES, REMAINDER, TOPS
from halfstep.optim.storage.weights import master
from halfstep.precision.masters.rounding import Update, random_key

_FEW = 16  # elements of every tensor, however small


@dataclass(slots=True)
class Sample:
    """Some elements of one tensor around a step; all tensors of shape (k,), on one device.

    Attributes:
        name: The tensor's name, for people.
        numel: Its number of elements.
        update: How the weight is kept.
        weight: Before the step.
        gradient: What the step was given, before ``multiplier`` and loss scale;
            without elements if it got none.
        state: The optimizer's state before the step; tensors of the parameter's shape are sampled.
        whole: Whether some state has another shape, so that elements are not on their own.
        after: The weight after the step.
        remainder: What was stored beside the weight before, or None.
        remainder_after: And after.
        exact: The second moment before the step, had it been kept in fp32; None where it is, or
            there is none.
    """

    name: str
    numel: int
    update: Update
    weight: Tensor
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    state: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    after: Tensor = field(default_factory=lambda: torch.empty(0))
    remainder: Tensor | None = None
    remainder_after: Tensor | None = None
    exact: Tensor | None = None

    def on_cpu(self) -> Sample:
        """A copy on the host; synchronises."""
        state = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in self.state.items()}
        held, held_after = self.remainder, self.remainder_after
        if held_after is not None and held is None:  # the step has made it
            held = torch.zeros_like(held_after)
        return Sample(
            self.name,
            self.numel,
            self.update,
            self.weight.cpu(),
            self.gradient.cpu(),
            state,
            self.whole,
            self.after.cpu(),
            None if held is None else held.cpu(),
            None if held_after is None else held_after.cpu(),
            None if self.exact is None else self.exact.cpu(),
        )

    def value(self) -> Tensor:
        """What the weight stood for before the step: fp32, or fp64 for an fp64 weight."""
        if self.weight.dtype == torch.float64:
            return self.weight
        return master(self.weight, self.remainder, self.update)


@dataclass(slots=True)
class GroupSample:
    """One parameter group around a step.

    Attributes:
        options: Its options at the step.
        samples: One a tensor with a gradient.
        sparse: How many tensors were left out, as their gradients are sparse.
        places: The samples' tensors and element numbers; emptied after the step.
        members: The samples' numbers in the group.
    """

    options: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    sparse: int = 0
    places: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    members: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepSample:
    """One optimizer around a step, still on the device.

    Attributes:
        number: Of the step, from 1.
        multiplier: What the step multiplies gradients by.
        scale: What it divides them by: a ``GradScaler``'s scale, or None.
        found: That scaler's flag, not 0 if the step does nothing; or None.
        late: Whether a closure computes the gradients within the step.
        groups: One a parameter group.
    """

    number: int
    multiplier: float
    scale: Tensor | None
    found: Tensor | None
    late: bool
    groups: list[GroupSample] = field(default_factory=list)


class Chooser:
    """Which elements of a tensor are looked at: always the same."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._chosen: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def __call__(self, place: tuple[int, int], tensor: Tensor, total: int) -> Tensor:
        """Element numbers, int64 in rising order, on the tensor's device.

        Args:
            place: Number of the group, and of the tensor in it.
            tensor: The parameter.
            total: Elements of the group.
        """
        size = tensor.numel()
        key = (*place, size, tensor.device)
        known = self._chosen.get(key)
        if known is not None:
            return known
        count = min(size, max(_FEW, round(self._samples * size / total)))
        generator = torch.Generator().manual_seed(random_key(self._seed, *place))
        if size <= 4 * count:
            index = torch.randperm(size, generator=generator)[:count].sort().values
        else:  # doubles are few, and a permutation of a large tensor is large
            index = torch.unique(torch.randint(size, (count,), generator=generator))
        self._chosen[key] = index.to(tensor.device)
        return self._chosen[key]


def before_step(
    optimizer: Optimizer,
    number: int,
    choose: Chooser,
    names: Mapping[Tensor, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    own: bool,
) -> StepSample:
    """Copy what a step is about to use.

    Args:
        optimizer: About to step.
        number: Of the step.
        choose: Which elements.
        names: Of parameters, where known.
        args: The step's arguments as hooks get them: the optimizer, and perhaps a closure.
        kwargs: And keyword arguments; ``gradients`` and ``multiplier`` are those of halfstep's.
        own: Whether it is one of halfstep's optimizers.
    """
    given: Mapping[Tensor, Tensor] | None = kwargs.get("gradients") if own else None
    step = StepSample(
        number,
        kwargs.get("multiplier", 1.0) if own else 1.0,
        _copy(getattr(optimizer, "grad_scale", None)),
        _copy(getattr(optimizer, "found_inf", None)),
        late=(args[1] if len(args) > 1 else kwargs.get("closure")) is not None,
    )
    for i, group in enumerate(optimizer.param_groups):
        options = {k: _copy(v) for k, v in group.items() if k not in ("params", "param_names")}
        step.groups.append(GroupSample(options))
        total = sum(local(p).numel() for p in group["params"])
        own_names = group.get("param_names")
        for j, parameter in enumerate(group["params"]):
            gradient = parameter.grad if given is None else given.get(parameter)
            tensor = local(parameter.detach())
            if not tensor.numel() or (gradient is None and not step.late):
                continue
            if gradient is not None and gradient.is_sparse:
                step.groups[i].sparse += 1
                continue
            index = choose((i, j), tensor, total)
            name = own_names[j] if own_names else f"tensor {j} of shape {tuple(parameter.shape)}"
            sample = Sample(
                names.get(parameter, name),
                tensor.numel(),
                (group["update"] or "nearest")
                if own and tensor.dtype == torch.bfloat16
                else "nearest",
                torch.take(tensor, index),
            )
            if gradient is not None:
                sample.gradient = torch.take(local(gradient), index)
            _copy_state(sample, optimizer.state.get(parameter, {}), parameter, index)
            if own:
                sample.remainder = sample.state.pop(REMAINDER, None)
            step.groups[i].samples.append(sample)
            step.groups[i].places.append((parameter, index))
            step.groups[i].members.append(j)
    return step


def after_step(optimizer: Optimizer, step: StepSample, *, own: bool) -> None:
    """Copy what the step has left, into what :func:`before_step` gave."""
    for group in step.groups:
        for (parameter, index), sample in zip(group.places, group.samples, strict=True):
            sample.after = torch.take(local(parameter.detach()), index)
            held = optimizer.state.get(parameter, {}).get(REMAINDER) if own else None
            if held is not None:
                sample.remainder_after = torch.take(held, index)
            if step.late and parameter.grad is not None and not parameter.grad.is_sparse:
                sample.gradient = torch.take(local(parameter.grad), index)
        group.places = []


def _copy_state(sample: Sample, state: Mapping[str, Any], parameter: Tensor, index: Tensor) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            sample.state[key] = value
            sample.whole |= isinstance(value, list | tuple | dict)
        elif key.endswith(TOPS):
            codes = local(state[key.removesuffix(TOPS) + CODES])
            sample.state[key] = torch.take(value, in_memory(index, codes) // BLOCK)
        elif value.shape == parameter.shape:
            sample.state[key] = torch.take(local(value), index)
        else:
            sample.state[key] = value.clone()
            sample.whole |= value.numel() != 1


def in_memory(index: Tensor, tensor: Tensor) -> Tensor:
    """The places in memory of elements given by their numbers, for a tensor without holes."""
    if tensor.is_contiguous():
        return index
    place = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        place += index % size * stride
        index = index // size
    return place


def local(tensor: Tensor) -> Tensor:
    """This process' part of a distributed tensor."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:  # a missing attribute is slow
        return tensor
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
