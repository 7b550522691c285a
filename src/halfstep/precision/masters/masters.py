"""Master weights: the tensors that optimizers update in place of the model's parameters.

With 16-bit weights an update smaller than half the gap between neighbouring numbers rounds to
nothing: at 1.0 the bf16 gap is 2^-7, so after 100 updates of 1e-3 the weight is still 1.0.
Therefore either an fp32 copy, the master, is updated, and the 16-bit weight is rounded from it
after every step; or one of halfstep's optimizers stores the lost bits beside the weight.

What a user sees between steps is always valid:

* Gradients are in ``p.grad`` of the model's own parameters (``accumulation.py``).
* The optimizers' groups and states hold the model's own parameters. Masters, and this rank's parts
  of sharded parameters, replace them only while an optimizer steps (``states.py``).
* A weight that was written in place counts: its master adopts the value before it is used
  (:meth:`take_written_`).

**Source:** Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import PrecisionError
from halfstep.precision.casting.cast import cast_parameters_
from halfstep.precision.masters.accumulation import GradientAccumulation
from halfstep.precision.masters.local_part import (
    as_target,
    cast_,
    flattened,
    fsdp_parameters,
    is_sharded,
    local_gradient,
    local_part,
    runs,
    split_like,
    sum_in_,
)
from halfstep.precision.masters.rounding import REMAINDER, master
from halfstep.precision.masters.states import MASTER, Exchange
from halfstep.precision.masters.stepping import (
    DeviceDecision,
    Gradients,
    Movement,
    OwnOptimizer,
    has_users,
    takes_gradients,
    with_inner,
)
from halfstep.precision.policy.policy import LOW
from halfstep.precision.policy.rules import PlacedModel, place

# Number of elements compared at a time: small enough that their rounded copy stays in the caches.
_CHUNK = 2**15
_MANY = 2**24
"""Number of elements compared in one launch on a GPU, of tensors of a quarter of it at most."""
_READ = 2**25  # elements of masters that are read at once: 128 MB, for few launches on a GPU


@dataclass(frozen=True, slots=True)
class Weight:
    """One trainable parameter and the tensor that the optimizer updates for it."""

    name: str  # its name in the model
    parameter: nn.Parameter  # the model's own, which holds the gradient
    # the tensor that the optimizer updates: the parameter itself, this rank's part of it in the
    # same memory, or an fp32 master
    target: nn.Parameter
    copied: bool  # whether the target is an fp32 master, to be rounded into the parameter
    sharded: bool  # whether the parameter is a DTensor
    held: bool  # whether an optimizer holds it
    keeper: Any  # the optimizer of ours that keeps the bits lost by 16 bits, or None

    @property
    def visible(self) -> Tensor:
        """The tensor that the model computes with on this rank; to be written without gradients."""
        return local_part(self.parameter) if self.sharded else self.parameter


@dataclass(frozen=True, slots=True)
class _Held:
    """What the optimizers hold, and what follows from it; looked up once as long as it stays so."""

    ids: list[int]  # of the tensors in their groups
    by_parameter: dict[Tensor, Any]  # each with its optimizer if that is ours, or None
    weights: list[Weight]  # of those that are trained, in this order
    by_size: list[nn.Parameter]  # the same ones' parameters, the smallest first
    waiting: list[Tensor]  # the others: frozen, or not adopted yet


class MasterWeights:
    """All trained parameters of a model, and the steps from their gradients to their weights."""

    def __init__(self, placed: PlacedModel, optimizers: Sequence[Optimizer]) -> None:
        """Cast the model's Parameter objects in place, and keep what the cast loses.

        halfstep's own optimizers are set to the policy's rounding mode and moments.
        """
        policy, model = placed.policy, placed.model
        self._outer, self._optimizers = optimizers, with_inner(optimizers)
        self.own_optimizers: list[Any] = [
            o for o in self._optimizers if isinstance(o, OwnOptimizer)
        ]
        for optimizer in self.own_optimizers:
            optimizer.check_precision(policy.update, policy.moment_format)
        for optimizer in self.own_optimizers:
            optimizer.storage |= {"update": policy.update, "moments": policy.moment_format}
            optimizer.exchange = None  # of steps without a Precision
            optimizer.has_masters = policy.has_masters
            optimizer.state.clear()  # of a Precision that took no step
        self.accumulation = GradientAccumulation(policy, model)
        self._policy = policy
        self._model = model
        self._device = next(model.parameters()).device
        self.weights: dict[Tensor, Weight] = {}
        """Of the trained parameters, by the model's own."""
        self._kinds: list[tuple[torch.dtype, torch.device]] = []  # of the parameters, in order
        self._last: _Held | None = None  # what was last found to be held
        self.exchange = Exchange(self._optimizers, policy.update)
        self._to_target, self._to_parameter = self.exchange.to_target, self.exchange.to_parameter
        self._copies = policy.has_masters
        self._unrounded: set[nn.Parameter] = set()  # of a running step, not yet in their weights
        # optimizers whose ``step`` takes no gradients as an argument, but reads ``grad``
        self._looking = [
            o for o in self._optimizers if o not in optimizers or not takes_gradients(o)
        ]
        self._movement = Movement()
        self.handles = self.exchange.handles
        """Optimizer hooks, to be removed together with this object."""
        for optimizer in optimizers if self._copies else ():
            self.handles.append(_push_early(optimizer, weakref.ref(self)))
        self._adopt_all(placed)
        if policy.param_dtype != torch.float32:  # for parameters that are frozen or not held
            cast_parameters_(model, placed.dtypes())
            self._cast_states_()
        sum_in_(model, policy.reduce_dtype)
        self.accumulation.reduction.find(self.weights, renew=True)

    # Which parameters are trained

    def adopt(self) -> None:
        """Adopt parameters that have become trainable or were added to an optimizer.

        Those that are already 16-bit start from their 16-bit values; others are cast.
        """
        self.exchange.install(False)  # in case loading a state has raised half-way
        # model.to moves a parameter in place, or puts a new one in its place, as on meta
        moved = next(self._model.parameters()).device != self._device
        if moved or [(p.dtype, p.device) for p in self.weights] != self._kinds:
            raise PrecisionError(
                "a parameter has another dtype or device than when Precision took the model "
                "(model.to, .half, .float): convert it first, then make the optimizer and Precision"
            )
        if not any([p.requires_grad for p in self._held().waiting]):
            return
        with torch.inference_mode(False):  # a master made in inference mode cannot be updated
            self._adopt_all(place(self._policy, self._model))  # it may have new modules by now
        held = self._held().by_parameter
        strangers = [p for p in held if p.requires_grad and p not in self.weights]
        if strangers:
            raise PrecisionError(
                f"the optimizer was given a tensor of shape {tuple(strangers[0].shape)} that is "
                "not a parameter of the model; add it to the model first, or give it to another "
                "optimizer"
            )

    @torch.no_grad()
    def _adopt_all(self, placed: PlacedModel) -> None:
        held, dtypes = self._held().by_parameter, placed.dtypes()
        by_fsdp = fsdp_parameters(self._model)
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            known = self.weights.get(parameter)
            if known is None or (parameter in held and not known.held):
                dtype = dtypes.get(name, parameter.dtype)
                self.weights[parameter] = self._adopt(name, parameter, dtype, held, by_fsdp)
                self._last = None
        self._kinds = [(p.dtype, p.device) for p in self.weights]
        with self.installed():
            for optimizer in self.own_optimizers:
                optimizer.fill_()

    def _adopt(
        self,
        name: str,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        held: Mapping[Tensor, Any],
        by_fsdp: Mapping[Tensor, Any],
    ) -> Weight:
        self._movement.open = True
        sharded = is_sharded(parameter)
        exact = local_part(parameter).detach()  # before the cast
        low = dtype in LOW
        if parameter.dtype != dtype:
            parameter.grad = None
            cast_(parameter, dtype, by_fsdp)
        target = parameter
        copied = low and self._copies and parameter in held
        keeper = held.get(parameter) if low and self._policy.update != "nearest" else None
        if copied:
            target = as_target(exact.to(torch.float32, copy=True), parameter)
        elif sharded:
            target = as_target(local_part(parameter), parameter)
        if target is not parameter:
            self._to_target[parameter], self._to_parameter[target] = target, parameter
        if parameter not in self.weights:
            self.accumulation.watch(parameter)
        if keeper is not None:
            with self.installed():
                keeper.write_master_(target, exact.float())
        return Weight(name, parameter, target, copied, sharded, parameter in held, keeper)

    def _held(self) -> _Held:
        """The model's parameters that optimizers hold now."""
        groups = [group["params"] for o in self._optimizers for group in o.param_groups]
        ids = [id(tensor) for tensors in groups for tensor in tensors]
        if self._last is not None and self._last.ids == ids:
            return self._last
        found: dict[Tensor, Any] = {}
        for optimizer in self._optimizers:
            keeper = optimizer if isinstance(optimizer, OwnOptimizer) else None
            for group in optimizer.param_groups:
                found |= {self.parameter_of(p): keeper for p in group["params"]}
        known = {parameter: self.weights.get(parameter) for parameter in found}
        weights = [weight for weight in known.values() if weight is not None]
        self._last = _Held(
            ids,
            found,
            weights,
            sorted((w.parameter for w in weights), key=Tensor.numel),
            [parameter for parameter, weight in known.items() if weight is None or not weight.held],
        )
        return self._last

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizers update, by name: masters, local parts or parameters."""
        return {weight.name: weight.target for weight in self._current()}

    def parameter_of(self, target: Tensor) -> Tensor:
        """The model's own parameter that a target stands for."""
        return self._to_parameter.get(target, target)

    # Between the model and the optimizers

    def installed(self) -> AbstractContextManager[None]:
        """Inside the context, the optimizers' groups and states hold targets, not parameters."""
        return self.exchange.installed()

    def _cast_states_(self) -> None:
        """Cast what stock optimizers hold already, of Adagrad or of steps, as new state is."""
        stock = [o for o in self._looking if not isinstance(o, OwnOptimizer)]
        with self.installed():
            for optimizer in self._optimizers:
                for target, state in optimizer.state.items():
                    for name, value in state.items() if optimizer in stock else ():
                        if isinstance(value, Tensor) and value.dim() and value.is_floating_point():
                            state[name] = value.to(target.dtype)

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """This rank's finished gradient of each target that has one, in the optimizers' order."""
        found = {}
        for weight in self._held().weights:
            parameter = weight.parameter
            gradient = local_gradient(parameter) if weight.sharded else parameter.grad
            if gradient is not None:
                found[weight.target] = gradient
        return found

    def trains(self, tensors: Sequence[Tensor]) -> bool:
        """Whether any of these tensors is a parameter that an optimizer holds."""
        held = self._held().by_parameter
        return any(tensor in held and tensor in self.weights for tensor in tensors)

    def note(self) -> None:
        """Remember the gradients as a backward has left them: :meth:`GradientAccumulation.note`."""
        self.accumulation.note((self._last or self._held()).by_size)

    def clear(self) -> None:
        """Drop the gradients of all parameters that the optimizers hold, and forget them."""
        self.accumulation.note(())
        held = self._held()
        for parameter in held.by_parameter:
            parameter.grad = None
        for weight in held.weights if self._to_target else ():
            weight.target.grad = None

    @torch.no_grad()
    def take_written_(self) -> None:
        """Make masters adopt what the user wrote into the model's weights.

        A weight that differs from its rounded master was written by the user. With a remainder no
        comparison is needed: see :func:`rounding.join`.
        """
        copies = [w for w in self.weights.values() if w.copied] if self._copies else []
        if copies:
            _follow_all_([w.target for w in copies], [w.visible for w in copies])

    def _set_saved_(self, weight: Weight, value: Tensor) -> None:
        """Set a weight to what a model's saved state has, which lacks bits if it is 16-bit.

        The optimizer may have loaded them from another policy's state; or it has them as its own,
        which stay wherever they belong to this value.
        """
        spare = self.exchange.spare.pop(weight.parameter, {}) if value.dtype in LOW else {}
        if MASTER in spare:
            value = spare[MASTER]
        elif REMAINDER in spare and value.dtype is torch.bfloat16:
            value = master(value, spare[REMAINDER])
        elif value.dtype in LOW and value.dtype is weight.visible.dtype:
            weight.visible.copy_(value)
            if weight.copied:
                _follow_(weight.target.detach(), weight.visible)
            return
        keeper = self._keeper(weight)
        if keeper is None:
            weight.target.copy_(value)
        else:
            with self.installed():
                keeper.write_master_(weight.target, value.float())

    def update_(self, gradients: Gradients, factor: float | DeviceDecision) -> None:
        """Step the optimizers with the gradients times ``factor``, and round masters to weights.

        A decision on the device knows the factor, and whether the step changes anything.
        """
        self._unrounded = set(gradients) if self._copies else set()
        waiting = len(self._unrounded)
        with self.installed():
            by_host = factor if isinstance(factor, float) else 1.0
            self.hand_over(self._looking, gradients, by_host)
            unmoved = None  # the device may skip what it decides
            if self._movement.open and isinstance(factor, float):
                unmoved = self._movement.begin(self._looking)
            self._step(gradients, factor)
            error = unmoved and unmoved(lambda t: self.weights[self.parameter_of(t)].name)
        if self._copies:
            hooked = len(self._unrounded) < waiting
            self.push_(gradients if not hooked else self._unrounded)
            if hooked:  # a user's hooks may have written weights
                self.take_written_()
        if error is not None:
            raise error

    def _step(self, gradients: Gradients, factor: float | DeviceDecision) -> None:
        """Step the optimizers; pass gradients and ``factor`` to those that accept them."""
        if len(self._outer) > 1:  # a single one that steps checks for itself
            for keeper in self.own_optimizers:
                keeper.check_step(gradients)
        for optimizer in self._outer:
            step: Any = optimizer.step
            if optimizer not in self._looking:
                step(gradients=gradients, multiplier=factor)
            elif isinstance(factor, float):
                step()
            else:
                with factor.given_to(optimizer):
                    step()

    def hand_over(
        self, optimizers: Sequence[Optimizer], gradients: Gradients, factor: float
    ) -> None:
        """Set ``target.grad`` to the gradient times ``factor``, in the optimizer's dtype."""
        given, low, wide = list[Tensor](), list[Tensor](), list[Tensor]()
        asked = _ids(optimizers) if len(optimizers) < len(self._optimizers) else None
        own = _ids(o for o in self._outer if o in self.own_optimizers)
        for target, gradient in gradients.items():
            if asked is not None and id(target) not in asked:
                continue
            if (parameter := self._to_parameter.get(target)) is not None:
                parameter.grad = None
            if id(target) in own:
                target.grad_dtype = None
            elif gradient.dtype is not target.dtype and (gradient.is_sparse or gradient.is_cpu):
                fp32 = target.dtype is torch.float32  # float() costs the host two thirds of to()
                gradient = gradient.float() if fp32 else gradient.to(target.dtype)
            elif gradient.dtype is not target.dtype:
                low.append(gradient)
                gradient = torch.empty_like(gradient, dtype=target.dtype)
                wide.append(gradient)
            if target.grad is not gradient:
                target.grad = gradient
            given.append(gradient)
        if wide:
            torch._foreach_copy_(wide, low)
        if factor != 1.0 and given:
            torch._foreach_mul_(given, factor)

    @torch.no_grad()
    def push_(self, targets: Iterable[nn.Parameter]) -> None:
        """Round these masters to nearest into their weights."""
        copies = [w for t in targets if (w := self.weights[self.parameter_of(t)]).copied]
        if copies:
            torch._foreach_copy_([w.visible for w in copies], [w.target for w in copies])

    def push_early_(self, optimizer: Optimizer) -> None:
        """Round an optimizer's masters now; what a hook then writes is adopted after the step."""
        own = [p for group in optimizer.param_groups for p in group["params"]]
        self.push_([p for p in own if p in self._unrounded])
        self._unrounded.difference_update(own)

    # Exact values

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The name and the exact value of each weight, of which some are read at a time."""
        every, some, size = self._current(), list[Weight](), 0
        for weight in every:
            some.append(weight)
            size += weight.target.numel()
            if size >= _READ or weight is every[-1]:
                yield from zip([w.name for w in some], self._read(some), strict=True)
                some, size = [], 0

    def _read(self, weights: Sequence[Weight]) -> list[Tensor]:
        """The exact values of weights; in new memory if their optimizer keeps what they lack."""
        held, kept = self._held().by_parameter, dict[Any, list[nn.Parameter]]()
        for weight in weights:
            kept.setdefault(weight.keeper and held.get(weight.parameter), []).append(weight.target)
        values = {target: target.detach() for target in kept.pop(None, [])}
        for keeper, targets in kept.items():
            with self.installed():
                values |= zip(targets, keeper.read_masters(targets), strict=True)
        # a weight that no optimizer holds has no master; it is saved in fp32 like masters
        wide = self._policy.keeps_more_than_weights
        found = [values[weight.target] for weight in weights]
        return [value.float() if wide and value.dtype in LOW else value for value in found]

    def _current(self) -> list[Weight]:
        """One weight per name: the newest, in case a module was replaced."""
        return [*{weight.name: weight for weight in self.weights.values()}.values()]

    def _keeper(self, weight: Weight) -> Any:
        """The optimizer that keeps a weight's remainder; None if it no longer holds the weight."""
        return weight.keeper and self._held().by_parameter.get(weight.parameter)

    @torch.no_grad()
    def exact(self, parameter: Tensor) -> Tensor:
        """The exact fp32 values that a parameter represents, in new memory."""
        weight = self.weights.get(parameter)
        keeper = None if weight is None else self._keeper(weight)
        if weight is not None and keeper is not None:
            return self._read([weight])[0]
        if weight is None or not weight.copied:
            return parameter.detach().to(torch.float32, copy=True)
        # the master itself is not changed: the write may be temporary
        value = weight.target.detach().clone(memory_format=torch.preserve_format)
        _follow_(value, weight.visible)
        return value

    @torch.no_grad()
    def load_(self, values: Mapping[str, Tensor]) -> None:
        """Set every weight to what a model's saved state has, under this policy or another."""
        for weight in self._current():
            self._set_saved_(weight, values[weight.name])
        self.push_([weight.target for weight in self.weights.values()])

    def close(self) -> None:
        """Release the parameters as plain ones; gradients are dropped."""
        self.clear()
        self.accumulation.close()
        for optimizer in self.own_optimizers:
            optimizer.has_masters = False


