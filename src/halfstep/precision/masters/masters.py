"""Who owns the weights that the optimizer updates, and where their gradients are.

With 16-bit weights an update smaller than half the gap between neighbouring numbers rounds to
nothing: at 1.0 the bf16 gap is 2^-7, so 100 updates of 1e-3 leave 1.0. Either an fp32 copy, the
master, takes the updates, and the 16-bit weight is rounded from it after every step; or one of
halfstep's optimizers keeps beside the weight what it cannot hold.

What a user can see stays the truth all the while:

* Gradients are in ``p.grad`` of the model's own parameters (``arrivals.py``).
* The optimizers' groups and states hold the model's own parameters. Masters, and this rank's parts
  of sharded parameters, stand in their places only while an optimizer steps (:meth:`installed`).
* A weight that was written in place is the weight: its master takes the value over before it is
  used (:meth:`take_written_`).

**Source:** Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import PrecisionError
from halfstep.precision.border import require
from halfstep.precision.casting.cast import cast_parameters_
from halfstep.precision.masters.arrivals import Arrivals
from halfstep.precision.masters.local_part import is_sharded, local_gradient, local_part, place_like
from halfstep.precision.masters.portable import Loaded
from halfstep.precision.masters.stepping import (
    Gradients,
    KeepsMasters,
    StepHooks,
    takes_gradients,
)
from halfstep.precision.policy.policy import LOW, dtype_name
from halfstep.precision.policy.rules import PlacedModel, place
from halfstep.precision.scaling.gradients import multiply_

# Elements that are compared at a time: a rounded copy of them stays in the caches.
_CHUNK = 2**15


@dataclass(frozen=True, slots=True)
class Weight:
    """One trainable parameter."""

    name: str  # its name in the model
    parameter: nn.Parameter  # the model's own, which holds the gradient
    # what the optimizer updates: the parameter itself, this rank's part of it in the same memory,
    # or an fp32 master
    target: nn.Parameter
    dtype: torch.dtype  # of the parameter
    copied: bool  # whether the target is an fp32 master, to be rounded into the parameter
    sharded: bool  # whether the parameter is a DTensor
    held: bool  # whether an optimizer has it
    keeper: KeepsMasters | None  # the optimizer that keeps what 16 bits cannot hold, or None

    @property
    def visible(self) -> Tensor:
        """What the model computes with on this rank."""
        return (local_part(self.parameter) if self.sharded else self.parameter).detach()

    @property
    def gradient(self) -> Tensor | None:
        """The finished gradient's part on this rank."""
        return local_gradient(self.parameter) if self.sharded else self.parameter.grad

    def require_unconverted(self) -> None:
        """Refuse a parameter that was converted or moved since it was taken in."""
        parameter, device = self.parameter, self.target.device
        if parameter.dtype == self.dtype and parameter.device == device:
            return
        raise PrecisionError(
            f"{self.name} is {dtype_name(parameter.dtype)} on {parameter.device} now, and was "
            f"{dtype_name(self.dtype)} on {device} when Precision took it: the model was "
            "converted or moved since (model.to, .half, .float, .cuda). Do that first, then make "
            "the optimizer and Precision"
        )


