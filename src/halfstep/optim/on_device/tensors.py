"""The tensors that a step on the device updates, grouped by launch, and their addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import halfstep.optim.kernels.cuda as cuda
from halfstep.errors import PrecisionError
from halfstep.optim.base import LowPrecisionOptimizer, kept_moments
from halfstep.optim.checks import check_gradient, check_updates
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.storage.state import StepTask, is_dense, mark_written
from halfstep.precision.masters.rounding import Update


@dataclass(slots=True)
class Bound:
    """The tensors of one launch: they share a group, their dtypes and their number of steps."""

    group: dict[str, Any]  # the parameter group
    plan: Plan  # their kernel's parameters, except the constants, which the device computes
    step: int  # applied steps when they were attached
    members: list[tuple[nn.Parameter, int]]  # each parameter and the stream of its random bits
    launch: cuda.Launch  # their launch
    first_partial: int  # index of their first sum of squares in ``Bundle.partials``


class Bundle:
    """The parameters that have gradients, grouped by launch."""

    def __init__(
        self,
        optimizer: LowPrecisionOptimizer,
        device: torch.device,
        known: Mapping[Tensor, str],
    ) -> None:
        self.bounds: list[Bound] = []
        self.names: tuple[str, ...] = ()
        self.partials = torch.empty(0)
        self.table = torch.empty(0)
        self.aligned = False
        self._optimizer = optimizer
        self._device = device
        self._known = known
        self._tables = cuda.Tables(device)
        self._members: tuple[Any, ...] = ()
        self._steps: dict[nn.Parameter, tuple[Tensor, float]] = {}
        self._places: tuple[Any, ...] = ()
        self._tasks: list[StepTask] = []
        self._captured: list[Any] = []  # keeps alive what a graph reads

    def _work(self) -> Iterator[tuple[int, dict[str, Any], nn.Parameter, Tensor, int]]:
        """Group index, group, parameter, gradient and stream of each parameter with a gradient."""
        for stream, (number, group, parameter) in enumerate(self._optimizer._members()):
            if parameter.grad is not None:
                yield number, group, parameter, parameter.grad, stream

    def changed(self) -> bool:
        """Whether other parameters have gradients now, or step numbers were set from outside."""
        state = self._optimizer.state
        members = tuple((id(p), g.dtype) for _, _, p, g, _ in self._work())
        return (
            not members
            or self._members != members
            or any(
                state[p].get("step") is not step or float(step) != value
                for p, (step, value) in self._steps.items()
            )
        )

    def attach(self) -> None:
        """Attach the parameters that have gradients now, and create missing state.

        Refused if a CUDA graph uses the attached ones, or if the optimizer refuses a gradient.
        """
        if self._captured or cuda.is_capturing(self._device):
            raise PrecisionError(
                "other parameters have gradients than in the step before the CUDA graph was "
                "captured, or their state was loaded anew: make another DeviceScaler, take a step "
                "and capture again"
            )
        work = list(self._work())
        if not work:
            raise PrecisionError("step(): no parameter of the optimizer has a gradient")
        optimizer = self._optimizer
        check_updates(optimizer.param_groups, type(optimizer).__name__)
        for _, _, parameter, gradient, _ in work:
            check_gradient(parameter, gradient)
        found: dict[tuple[Any, ...], list[tuple[nn.Parameter, int]]] = {}
        self._steps = {}
        for number, group, parameter, gradient, stream in work:
            if group.get("maximize"):
                raise PrecisionError(
                    "DeviceScaler only minimises, and a group has maximize=True; negate the loss "
                    "instead"
                )
            if not is_dense(parameter):
                raise PrecisionError(
                    f"a parameter of shape {tuple(parameter.shape)} and strides "
                    f"{parameter.stride()} is part of a larger tensor, which DeviceScaler cannot "
                    "step; give it memory of its own (parameter.data = parameter.data.clone())"
                )
            state = optimizer._state(group, parameter)
            step, moments = state["step"], kept_moments(group, state)
            self._steps[parameter] = step, float(step)
            key = (number, int(step), moments, parameter.dtype, gradient.dtype)
            found.setdefault(key, []).append((parameter, stream))
        self.bounds, first, row, names = [], 0, 0, []
        for (number, step, moments, *_), members in found.items():
            group = optimizer.param_groups[number]
            # for fp32 weights make_launch ignores ``update``
            update: Update = group["update"] or "nearest"
            plan = Plan(optimizer.algorithm, (), update, moments, 1.0, group["seed"], 0)
            tasks = self._tasks_of(members)
            bound = Bound(group, plan, step, members, cuda.make_launch(tasks, plan, row), first)
            self.bounds.append(bound)
            first += bound.launch.statistics.numel()
            row += len(members)
            names += [self._name(parameter, stream) for parameter, stream in members]
        self.names = tuple(names)
        self.partials = torch.zeros(first, dtype=torch.float64, device=self._device)
        self._members = tuple((id(p), g.dtype) for _, _, p, g, _ in work)
        self._places = ()

    def locate(self) -> None:
        """Update the table of addresses if a tensor has moved, by one asynchronous copy."""
        places = tuple(self._places_now())
        if None in places or places != self._places:
            self._tasks = [t for bound in self.bounds for t in self._tasks_of(bound.members)]
            content: list[int] = []
            self.aligned, at = True, 0
            for bound in self.bounds:
                end = at + len(bound.members)
                rows, aligned = cuda.rows(self._tasks[at:end], bound.plan.seed)
                content += rows
                self.aligned = self.aligned and aligned
                at = end
            self.table = self._tables.get(tuple(content))
            self._places = places
        if cuda.is_capturing(self._device):
            self._captured.append((self.table, self.partials, [b.launch for b in self.bounds]))

    def _places_now(self) -> Iterator[int | None]:
        """The addresses of all tensors; None if a gradient needs a copy in the weight's layout."""
        for bound in self.bounds:
            for parameter, _ in bound.members:
                gradient = parameter.grad
                assert gradient is not None
                if gradient.stride() != parameter.stride():
                    yield None
                yield parameter.data_ptr()
                yield gradient.data_ptr()
                for key, tensor in self._optimizer.state[parameter].items():
                    if key != "step":
                        yield tensor.data_ptr()

    def _tasks_of(self, members: Sequence[tuple[nn.Parameter, int]]) -> list[StepTask]:
        optimizer, tasks = self._optimizer, []
        for parameter, stream in members:
            assert parameter.grad is not None
            state = optimizer.state[parameter]
            tasks.append(optimizer._task(parameter, parameter.grad, state, stream))
        return tasks

    def _name(self, parameter: nn.Parameter, stream: int) -> str:
        """The parameter's name, or its number if it has none."""
        if parameter in self._known:
            return self._known[parameter]
        for group in self._optimizer.param_groups:
            for name, candidate in zip(group.get("param_names", ()), group["params"], strict=False):
                if candidate is parameter:
                    return str(name)
        return f"parameter {stream}"

    def set_steps(self, steps: Sequence[float]) -> None:
        """Write the device's step numbers into the optimizer's state, unless it was replaced."""
        for bound, step in zip(self.bounds, steps, strict=False):
            for parameter, _ in bound.members:
                held, value = self._steps[parameter]
                state = self._optimizer.state[parameter]
                if state.get("step") is held and float(held) == value:
                    held.fill_(step)
                    self._steps[parameter] = held, step

    def mark_written(self) -> None:
        """Tell autograd that the step has written weights and moments in place."""
        mark_written(self._tasks)

    def launch_statistics(self, kernels: ModuleType, bound: Bound, flags: Tensor) -> None:
        """Compute the statistics of a launch's gradients into ``partials`` and ``flags``."""
        programs = bound.launch.statistics.numel()
        if programs:
            kernels.statistics_kernel[(programs,)](
                self.table,
                bound.launch.statistics,
                self.partials,
                flags,
                bound.first_partial,
                dtype=bound.launch.gradient,
                aligned=self.aligned,
                tile=cuda.STATISTICS_TILE,
                tiles=cuda.STATISTICS_TILES,
                **kernels.LAUNCH,
            )
