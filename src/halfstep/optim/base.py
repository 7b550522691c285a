"""The optimizers' common part: state, steps, and the fp32 masters they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.checks import check_gradient, check_group, check_updates
from halfstep.optim.dispatch import norm, run
from halfstep.optim.kernel import Plan, Task, flat
from halfstep.optim.moments import Moments
from halfstep.optim.state import REMAINDER, Form, convert, tops_of, zero_moment
from halfstep.optim.weights import REMAINDER_DTYPES, master, store_
from halfstep.precision.policy import Update
from halfstep.precision.rounding import random_bits

_OWN = ("update", "moments", "seed")


class LowPrecisionOptimizer(Optimizer):
    """An optimizer whose weights and moments may be of less than 32 bits.

    Group options besides the algorithm's own:

    * ``update``: how an update reaches a bf16 weight, see
      :class:`~halfstep.precision.policy.PrecisionPolicy`. None lets :class:`halfstep.Precision`
      choose, and is refused for bf16 weights without it.
    * ``moments``: ``"fp32"``, ``"bf16"`` or ``"8bit"``; the last two round stochastically.
    * ``seed``: of the random bits, which depend on it, the step and the (part's) element alone.
    """

    algorithm: ClassVar[Algorithm]
    # torch.amp.GradScaler then hands over its scale and its flag instead of reading the flag.
    _step_supports_amp_scaling = True
    accepts_low_precision_gradients = True
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        update: Update | None,
        moments: Moments | None,
        seed: int,
    ) -> None:
        super().__init__(params, {**defaults, "update": update, "moments": moments, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ``torch.optim`` does; :func:`check_group` says what is refused."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group, type(self).__name__)
        except PrecisionError:
            self.param_groups.pop()
            raise

    def check_precision(self, update: Update, moments: Moments) -> None:
        """Refuse the ways of a policy that this optimizer cannot take.

        Raises:
            PrecisionError: If a group was made with another one, or the optimizer has stepped.
        """
        if moments not in get_args(Moments):
            raise PrecisionError(
                f"moments={moments!r}: {type(self).__name__} keeps {', '.join(get_args(Moments))}"
            )
        if self.state:
            raise PrecisionError("the optimizer has stepped already; set its precision before")
        for group in self.param_groups:
            for key, wanted in (("update", update), ("moments", moments)):
                if group[key] not in (None, wanted):
                    raise PrecisionError(
                        f"the optimizer was made with {key}={group[key]!r}, the policy says "
                        f"{wanted!r}; leave {key} out there, or change the policy"
                    )

    def set_precision(self, update: Update, moments: Moments) -> None:
        """Take the ways of keeping weights and moments from a policy.

        Raises:
            PrecisionError: As :meth:`check_precision`; nothing is changed then.
        """
        self.check_precision(update, moments)
        for group in self.param_groups:
            group["update"], group["moments"] = update, moments

    def check_step(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Refuse gradients that a step cannot take.

        Raises:
            PrecisionError: If a bf16 weight has no ``update``, or a gradient is sparse, of another
                shape or dtype.
        """
        check_updates(self.param_groups, type(self).__name__)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in gradients:
                    check_gradient(parameter, gradients[parameter])

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        gradients: Mapping[nn.Parameter, Tensor] | None = None,
        multiplier: float = 1.0,
    ) -> Any:
        """Take one step.

        Args:
            closure: Computes the loss anew and returns it; as in ``torch.optim``.
            gradients: Used instead of each parameter's ``grad``: fp32, bf16 or fp16.
            multiplier: Every gradient is multiplied by this on the fly (unscaling, clipping).

        Raises:
            PrecisionError: As :meth:`check_step`; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and found.item():
            return loss
        if scale is not None:
            multiplier = multiplier / scale.item()
        for plan, tasks in self._plans(gradients, multiplier):
            run(tasks, plan)
        return loss

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients together: fp32 scalar, NaN or inf if an element is."""
        return norm(gradients)

    def _plans(
        self, gradients: Mapping[nn.Parameter, Tensor] | None, multiplier: float
    ) -> list[tuple[Plan, list[Task]]]:
        """Tasks that one kernel call can do together: same group, step and dtypes."""
        if gradients is None:
            every = (p for group in self.param_groups for p in group["params"])
            gradients = {p: p.grad for p in every if p.grad is not None}
        self.check_step(gradients)
        stream = -1
        found: dict[tuple[Any, ...], tuple[Plan, list[Task]]] = {}
        work = []
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                stream += 1
                gradient = gradients.get(parameter)
                if gradient is not None:
                    work.append((number, group, parameter, gradient, stream))
        for number, group, parameter, gradient, stream in work:
            state = self._state(group, parameter)
            state["step"] += 1
            step = int(state["step"])
            update = _update(group, parameter)
            key = (number, step, update, parameter.dtype, gradient.dtype, parameter.device)
            if key not in found:
                constants = self.algorithm.constants(group, step)
                plan = Plan(
                    self.algorithm,
                    constants,
                    update,
                    _moments(group),
                    multiplier,
                    group["seed"],
                    step,
                )
                found[key] = (plan, [])
            found[key][1].append(self._task(parameter, gradient, state, stream))
        return list(found.values())

    def _state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """The parameter's state, made where there is none."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros(())
        for name in self.algorithm.moments:
            if name not in state:
                state |= zero_moment(name, parameter, _moments(group))
        dtype = REMAINDER_DTYPES[_update(group, parameter)]
        if dtype is not None and REMAINDER not in state:
            state[REMAINDER] = torch.zeros_like(parameter, dtype=dtype)
        return state

    def _task(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], stream: int
    ) -> Task:
        names = self.algorithm.moments
        none = torch.empty(0, dtype=torch.uint8)
        remainder = state.get(REMAINDER)
        data = parameter.detach()
        return Task(
            weight=flat(data, data),
            remainder=None if remainder is None else flat(remainder, data),
            moments=tuple(flat(state[name], data) for name in names),
            tops=tuple(state.get(tops_of(name), none) for name in names),
            gradient=flat(gradient.detach(), data),
            stream=stream,
        )

    @torch.no_grad()
    def read_master(self, parameter: nn.Parameter) -> Tensor:
        """The fp32 number that each element of the parameter stands for; a new tensor."""
        group, _ = self._find(parameter)
        data = parameter.detach()
        remainder = self.state.get(parameter, {}).get(REMAINDER)
        held = None if remainder is None else flat(remainder, data)
        value = master(flat(data, data), held, _update(group, parameter))
        if data.dtype == torch.float32:
            value = value.clone()
        return value.as_strided(data.shape, data.stride())

    @torch.no_grad()
    def write_master_(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the parameter, and its remainder where it has one, to fp32 values of its shape."""
        group, stream = self._find(parameter)
        update = _update(group, parameter)
        data = parameter.detach()
        dtype = REMAINDER_DTYPES[update]
        held = None
        if dtype is not None:
            held = torch.zeros_like(data, dtype=dtype)
            self.state[parameter][REMAINDER] = held
            held = flat(held, data)
        bits = random_bits(group["seed"], 0, data.numel(), stream=2 * stream, device=data.device)
        store_(flat(data, data), held, update, flat(value.detach().float(), data), bits)

    def _find(self, parameter: nn.Parameter) -> tuple[dict[str, Any], int]:
        """The parameter's group and its number over all groups."""
        number = 0
        for group in self.param_groups:
            for candidate in group["params"]:
                if candidate is parameter:
                    return group, number
                number += 1
        raise PrecisionError("the parameter is not this optimizer's")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of ``torch.optim``'s, in any moment format.

        Moments are converted to this optimizer's format, exactly unless the saved ones are finer;
        remainders are taken where both keep the same kind.

        Raises:
            PrecisionError: If a moment is missing or of another shape; nothing is changed then.
        """
        saved = state_dict["state"]
        for option in ("amsgrad", "maximize"):
            if any(group.get(option) for group in state_dict["param_groups"]):
                raise PrecisionError(
                    f"the saved state is of an optimizer with {option}=True, which "
                    f"{type(self).__name__} has not"
                )
        parameters = [p for group in self.param_groups for p in group["params"]]
        fresh = {}
        for number, entry in saved.items():
            if not 0 <= number < len(parameters):
                raise PrecisionError(
                    f"the saved state is of {number + 1} or more parameters, this optimizer has "
                    f"{len(parameters)}"
                )
            fresh[number] = self.convert(parameters[number], entry)
        own = [{key: group[key] for key in _OWN} for group in self.param_groups]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, options in zip(self.param_groups, own, strict=True):
            group.update(options)
        self.state.clear()
        for number, state in fresh.items():
            self.state[parameters[number]] = state

    def convert(self, parameter: nn.Parameter, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's saved state, of this optimizer or another, in this one's formats.

        Raises:
            PrecisionError: If a moment is missing or of another shape.
        """
        group, stream = self._find(parameter)
        form = Form(_update(group, parameter), _moments(group), group["seed"], stream)
        return convert(self.algorithm.moments, form, parameter.detach(), entry)


def _update(group: dict[str, Any], parameter: Tensor) -> Update:
    """How a parameter of a group is kept; fp32 weights need no way of their own."""
    chosen: Update = group["update"] or "nearest"
    return chosen if parameter.dtype == torch.bfloat16 else "nearest"


def _moments(group: dict[str, Any]) -> Moments:
    chosen: Moments = group["moments"] or "fp32"
    return chosen
