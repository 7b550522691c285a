"""What optimizers hold: parameters and placed state between steps, targets and parts in a step.

Between steps an optimizer holds what torch expects: the model's own parameters, and state that is
placed like them, a DTensor for a DTensor, with a weight's fp32 master as one more key. So
``optimizer.state_dict()``, ``torch.distributed.checkpoint`` and its resharding save all there is.
A step works on targets (masters, this rank's parts) and on plain tensors, over the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.precision.masters.local_part import is_sharded, local_part, local_value, place_like
from halfstep.precision.masters.rounding import REMAINDER, ROUNDING

MASTER = "master"
"""The key under which an optimizer's state shows, between steps, the fp32 master of a weight."""


@dataclass(frozen=True, slots=True)
class _State:
    """A parameter's state in both forms, which share memory; kept while no value is replaced.

    To place a tensor costs the host 20 us, and every step asks for both forms.
    """

    target: Tensor
    local: dict[str, Any]
    visible: dict[str, Any]
    values: tuple[list[Any], list[Any]]  # of both: held, so that nothing else can have their ids

    def is_of(self, target: Tensor, given: Mapping[str, Any], *, visible: bool) -> bool:
        """Whether these are still the values of one form."""
        held = self.values[visible]
        return self.target is target and [*map(id, given.values())] == [*map(id, held)]