class MasterWeights:
    """All that is trained, by the model's names, and its way from the gradient to the weight."""

    def __init__(self, placed: PlacedModel, optimizers: Sequence[Optimizer]) -> None:
        """Cast the model in place to the policy's weights, and keep what the cast loses.

        Args:
            placed: The policy and the model, whose Parameter objects stay the same objects; only
                their storage changes.
            optimizers: Those of halfstep take the policy's rounding and format of moments.

        Raises:
            PrecisionError: If an optimizer was made for other formats than the policy's; nothing
                is changed then.
        """
        policy, model = placed.policy, placed.model
        own: list[Any] = [o for o in optimizers if isinstance(o, KeepsMasters)]
        for optimizer in own:
            optimizer.check_precision(policy.update, policy.moment_format)
        for optimizer in own:
            optimizer.set_precision(policy.update, policy.moment_format)
        self.arrivals = Arrivals(policy, model)
        self._policy = policy
        self._model = model
        self._optimizers = optimizers
        self._weights: dict[Tensor, Weight] = {}  # by the model's parameter
        self._settled: set[int] = set()  # ids of held parameters that have nothing more to wait for
        self._to_target: dict[Tensor, nn.Parameter] = {}
        self._to_parameter: dict[Tensor, nn.Parameter] = {}
        self._installed = False
        self.handles: list[RemovableHandle] = []
        """Hooks of the optimizers, to be removed with this."""
        # those that cannot be given gradients and look for them in ``grad``
        self._looking = [o for o in optimizers if not takes_gradients(o)]
        self._hooks = StepHooks() if policy.has_masters else None
        for optimizer in optimizers:
            self.handles += _load_into_targets(optimizer, weakref.ref(self))
            if self._hooks is not None:
                self.handles += self._hooks.surround(optimizer, weakref.ref(self))
        self._loaded = Loaded()
        if policy.keeps_more_than_weights:
            self.handles.append(model.register_load_state_dict_pre_hook(self._loaded))  # type: ignore[no-untyped-call]
        self._adopt_all(placed)
        if policy.param_dtype != torch.float32:  # what is frozen, or no optimizer's
            cast_parameters_(model, placed.dtypes())

    # What is trained

    def adopt(self) -> None:
        """Take in parameters that have become trainable or have come to an optimizer.

        Those that are 16 bit by then start from their 16-bit values; others are cast.

        Raises:
            PrecisionError: If an optimizer was given a tensor that is not the model's, or a
                parameter was converted since it was taken in.
        """
        self._install(False)  # in case that a load of a state has raised half-way
        settled = self._settled
        held = (p for o in self._optimizers for group in o.param_groups for p in group["params"])
        for weight in self._weights.values():
            weight.require_unconverted()
        if all(id(p) in settled or not p.requires_grad for p in held):
            return
        for optimizer in self._optimizers:
            if isinstance(optimizer, KeepsMasters):
                self._take_in(optimizer)
        with torch.inference_mode(False):  # a master made inside could never be updated
            self._adopt_all(place(self._policy, self._model))  # it may have new modules by now
        strangers = [p for p in self._held() if p.requires_grad and p not in self._weights]
        if strangers:
            raise PrecisionError(
                f"the optimizer was given a tensor of shape {tuple(strangers[0].shape)} that is "
                "not a parameter of the model; add it to the model first, or give it to another "
                "optimizer"
            )

    @torch.no_grad()
    def _adopt_all(self, placed: PlacedModel) -> None:
        held, dtypes = self._held(), placed.dtypes()
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            known = self._weights.get(parameter)
            if known is None or (parameter in held and not known.held):
                dtype = dtypes.get(name, parameter.dtype)
                self._weights[parameter] = self._adopt(name, parameter, dtype, held)
            if parameter in held:
                self._settled.add(id(parameter))

    def _adopt(
        self, name: str, parameter: nn.Parameter, dtype: torch.dtype, held: Mapping[Tensor, Any]
    ) -> Weight:
        sharded = is_sharded(parameter)
        exact = local_part(parameter).detach()  # before the cast
        low = dtype in LOW
        if parameter.dtype != dtype:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
        target = parameter
        copied = low and self._policy.has_masters and parameter in held
        keeper = held.get(parameter) if low and self._policy.update != "nearest" else None
        if copied:
            target = nn.Parameter(exact.to(torch.float32, copy=True))
        elif sharded:
            target = nn.Parameter(local_part(parameter))
        if target is not parameter:
            self._to_target[parameter], self._to_parameter[target] = target, parameter
        if parameter not in self._weights:
            self.arrivals.watch(parameter)
        if keeper is not None:
            with self.installed():
                keeper.write_master_(target, exact.float())
        return Weight(name, parameter, target, dtype, copied, sharded, parameter in held, keeper)

    def _held(self) -> dict[Tensor, KeepsMasters | None]:
        """The optimizers' parameters, as the model has them, and whether one keeps masters."""
        found: dict[Tensor, KeepsMasters | None] = {}
        for optimizer in self._optimizers:
            keeper = optimizer if isinstance(optimizer, KeepsMasters) else None
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found[self._to_parameter.get(parameter, parameter)] = keeper
        return found

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizers update, by the model's names: masters, parts or parameters."""
        return {weight.name: weight.target for weight in self._current()}

    def parameter_of(self, target: nn.Parameter) -> nn.Parameter:
        """The model's own parameter that a target stands for."""
        return self._to_parameter.get(target, target)

    def _take_in(self, optimizer: Any) -> None:
        """Let groups that came to one of halfstep's optimizers be kept as the policy says."""
        for group in optimizer.param_groups:
            if group["update"] is None:
                group["update"] = self._policy.update
            if group["moments"] is None:
                group["moments"] = self._policy.moment_format

    # Between the model and the optimizers

    @contextmanager
    def installed(self, yes: bool = True) -> Iterator[None]:
        """Inside, the optimizers' groups and states hold targets in the parameters' places.

        With False they hold the parameters meanwhile, for code of the user's.
        """
        before = self._installed
        self._install(yes)
        try:
            yield
        finally:
            self._install(before)

    def _install(self, yes: bool) -> None:
        if yes == self._installed:
            return
        self._installed = yes
        table = self._to_target if yes else self._to_parameter
        if not table:
            return
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                # in place: some optimizers hold on to the list itself
                group["params"][:] = [table.get(p, p) for p in group["params"]]
            states = [(table.get(p, p), state) for p, state in optimizer.state.items()]
            optimizer.state.clear()
            for parameter, state in states:
                optimizer.state[parameter] = _local_state(state) if yes else state

    def gradients(
        self, targets: Sequence[nn.Parameter] | None = None
    ) -> dict[nn.Parameter, Tensor]:
        """Target to finished gradient on this rank, of those that have one.

        Of these targets alone, or of all that the optimizers hold, in their order.
        """
        if targets is None:
            parameters = [*self._held()]
        else:
            parameters = [self._to_parameter.get(target, target) for target in targets]
        found = {}
        for parameter in parameters:
            weight = self._weights.get(parameter)
            if weight is None:  # frozen
                continue
            weight.require_unconverted()
            gradient = weight.gradient
            if gradient is not None:
                found[weight.target] = gradient
        return found

    def replace(self, gradients: Gradients) -> None:
        """Set finished gradients by target: the sums over all ranks; others keep theirs."""
        for target, gradient in gradients.items():
            parameter = self._to_parameter.get(target, target)
            if parameter.dtype in LOW and self._policy.grad_dtype != torch.float32:
                gradient = gradient.to(parameter.dtype)
            parameter.grad = place_like(gradient, parameter)

    def trains(self, tensors: Sequence[Tensor]) -> bool:
        """Whether any of some tensors is a parameter that an optimizer holds."""
        found = (self._weights.get(tensor) for tensor in tensors)
        return any(weight is not None and weight.held for weight in found)

    def note(self) -> None:
        """Remember how a backward has left the gradients: see :meth:`Arrivals.cleared`."""
        self.arrivals.note(weight.parameter for weight in self._weights.values() if weight.held)

    def clear(self) -> None:
        """Forget the gradients of all that the optimizers hold."""
        for parameter in self._held():
            parameter.grad = None
            target = self._to_target.get(parameter)
            if target is not None:
                target.grad = None

    @torch.no_grad()
    def take_written_(self) -> None:
        """Let masters take over what was written into the model's weights.

        Where the weight is not its rounded master, it was written by somebody else. Beside a
        remainder no comparison is needed: see :func:`rounding.join`. Weights
        that ``model.load_state_dict`` has changed are taken as they are, remainders dropped.
        """
        for weight in self._weights.values():
            if weight.keeper is None and not weight.copied:
                continue
            if self._was_loaded(weight):
                self._set_(weight, weight.visible)
            elif weight.copied:
                _follow_(weight.target.detach(), weight.visible)
        self._loaded.before.clear()

    def _was_loaded(self, weight: Weight) -> bool:
        before = self._loaded.before
        return bool(before) and self._loaded.changed(weight.name, weight.visible)

    @torch.no_grad()
    def take_all_(self) -> None:
        """Take every weight exactly as it is, and drop what lies behind it."""
        for weight in self._weights.values():
            self._set_(weight, weight.visible)
        self._loaded.before.clear()

    def _set_(self, weight: Weight, value: Tensor) -> None:
        """Let a weight, or its master, stand for a value of any floating dtype."""
        keeper = self._keeper(weight)
        if keeper is None:
            weight.target.copy_(value)
        else:
            with self.installed():
                keeper.write_master_(weight.target, value.float())

    def update_(self, gradients: Gradients, factor: float) -> None:
        """Let the optimizers step with the gradients times ``factor``, down to the weights."""
        hooks = self._hooks
        with self.installed():
            self.hand_over(self._looking, gradients, factor)
            with nullcontext() if hooks is None else hooks.stepping(self, gradients):
                self._step(gradients, factor)
        self.push_(gradients)

    def _step(self, gradients: Gradients, factor: float) -> None:
        """Step: those that take them with these gradients times ``factor``, others as they are."""
        if len(self._optimizers) > 1:  # a single one checks for itself
            for keeper in self._optimizers:
                if isinstance(keeper, KeepsMasters):
                    keeper.check_step(gradients)
        for optimizer in self._optimizers:
            if optimizer in self._looking:
                optimizer.step()
            else:
                step: Any = optimizer.step
                step(gradients=gradients, multiplier=factor)

    def hand_over(
        self, optimizers: Sequence[Optimizer], gradients: Gradients, factor: float
    ) -> None:
        """Let ``target.grad`` be the gradient times ``factor``, in a format the optimizer takes.

        What has to be widened is widened one by one, and the 16-bit gradient freed.
        """
        given: list[Tensor] = []
        for optimizer in optimizers:
            takes_any = isinstance(optimizer, KeepsMasters)
            for group in optimizer.param_groups:
                for target in group["params"]:
                    if target not in gradients:
                        continue
                    if takes_any:
                        target.grad_dtype = None
                        target.grad = gradients[target]
                    else:
                        target.grad = gradients[target].to(target.dtype)
                    given.append(target.grad)
                    if target in self._to_parameter:
                        self._to_parameter[target].grad = None
        multiply_(given, factor)

    @torch.no_grad()
    def push_(self, targets: Mapping[nn.Parameter, Any] | None = None) -> None:
        """Round masters to nearest into their weights; those that did not step are left alone."""
        copies = [
            weight
            for weight in self._weights.values()
            if weight.copied and (targets is None or weight.target in targets)
        ]
        if copies:
            torch._foreach_copy_([w.visible for w in copies], [w.target for w in copies])

    def rounded(self) -> list[tuple[Tensor, Tensor]]:
        """Masters and the weights that are rounded from them."""
        weights = self._weights.values()
        return [(w.target.detach(), w.visible) for w in weights if w.copied]

    # Exact values

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and what the weight stands for, exact, one after the other."""
        for weight in self._current():
            keeper = self._keeper(weight)
            if keeper is None:
                value = weight.target.detach()
                # what no optimizer holds has no master, and is saved beside them in their format
                alone = value.dtype in LOW and self._policy.keeps_more_than_weights
                yield weight.name, value.float() if alone else value
            else:
                with self.installed():
                    value = keeper.read_master(weight.target)
                yield weight.name, value

    def _current(self) -> list[Weight]:
        """One weight of each name: the newest, where a module was replaced by another."""
        return [*{weight.name: weight for weight in self._weights.values()}.values()]

    def _keeper(self, weight: Weight) -> KeepsMasters | None:
        """The optimizer that keeps a weight's remainder; None once it has been taken from it."""
        keeper: Any = weight.keeper
        if keeper is None:
            return None
        targets = (weight.parameter, weight.target)
        groups = keeper.param_groups
        held = any(p is t for group in groups for p in group["params"] for t in targets)
        return weight.keeper if held else None

    @torch.no_grad()
    def exact(self, parameter: Tensor) -> Tensor:
        """The fp32 values that a parameter stands for, in memory of their own."""
        weight = self._weights.get(parameter)
        keeper = None if weight is None else self._keeper(weight)
        if weight is None or (keeper is None and not weight.copied):
            return parameter.detach().to(torch.float32, copy=True)
        if self._was_loaded(weight):
            return weight.visible.to(torch.float32, copy=True)
        if keeper is None:  # the master stays: what was written may be there for a while only
            value = weight.target.detach().clone(memory_format=torch.preserve_format)
            _follow_(value, weight.visible)
            return value
        with self.installed():
            return keeper.read_master(weight.target)

    @torch.no_grad()
    def load_(self, values: Mapping[str, Tensor]) -> None:
        """Set every weight from :meth:`items`, of this policy or of another."""
        allowed = "fp32 tensors by the names of Precision.named_parameters()"
        for weight in self._current():
            table = require(values, Mapping, "start_from_(values)", allowed)
            value = require(table.get(weight.name), Tensor, f"start_from_({weight.name})", allowed)
            if value.shape != weight.target.shape:
                raise PrecisionError(
                    f"start_from_({weight.name}) got shape {tuple(value.shape)}; allowed: "
                    f"{tuple(weight.target.shape)}, the shape of the parameter, or of this rank's "
                    "part of it"
                )
        for weight in self._current():
            self._set_(weight, values[weight.name])
        self.push_()
        self._loaded.before.clear()

    def close(self) -> None:
        """Give the parameters back as plain ones; gradients are dropped."""
        self.clear()
        self.arrivals.close()