def _push_early(optimizer: Optimizer, masters: weakref.ref[MasterWeights]) -> RemovableHandle:
    """Round an optimizer's masters before a user's post-step hooks, so an average, read weights."""

    def push(stepped: Optimizer, *_: Any) -> None:
        held = masters()
        if held is not None and has_users(hooks):
            held.push_early_(stepped)

    handle = optimizer.register_step_post_hook(push)
    hooks: Any = handle.hooks_dict_ref()
    hooks.move_to_end(handle.id, last=False)
    return handle


def _ids(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of all tensors that these hold."""
    return {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}


def _follow_all_(masters: list[Tensor], weights: list[Tensor]) -> None:
    """Have each of these masters follow its weight, many small ones at a time."""
    alike = [m.shape for m in masters] == [w.shape for w in weights]  # else this raises
    for run in runs(weights, _MANY if weights[0].is_cuda else 4 * _CHUNK):
        some = masters[run]
        if len(some) == 1 or not alike:
            for master, visible in zip(some, weights[run], strict=True):
                _follow_(master, visible)
            continue
        joined, visible = flattened(some), flattened(weights[run])
        before = joined._version
        _follow_(joined, visible)
        if joined._version != before:
            torch._foreach_copy_(some, split_like(joined, some))


def _follow_(master: Tensor, visible: Tensor) -> None:
    """Set a master's elements to the weight's where the weight is not the rounded master.

    On a GPU all at once and without a look at the result, for which the host would have to wait.
    """
    if visible.shape != master.shape:
        raise PrecisionError(
            f"a parameter has shape {tuple(visible.shape)}, and Precision took it with "
            f"{tuple(master.shape)}: make optimizer and Precision after the model is changed"
        )
    if visible.is_cuda:
        written = master.to(visible.dtype).view(torch.int16) != visible.view(torch.int16)
        torch.where(written, visible.float(), master, out=master)
        return
    pieces: Iterable[tuple[Tensor, Tensor]] = [(master, visible)]
    if visible.stride() == master.stride() and visible.is_contiguous():
        pieces = zip(*(torch.split(t.view(-1), _CHUNK) for t in (master, visible)), strict=True)
    for piece, seen in pieces:
        rounded = piece.to(seen.dtype)
        if not torch.equal(rounded.view(torch.int16), seen.view(torch.int16)):
            written = rounded.view(torch.int16) != seen.view(torch.int16)
            piece.copy_(torch.where(written, seen.float(), piece))
