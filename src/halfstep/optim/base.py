"""The base class of halfstep's optimizers: their state, their step, and their fp32 masters."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

import halfstep.optim.kernels.cuda as cuda
import halfstep.optim.kernels.reference as reference
from halfstep.errors import PrecisionError
from halfstep.optim.kernels.cpu import RULES, native_kernel
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.moments import FORMATS, Moments
from halfstep.optim.options import (
    GRADIENTS,
    check_group,
    check_storage,
    no_update,
    refused_gradient,
    update_of,
)
from halfstep.optim.rules import SET, Algorithm
from halfstep.optim.state import (
    FELL_BACK,
    SHARE,
    Batch,
    StepTask,
    as_values,
    convert,
    dense,
    elements_below,
    fits,
    flat,
    is_due,
    new_step,
    stored_moment,
    wide_moments,
    write_back,
    zero_moment,
)
from halfstep.precision.masters.rounding import REMAINDER, ROUNDING, Update
from halfstep.precision.masters.stepping import DeviceDecision, Gradients, OwnOptimizer
from halfstep.precision.scaling.gradients import global_norm

_NO_GRADIENT = torch.empty(0)
_SETS = 8  # sets of parameters with gradients whose calls are kept, as of losses that take turns


@dataclass(slots=True)
class Call:
    """The parameters that one kernel call steps, with what it needs of them in every step."""

    number: int  # of their group
    update: Update
    moments: Moments
    parameters: list[nn.Parameter]
    batch: Batch
    counts: list[npt.NDArray[np.float64]]  # step numbers, in the memory of the states' own


@dataclass(slots=True)
class _Kept:
    """The calls of a step, kept as long as nothing that they depend on changes."""

    calls: list[Call]
    parameters: list[nn.Parameter]  # of all calls, one after the other, as are the next two
    tasks: list[StepTask]  # without their gradients between two steps
    counters: list[Tensor]  # the step numbers in the states
    copied: bool  # whether a dense copy of a part of a larger tensor steps, which serves once
    turned: bool  # whether a gradient lies in another order than its weight
    facts: tuple[Any, ...] = ()  # see LowPrecisionOptimizer._facts


class LowPrecisionOptimizer(OwnOptimizer):
    """An optimizer whose weights and moments may have less than 32 bits.

    Options besides the algorithm's own. They are no options of groups, in which torch's loaders of
    sharded checkpoints want the keys of ``torch.optim`` and no others:

    * ``update``: the rounding mode by which an update reaches a bf16 weight, see
      :class:`~halfstep.PrecisionPolicy`. None lets :class:`halfstep.Precision`
      choose; without a Precision it is refused for bf16 weights.
    * ``moments``: ``"fp32"``, ``"bf16"`` or ``"8bit"``; the last two round stochastically.
    * ``seed``: seed of the random bits, which depend only on it, the step and the element.
    """

    algorithm: ClassVar[Algorithm]
    accepts_low_precision_gradients = True
    agree_on_fallback: Callable[[list[bool]], list[bool]] | None = None
    """Set where ranks hold parts of one tensor: from whether this rank would fall back to bf16
    moments, for each stepped tensor, it makes the same answers on all ranks."""

    def __init__(
        self,
        params: Iterable[Any],
        options: dict[str, Any],
        *,
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(params, nn.Module) or not isinstance(params, Iterable):
            raise PrecisionError(
                f"{type(self).__name__} got {type(params).__name__} for its parameters; allowed: "
                "model.parameters(), model.named_parameters(), or a list of groups"
            )
        check_storage(update, moments)
        self.storage: dict[str, Any] = {"update": update, "moments": moments, "seed": seed}
        """How weights and moments are stored: see ``options.py``."""
        self._kept: dict[tuple[int, ...], _Kept] = {}  # by the ids of those that have gradients
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ``torch.optim`` does; :func:`check_group` refuses invalid ones."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
        except (PrecisionError, RuntimeError):
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle or copy."""
        return {**super().__getstate__(), "storage": self.storage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set a pickled, copied or loaded state; what was looked up for another is not in it."""
        super().__setstate__(state)
        self._kept = {}

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse a group's invalid options and parameters."""
        check_group(group, type(self).__name__, self.has_masters)

    def algorithm_of(self, group: Mapping[str, Any]) -> Algorithm:
        """The update rule of a group's parameters."""
        return self.algorithm

    def check_precision(self, update: Update, moments: Moments) -> None:
        """Refuse a policy's rounding mode and moments if this optimizer cannot use them."""
        if moments not in get_args(Moments):
            raise PrecisionError(
                f"moments={moments!r}: {type(self).__name__} keeps {', '.join(get_args(Moments))}"
            )
        if any(state.get("step", 1) for state in self.state.values()):
            raise PrecisionError("the optimizer has stepped already; make Precision before that")
        for key, wanted in (("update", update), ("moments", moments)):
            if self.storage[key] not in (None, wanted):
                raise PrecisionError(
                    f"the optimizer was made with {key}={self.storage[key]!r}, the policy says "
                    f"{wanted!r}; leave {key} out there, or change the policy"
                )

    def check_step(self, gradients: Gradients) -> None:
        """Refuse a bf16 weight without ``update``, and gradients that no kernel accepts."""
        silent = [
            parameter
            for _, _, parameter in self._members()
            if parameter.dtype is torch.bfloat16 and parameter.requires_grad
        ]
        if silent and self.storage["update"] is None:
            raise no_update(silent, type(self).__name__)
        for _, _, parameter in self._members():
            gradient = gradients.get(parameter, parameter)
            fits = gradient.shape == parameter.shape and gradient.dtype in GRADIENTS
            if gradient.is_sparse or not fits:
                raise refused_gradient(parameter, gradient)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        gradients: Gradients | None = None,
        multiplier: float | DeviceDecision = 1.0,
    ) -> Any:
        """Take one step.

        Args:
            closure: Recomputes the loss and returns it, as in ``torch.optim``.
            gradients: Used instead of each parameter's ``grad``: fp32, bf16 or fp16.
            multiplier: A factor of every gradient, applied on the fly (unscaling, clipping); or
                what the device has decided about these gradients.
        """
        loss, factor, decision = None, 1.0, None
        if isinstance(multiplier, DeviceDecision):
            decision = multiplier
        else:
            factor = multiplier
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kept = self._calls(gradients)
        plans = [self._plan(call, factor, decision) for call in kept.calls]
        increment_version(kept.counters)  # what watches the counters sees that they moved
        due = []
        for call, plan in zip(kept.calls, plans, strict=True):
            self._run(call, plan)
            if plan.moments == "8bit" and len(plan.algorithm.moments) > 1 and is_due(plan.step):
                due.append((call, plan))
        if due:
            self._fall_back(due)
        for parameter, task in zip(kept.parameters, kept.tasks, strict=True):
            task.gradient = _NO_GRADIENT
            if kept.copied:
                write_back(parameter, task.weight)
        return loss

    def _run(self, call: Call, plan: Plan) -> None:
        run_kernel(call.batch, plan)

    def can_decide(self) -> bool:
        """Whether kernels heed a decision of the device.

        A subclass with a ``step`` of its own has none, since it may read the multiplier.
        """
        devices = {p.device for group in self.param_groups for p in group["params"]}
        own_step = inspect.unwrap(type(self).step) is inspect.unwrap(LowPrecisionOptimizer.step)
        on_gpu = {d.type for d in devices} == {"cuda"} or os.environ.get("TRITON_INTERPRET") == "1"
        known = own_step and len(devices) == 1 and self.algorithm.name in RULES
        return known and on_gpu and not isinstance(cuda.triton_kernels(), str)

    def uncount(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take back that a step counts, which the device has not applied."""
        torch._foreach_sub_([self.state[p]["step"] for p in parameters], 1)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients together: fp32 scalar, NaN or inf if an element is."""
        compiled = native_kernel() if not gradients or gradients[0].is_cpu else ""
        return global_norm(gradients) if isinstance(compiled, str) else compiled.norm(gradients)

    def _calls(self, gradients: Gradients | None) -> _Kept:
        """The kernel calls of a step with these gradients: those kept, unless anything changed."""
        if gradients is None:
            every = (p for group in self.param_groups for p in group["params"])
            gradients = {p: p.grad for p in every if p.grad is not None}
        key = tuple(map(id, gradients))
        kept = self._kept.get(key)
        if kept is None or not self._is_as_before(kept, gradients):
            if kept is not None or len(self._kept) == _SETS:
                self._kept.clear()  # and what it keeps alive
            kept = self._prepared(gradients)
            if not kept.copied:
                kept.facts = self._facts(kept.parameters, gradients)
                self._kept[key] = kept
        for parameter, task in zip(kept.parameters, kept.tasks, strict=True):
            gradient = gradients[parameter]
            task.gradient = flat(gradient.detach(), dense(parameter)) if kept.turned else gradient
        return kept

    def _is_as_before(self, kept: _Kept, gradients: Gradients) -> bool:
        with suppress(AttributeError, RuntimeError, TypeError):  # of a state without such tensors
            together = all([len({*map(float, call.counts)}) == 1 for call in kept.calls])
            return together and kept.facts == self._facts(kept.parameters, gradients)
        return False

    def _facts(self, parameters: Sequence[nn.Parameter], gradients: Gradients) -> tuple[Any, ...]:
        """All that a step's calls depend on, but for options, step numbers and gradients' places.

        The addresses are of memory that the kept tasks hold, so that nothing else can have them.
        """
        # every step passes here: whole lists are made and compared
        tensors = [*parameters, *(gradients[p] for p in parameters)]
        held = chain.from_iterable(self.state[p].values() for p in parameters)
        return (
            (self.storage["update"], self.storage["moments"]),
            [[*map(id, group["params"])] for group in self.param_groups],
            [*map(Tensor.data_ptr, chain(parameters, held))],
            [*map(Tensor.stride, tensors)],
            [(tensor.dtype, tensor.shape) for tensor in tensors],
        )

    def _prepared(self, gradients: Gradients) -> _Kept:
        """Tasks grouped by kernel call: those of one share group, step, dtypes and moments."""
        self.check_step(gradients)
        found: dict[tuple[Any, ...], list[tuple[nn.Parameter, StepTask, Tensor]]] = {}
        turned = copied = False
        for stream, (number, group, parameter) in enumerate(self._members()):
            gradient = gradients.get(parameter)
            if gradient is None:
                continue
            rule = self.algorithm_of(group)
            state = self._state(group, parameter)
            task = self._task(rule, parameter, state, stream)
            copied = copied or task.weight.data_ptr() != parameter.data_ptr()
            turned = turned or copied or gradient.stride() != parameter.stride()
            update = update_of(self.storage["update"], parameter)
            # as the tensors show: they may be older than this format, or have fallen back to bf16
            moments = FORMATS[task.moments[0].dtype] if task.moments else "fp32"
            kinds = parameter.dtype, gradient.dtype, parameter.device
            key = (number, update, moments, int(state["step"].numpy()), *kinds)
            found.setdefault(key, []).append((parameter, task, state["step"]))
        kept = _Kept([], [], [], [], copied, turned)
        for (number, update, moments, *_), members in found.items():
            batch, counters = Batch([task for _, task, _ in members]), [c for *_, c in members]
            counts = [counter.numpy() for counter in counters]
            kept.calls.append(
                Call(number, update, moments, [p for p, *_ in members], batch, counts)
            )
            kept.parameters += kept.calls[-1].parameters
            kept.tasks += batch.tasks
            kept.counters += counters
        return kept

    def _plan(self, call: Call, multiplier: float, decision: DeviceDecision | None) -> Plan:
        """Count a step of a call's parameters, and say what they share in it."""
        group = self.param_groups[call.number]
        step = int(call.counts[0]) + 1
        for count in call.counts:
            count[...] = step
        rule, seed = self.algorithm_of(group), self.storage["seed"]
        options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}
        constants, kinds = rule.constants(options, step), (call.update, call.moments)
        return Plan(rule, constants, *kinds, multiplier, seed, step, decision)

    def _members(self) -> Iterator[tuple[int, dict[str, Any], nn.Parameter]]:
        """The group's index, the group and the parameter, in the order of the random streams."""
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                yield number, group, parameter

    def _fall_back(self, due: Sequence[tuple[Call, Plan]]) -> None:
        """Switch to bf16 moments where 8 bits do not hold their spread, and warn about it."""
        members: list[tuple[nn.Parameter, StepTask, Plan]] = []
        found: list[Tensor] = []
        for call, plan in due:
            pairs = zip(call.parameters, call.batch.tasks, strict=True)
            members += [(parameter, task, plan) for parameter, task in pairs]
            below = elements_below(call.batch)
            if plan.decision is not None:  # a step that the device has skipped compares nothing
                below.masked_fill_(plan.decision.found > 0, 0)
            found.append(below.to(found[0].device) if found else below)
        counts = torch.cat(found).tolist()  # the host waits once
        sizes = [task.weight.numel() for _, task, _ in members]
        falls = [below >= max(n * SHARE, 1) for below, n in zip(counts, sizes, strict=True)]
        if self.agree_on_fallback is not None:
            falls = self.agree_on_fallback(falls)
        fallen = []
        for member, count, size, fall in zip(members, counts, sizes, falls, strict=True):
            if fall:
                self._widen(*member)
                fallen.append(f"{self._name(member[0])} ({count} of {size} elements)")
        if fallen:
            some = ", ".join(fallen[:3]) + (f" and {len(fallen) - 3} more" * (len(fallen) > 3))
            warnings.warn(
                f"the second moments of {some} spread over more than 8 bits hold; their moments "
                f"are bf16 from step {due[0][1].step} on (2 bytes more per parameter)",
                stacklevel=4,
            )

    def _widen(self, parameter: nn.Parameter, task: StepTask, plan: Plan) -> None:
        """Replace a parameter's 8-bit moments by bf16 ones, after its step."""
        [(group, _)] = self._find(parameter)
        decided = 1.0 if plan.decision is None else plan.decision.multiplier
        values = wide_moments(task, plan.multiplier * decided, 1 - group["betas"][1] ** plan.step)
        stride, before = dense(parameter).stride(), self.state[parameter]
        state = self.state[parameter] = {"step": before["step"]}
        for name, value in zip(plan.algorithm.moments, values, strict=True):
            state[name] = value.as_strided(parameter.shape, stride)
        if REMAINDER in before:
            state[REMAINDER] = before[REMAINDER]
        state[FELL_BACK] = new_step(plan.step)

    def _name(self, parameter: nn.Parameter) -> str:
        """The parameter's name if the optimizer was made with names, else its number and shape."""
        [(group, stream)] = self._find(parameter)
        at = [*map(id, group["params"])].index(id(parameter))
        names = group.get("param_names")
        return str(names[at]) if names else f"parameter {stream} of shape {tuple(parameter.shape)}"

    def fill_(self) -> None:
        """Give each trained parameter the state that a first step would, at step 0.

        A loader reads only what it finds here, and torch's begins no optimizer that has a state.
        """
        for _, group, parameter in self._members():
            if parameter.requires_grad:
                self._state(group, parameter)

    as_values = staticmethod(as_values)

    def as_stored(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """A state as it is stepped on: the inverse of :func:`as_values`, bit for bit."""
        wide = [key for key, v in state.items() if v.dtype == torch.bfloat16 and key != REMAINDER]
        eight = self.storage["moments"] == "8bit" and FELL_BACK not in state
        return self.convert(parameter, state) if wide and eight else state

    def _state(self, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not fits(state, dense(parameter)):  # as after a change of the memory format
            state = self.convert(parameter, state)
        if "step" not in state:
            state["step"] = new_step(0)
        for name in self.algorithm_of(group).moments:
            if stored_moment(state, name)[0] is None:
                state |= zero_moment(name, parameter, self.storage["moments"] or "fp32")
        dtype = ROUNDING[update_of(self.storage["update"], parameter)].remainder_dtype
        if dtype is not None and REMAINDER not in state:
            state[REMAINDER] = torch.zeros_like(parameter, dtype=dtype)
        self.state[parameter] = state
        return state

    def _task(
        self, rule: Algorithm, parameter: Tensor, state: dict[str, Any], stream: int
    ) -> StepTask:
        none = torch.empty(0, dtype=torch.uint8)
        stored = [stored_moment(state, name) for name in rule.moments]
        remainder, data = state.get(REMAINDER), dense(parameter)
        return StepTask(
            weight=flat(data, data),
            remainder=None if remainder is None else flat(remainder, data),
            moments=tuple(flat(values, data) for values, _ in stored if values is not None),
            tops=tuple(none if tops is None else tops for _, tops in stored),
            gradient=_NO_GRADIENT,
            stream=stream,
        )

    def read_master(self, parameter: nn.Parameter) -> Tensor:
        """The exact fp32 value of each element of the parameter, as a new tensor."""
        return self.read_masters([parameter])[0]

    @torch.no_grad()
    def read_masters(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """What :meth:`read_master` gives for each of the parameters; one launch on a GPU."""
        found: dict[tuple[Any, ...], list[tuple[StepTask, Tensor]]] = {}
        values = []
        places = self._find(*parameters)
        for parameter, (_, stream) in zip(parameters, places, strict=True):
            data, update = dense(parameter), update_of(self.storage["update"], parameter)
            values.append(torch.empty_like(data, dtype=torch.float32))
            held = self.state.get(parameter, {}).get(REMAINDER)
            if held is None:  # nothing is kept beside the weight, or not yet
                update = "nearest"
            rest = None if held is None else flat(held, data)
            task = StepTask(flat(data, data), rest, (), (), _NO_GRADIENT, stream)
            key = update, data.dtype, data.device
            found.setdefault(key, []).append((task, flat(values[-1], data)))
        for (update, *_), members in found.items():
            batch, into = Batch([task for task, _ in members]), [value for _, value in members]
            (cuda if _by_triton(batch) else reference).read_masters(batch, into, update)
        return values

    @torch.no_grad()
    def write_master_(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the parameter, and its remainder where it has one, to values of its shape.

        A rounding mode that draws random bits uses those of step 0 of the parameter's own stream.
        """
        [(_, stream)] = self._find(parameter)
        data, update = dense(parameter), update_of(self.storage["update"], parameter)
        dtype, held = ROUNDING[update].remainder_dtype, None
        if dtype is not None:
            self.state[parameter][REMAINDER] = held = torch.zeros_like(data, dtype=dtype)
            held = flat(held, data)
        new = flat(value.detach().float(), data)
        task = StepTask(flat(data, data), held, (), (), new, stream)
        run_kernel(Batch([task]), Plan(SET, (), update, "fp32", 1.0, self.storage["seed"], 0))
        write_back(parameter, data)

    def _find(self, *parameters: nn.Parameter) -> list[tuple[dict[str, Any], int]]:
        """The group of each of the parameters, and its index over all groups."""
        places = {p: (group, stream) for stream, (_, group, p) in enumerate(self._members())}
        if any(parameter not in places for parameter in parameters):
            raise PrecisionError("the parameter does not belong to this optimizer")
        return [places[parameter] for parameter in parameters]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of ``torch.optim``'s, in any moment format.

        Moments are converted to this optimizer's format, exactly unless the saved ones are finer;
        remainders are loaded if both optimizers keep the same kind.
        """
        fresh: dict[Tensor, dict[str, Any]] = {}

        # ``before`` runs after all other pre-hooks, so it sees the state as they changed it. torch
        # then loads the groups only. ``after`` sets the state before any other post-hook reads it.
        def before(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            fresh.update(self._converted(given))
            groups = given["param_groups"]  # older ones also say how tensors were stored
            kept = [{k: v for k, v in g.items() if k not in self.storage} for g in groups]
            return {**given, "state": {}, "param_groups": kept}

        def after(_: Optimizer) -> None:
            self.state.clear()
            self.state.update(fresh)
            for group, options in zip(self.param_groups, own, strict=True):
                # a group of another optimizer's lacks some options
                group.update({k: v for k, v in options.items() if k not in group})

        own = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        handles = (
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(after, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _converted(self, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """The states of a whole ``state_dict``, in this optimizer's formats, by parameter."""
        groups = state_dict["param_groups"]
        for option in ("amsgrad", "maximize"):
            if any(group.get(option) for group in groups):
                raise PrecisionError(
                    f"the saved state is from an optimizer with {option}=True, which "
                    f"{type(self).__name__} does not have"
                )
        numbers = (number for group in groups for number in group["params"])
        places = zip(numbers, self._members(), strict=False)
        state = state_dict["state"]
        return {p: self.convert(p, state[n]) for n, (_, _, p) in places if n in state}

    def convert(self, parameter: nn.Parameter, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a parameter's saved state, from any optimizer, to this optimizer's formats."""
        [(group, stream)] = self._find(parameter)
        return convert(
            self.algorithm_of(group).moments,
            dense(parameter),
            entry,
            update=update_of(self.storage["update"], parameter),
            moments=self.storage["moments"] or "fp32",
            seed=self.storage["seed"],
            stream=stream,
        )


# The choice of a kernel, by device and compilers; all give the same bits.


def run_kernel(batch: Batch, plan: Plan) -> None:
    """Take a step on tensors that share a plan, by the fastest kernel that there is for them."""
    rule = plan.algorithm.name
    if rule in (*RULES, SET.name) and _by_triton(batch, plan):
        cuda.run_cuda(batch, plan)
        return
    compiled = native_kernel() if batch.tasks[0].weight.is_cpu and rule in RULES else ""
    if isinstance(compiled, str):
        reference.run_torch(batch, plan)
    else:
        compiled.run(batch, plan)


def _by_triton(batch: Batch, plan: Plan | None = None) -> bool:
    """Whether the Triton kernels take a batch: on CUDA, and where the device has decided."""
    decided = plan is not None and plan.decision is not None
    on_gpu = decided or batch.tasks[0].weight.is_cuda
    return on_gpu and not isinstance(cuda.triton_kernels(), str)