def _load_into_targets(
    optimizer: Optimizer, masters: weakref.ref[MasterWeights]
) -> list[RemovableHandle]:
    """Let states be loaded beside the targets: torch casts moments to the dtype of those."""

    def install(yes: bool) -> None:
        held = masters()
        if held is not None:
            held._install(yes)

    return [
        optimizer.register_load_state_dict_pre_hook(lambda *_: install(True)),
        optimizer.register_load_state_dict_post_hook(lambda *_: install(False)),
    ]


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    """State that was made for sharded parameters, as this rank's parts of it."""
    if not any(isinstance(value, Tensor) and is_sharded(value) for value in state.values()):
        return state
    return {k: local_part(v) if isinstance(v, Tensor) else v for k, v in state.items()}


def _follow_(master: Tensor, visible: Tensor) -> None:
    """Let a master be the weight where the weight is not the rounded master."""
    if visible.stride() != master.stride() or not visible.is_contiguous():
        _follow_piece_(master, visible)
        return
    pieces = torch.split(master.view(-1), _CHUNK), torch.split(visible.view(-1), _CHUNK)
    for piece, seen in zip(*pieces, strict=True):
        _follow_piece_(piece, seen)


def _follow_piece_(master: Tensor, visible: Tensor) -> None:
    rounded = master.to(visible.dtype)
    if not torch.equal(rounded.view(torch.int16), visible.view(torch.int16)):
        written = rounded.view(torch.int16) != visible.view(torch.int16)
        master.copy_(torch.where(written, visible.float(), master))