class Exchange:
    """Puts targets in place of parameters into optimizers for a step, and takes them out again."""

    def __init__(self, optimizers: Sequence[Optimizer], update: str) -> None:
        """Attach to optimizers, which are loaded and begun with targets, too.

        ``update`` is the rounding mode by which they store 16-bit weights.
        """
        self.to_target: dict[Tensor, nn.Parameter] = {}
        self.to_parameter: dict[Tensor, nn.Parameter] = {}
        self._optimizers, self._remainder = optimizers, ROUNDING[update].remainder_dtype
        self._installed = self._begins = False
        self._states: dict[Tensor, _State] = {}  # by parameter
        self.spare: dict[Tensor, dict[str, Tensor]] = {}
        """By parameter, what a loaded state of another policy kept beside its weight."""
        # Those that have stepped or loaded a state. No master shows before: torch's initialisation,
        # and optimizers themselves, take any state for all of it.
        self._begun: set[Optimizer] = set()
        self.handles: list[RemovableHandle] = []
        """The hooks, to be removed at the end."""
        for optimizer in optimizers:
            self.handles += _attach(optimizer, weakref.ref(self))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the context, the optimizers' groups and states hold targets, not parameters."""
        before = self._installed
        self.install(True)
        try:
            yield
        finally:
            self.install(before)

    @torch.no_grad()
    def install(self, yes: bool) -> None:
        """Have the optimizers hold targets, or parameters."""
        if yes == self._installed:
            return
        self._installed, self._begins = yes, False
        table = self.to_target if yes else self.to_parameter
        for optimizer in self._optimizers if table else ():
            states = [*optimizer.state.items()]
            if any(state.keys() - {MASTER} for _, state in states):
                self._begun.add(optimizer)
            held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            if not yes and len(states) < len(held) and optimizer in self._begun:
                # a master shows without other state, too
                states += [(t, {}) for t in held if t in table and t not in optimizer.state]
            optimizer.state.clear()
            for group in optimizer.param_groups:
                # in place, because some optimizers keep a reference to the list itself
                group["params"][:] = [table.get(p, p) for p in group["params"]]
            for tensor, state in states:
                other = table.get(tensor)
                if other is None:
                    optimizer.state[tensor] = state
                    continue
                parameter, target = (tensor, other) if yes else (other, tensor)
                form = self._form(optimizer, parameter, target, state, local=yes)
                if form:  # optimizers begin where they find none
                    optimizer.state[other] = form

    def _form(
        self, own: Any, parameter: Tensor, target: Any, given: dict[str, Any], *, local: bool
    ) -> dict[str, Any]:
        """An optimizer's state in its local or visible form; given in the other, or in both."""
        kept = self._states.get(parameter)
        if kept is None or not kept.is_of(target, given, visible=local):
            plain = {k: local_value(v, parameter) for k, v in given.items() if k != MASTER}
            if local and hasattr(own, "as_stored"):  # one of halfstep's
                plain = own.as_stored(target, plain)
            visible, shape = dict(plain), target.shape
            for key, value in plain.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == shape:
                    visible[key] = place_like(value, parameter)
            if target.dtype != parameter.dtype:
                visible[MASTER] = place_like(target.detach(), parameter)
            kept = _State(target, plain, visible, ([*plain.values()], [*visible.values()]))
            self._states[parameter] = kept
        return kept.local if local else kept.visible

    def _has_master(self, parameter: Tensor) -> bool:
        return self.to_target.get(parameter, parameter).dtype != parameter.dtype

    def before_load(self, optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """Install targets, as torch casts a loaded state to their dtype, and localise the state."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in given.get("param_groups", ()) for number in group["params"]]
        by_number: dict[int, Tensor] = dict(zip(numbers, held, strict=False))
        self.install(True)
        states = {}
        for number, state in given.get("state", {}).items():
            states[number] = state
            if number in by_number:
                parameter: Tensor = by_number[number]
                parameter = self.to_parameter.get(parameter, parameter)
                states[number] = {k: local_value(v, parameter) for k, v in state.items()}
                self._set_aside(parameter, states[number])
        return {**given, "state": states}

    def _set_aside(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Take out of a loaded state a master, and a remainder that this policy does not keep."""
        kept = self._remainder if parameter.dtype is torch.bfloat16 else None
        held = {key: state[key] for key in (MASTER, REMAINDER) if key in state}
        self.spare[parameter] = {k: v for k, v in held.items() if k == MASTER or v.dtype != kept}
        for key in self.spare[parameter]:
            del state[key]

    @torch.no_grad()
    def after_load(self, _: Optimizer) -> None:
        """Set masters as loaded, and take the targets out."""
        for parameter in [p for p in self.spare if self._has_master(p)]:
            if (master := self.spare[parameter].pop(MASTER, None)) is not None:
                self.to_target[parameter].copy_(master)
        self.install(False)

    def before_save(self, own: Any) -> None:
        """Show moments of sharded parameters in a format that torch can cut anew.

        The next step takes them back as they were.
        """
        if self._installed or not hasattr(own, "as_values"):
            return
        for parameter in [p for p in own.state if is_sharded(p) and p in self._states]:
            local = self._states[parameter].local
            values = own.as_values(local)
            if values.keys() != local.keys():
                target = self.to_target[parameter]
                own.state[parameter] = self._form(own, parameter, target, values, local=False)
                del self._states[parameter]

    def show_masters(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add masters to the state dict of an optimizer that shows none yet."""
        if optimizer in self._begun:
            return
        held = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, held, strict=True):
            if self._has_master(parameter):
                master = place_like(self.to_target[parameter].detach(), parameter)
                state_dict["state"][number] = {MASTER: master}

    def begins(self, optimizer: Optimizer) -> bool:
        """Whether a step by hand is torch's initialisation step, for which targets are installed.

        To learn what state an optimizer will have, ``torch.distributed.checkpoint`` steps one that
        has none, with all rates 0 and zero gradients, so that no weight moves.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if optimizer.state or any(group.get("lr", 0) != 0 for group in optimizer.param_groups):
            return False
        if not all(p.grad is not None and not local_part(p.grad).any() for p in held):
            return False
        self.install(True)
        self._begins = True
        for parameter in held:
            target = self.to_target.get(parameter, parameter)
            target.grad = torch.zeros_like(target)
        return True

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Show what torch's initialisation step has made."""
        if self._begins:
            optimizer.zero_grad()
            self.install(False)


def _attach(optimizer: Optimizer, exchange: weakref.ref[Exchange]) -> list[RemovableHandle]:
    """Call an exchange, if it is still there, around what an optimizer does."""

    def call(name: str) -> Callable[..., Any]:
        def hook(*given: Any) -> Any:
            held = exchange()
            return None if held is None else getattr(held, name)(*given)

        return hook

    return [
        optimizer.register_load_state_dict_pre_hook(call("before_load")),
        optimizer.register_load_state_dict_post_hook(call("after_load")),
        optimizer.register_state_dict_pre_hook(call("before_save")),
        optimizer.register_state_dict_post_hook(call("show_masters")),
        optimizer.register_step_post_hook(call("after_step")),
    ]
