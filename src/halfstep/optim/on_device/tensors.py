"""The tensors that a step on the device updates, grouped by launch, and their addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

import halfstep.optim.kernels.cuda as cuda
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.options import check_gradient, check_updates, kept_moments, update_of
from halfstep.optim.rules import Algorithm
from halfstep.optim.storage.state import StepTask, is_dense, write_back

Gradients = Mapping[nn.Parameter, Tensor]


class Stepped(Protocol):
    """The part of :class:`~halfstep.optim.base.LowPrecisionOptimizer` used here."""

    @property
    def algorithm(self) -> Algorithm:
        """Its update rule."""

    state: Any
    param_groups: list[dict[str, Any]]

    def _members(self) -> Iterator[tuple[int, dict[str, Any], nn.Parameter]]: ...

    def _state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]: ...

    def _task(
        self,
        rule: Algorithm,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        stream: int,
    ) -> StepTask: ...


@dataclass(slots=True)
class Bound:
    """The tensors of one launch: they share a group, their dtypes and their number of steps."""

    group: dict[str, Any]  # the parameter group
    plan: Plan  # their kernel's parameters, except the constants, which the device computes
    step: int  # applied steps
    members: list[tuple[nn.Parameter, int]]  # each parameter and the stream of its random bits
    launch: cuda.Launch  # their launch
    first_partial: int  # index of their first sum of squares in ``Bundle.partials``


class Bundle:
    """The parameters that have gradients, grouped by launch."""

    def __init__(self, optimizer: Stepped, device: torch.device) -> None:
        self.bounds: list[Bound] = []
        self.partials = torch.empty(0)
        self.table = torch.empty(0)
        self.aligned = False
        self._optimizer = optimizer
        self._device = device
        self._tables = cuda.Tables(device)
        self._members: tuple[Any, ...] = ()
        self._steps: list[Tensor] = []  # the optimizer's step numbers, on the host
        self._seen: list[tuple[Any, ...]] = []  # their identities and versions
        self._places: tuple[Any, ...] = ()
        self._views = False  # whether a weight is part of a larger tensor, and stepped in a copy
        self._tasks: list[StepTask] = []  # of the step in progress: they hold its gradients

    def attach(self, gradients: Gradients) -> bool:
        """Attach the parameters that have gradients, if others have them now; whether they do.

        Raises:
            PrecisionError: If the optimizer refuses a gradient, or to step without ``update``.
        """
        optimizer = self._optimizer
        work = [
            (number, group, parameter, gradients[parameter], stream)
            for stream, (number, group, parameter) in enumerate(optimizer._members())
            if parameter in gradients
        ]
        members = tuple(
            (id(p), g.dtype, g.layout, group["seed"], group["update"]) for _, group, p, g, _ in work
        )
        if members == self._members and (self._seen == self._versions() or self._recount()):
            return False
        check_updates(optimizer.param_groups, type(optimizer).__name__)
        for _, _, parameter, gradient, _ in work:
            check_gradient(parameter, gradient)
        found: dict[tuple[Any, ...], list[tuple[nn.Parameter, int]]] = {}
        self._steps, names = [], optimizer.algorithm.moments
        for number, group, parameter, gradient, stream in work:
            state = optimizer._state(group, parameter)
            self._steps.append(state["step"])
            key = (
                *(number, int(state["step"]), kept_moments(names, group, state)),
                *(update_of(group, parameter), parameter.dtype, gradient.dtype),
            )
            found.setdefault(key, []).append((parameter, stream))
        self.bounds, first, row = [], 0, 0
        for (number, step, moments, update, *_), of_launch in found.items():
            group = optimizer.param_groups[number]
            plan = Plan(optimizer.algorithm, (), update, moments, 1.0, group["seed"], 0)
            launch = cuda.make_launch(self._tasks_of(of_launch, gradients), plan, row)
            self.bounds.append(Bound(group, plan, step, of_launch, launch, first))
            first += launch.statistics.numel()
            row += len(of_launch)
        self.partials = torch.zeros(first, dtype=torch.float64, device=self._device)
        self._views = not all(is_dense(p.detach()) for _, _, p, _, _ in work)
        self._members, self._seen, self._places = members, self._versions(), ()
        return True

    def _recount(self) -> bool:
        """Take over step numbers that were changed, if the launches stay the same."""
        found = []
        for bound in self.bounds:
            states = [self._optimizer.state.get(p, {}) for p, _ in bound.members]
            steps = {int(state["step"]) for state in states if "step" in state}
            names = self._optimizer.algorithm.moments
            formats = {kept_moments(names, bound.group, state) for state in states}
            if len(steps) != 1 or formats != {bound.plan.moments}:
                return False
            if any("step" not in state for state in states):
                return False
            found.append(steps.pop())
        for bound, step in zip(self.bounds, found, strict=True):
            bound.step = step
        state = self._optimizer.state
        self._steps = [state[p]["step"] for p, _ in self.members()]
        self._seen = self._versions()
        return True

    def _versions(self) -> list[tuple[Any, ...]]:
        """What changes if a step number is written or replaced, as where a state is loaded."""
        state = self._optimizer.state
        held = [state[p].get("step") if p in state else None for p, _ in self.members()]
        return [(id(step), getattr(step, "_version", None)) for step in held]

    def count(self) -> None:
        """Count an applied step, in the optimizer's state too."""
        torch._foreach_add_(self._steps, 1)
        for bound in self.bounds:
            bound.step += 1
        self._seen = self._versions()

    def members(self) -> list[tuple[nn.Parameter, int]]:
        """The parameters and their streams, in the order of the table's rows."""
        return [member for bound in self.bounds for member in bound.members]

    def locate(self, gradients: Gradients) -> None:
        """Update the table of addresses if a tensor has moved, by one asynchronous copy."""
        places = self.places(gradients)
        if self._views or None in places or places != self._places:
            self._tasks = self._tasks_of(self.members(), gradients)
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

    def places(self, gradients: Gradients) -> tuple[int | None, ...]:
        """The addresses of all tensors; None for a gradient that is missing or needs a copy."""
        return tuple(self._places_now(gradients))

    def _places_now(self, gradients: Gradients) -> Iterator[int | None]:
        for parameter, _ in self.members():
            gradient = gradients.get(parameter)
            if gradient is None:
                yield None
                continue
            if gradient.stride() != parameter.stride():
                yield None
            yield parameter.data_ptr()
            yield gradient.data_ptr()
            for key, tensor in self._optimizer.state[parameter].items():
                if key != "step":
                    yield tensor.data_ptr()

    def _tasks_of(
        self, members: Sequence[tuple[nn.Parameter, int]], gradients: Gradients
    ) -> list[StepTask]:
        optimizer = self._optimizer
        rule, state = optimizer.algorithm, optimizer.state
        return [
            optimizer._task(rule, parameter, gradients[parameter], state[parameter], stream)
            for parameter, stream in members
        ]

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

    def finish(self) -> None:
        """Tell autograd what the step has written in place, and let go of its gradients."""
        if self._views:
            for (parameter, _), task in zip(self.members(), self._tasks, strict=True):
                write_back(parameter, task.weight)
        increment_version([tensor for task in self._tasks for tensor in task.written])
        none = torch.empty(0)
        self._tasks = [replace(task, gradient=none) for task in self._tasks]

    def held(self) -> list[Any]:
        """What a CUDA graph of this step reads, to be kept for as long as the graph."""
        return [self.table, self.partials, [bound.launch for bound in self.bounds]]
