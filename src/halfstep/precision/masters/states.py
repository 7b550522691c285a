"""What optimizers hold: parameters and placed state between steps, targets and parts in a step.

Between steps an optimizer holds what torch expects: the model's own parameters, and state that is
placed like them, a DTensor for a DTensor, with a weight's fp32 master as one more key. So
``optimizer.state_dict()``, ``torch.distributed.checkpoint`` and its resharding save all there is.
A step works on targets (masters, this rank's parts) and on plain tensors, over the same memory.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.precision.masters.local_part import (
    as_target,
    is_sharded,
    local_gradient,
    local_part,
    local_value,
    place_like,
)
from halfstep.precision.masters.rounding import REMAINDER, ROUNDING

MASTER = "master"
"""The key under which an optimizer's state shows, between steps, the fp32 master of a weight."""


class _Form:
    """What an optimizer holds in a step, or between steps; both forms share memory.

    To place a tensor costs the host 20 us, and every step asks for both: they are kept as long as
    groups hold the same tensors, and no value of a state is replaced.
    """

    def __init__(self, held: Sequence[Tensor], states: dict[Tensor, Any]) -> None:
        self.states = states
        values = chain.from_iterable(state.values() for state in states.values())
        # kept, so that nothing else can have their ids
        self.held = [*held, *states, *map(len, states.values()), *values]

    def is_as(self, other: _Form) -> bool:
        """Whether all of both are the same objects."""
        return len(self.held) == len(other.held) and all(map(operator.is_, self.held, other.held))


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
        self._forms: dict[Optimizer, list[_Form]] = {}  # between steps, and in a step
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
            held = [p for group in optimizer.param_groups for p in group["params"]]
            for group in optimizer.param_groups:
                # in place, because some optimizers keep a reference to the list itself
                group["params"][:] = [table.get(p, p) for p in group["params"]]
            others = [p for group in optimizer.param_groups for p in group["params"]]
            both = [*held, *others] if yes else [*others, *held]
            given = _Form(both, dict(optimizer.state))
            forms = self._forms.get(optimizer)
            if forms is None or not forms[not yes].is_as(given):
                made = self._both(optimizer, held, given.states, local=yes)
                forms = self._forms[optimizer] = [_Form(both, states) for states in made]
            optimizer.state.clear()
            optimizer.state.update(forms[yes].states)

    def _both(
        self, own: Any, held: Iterable[Tensor], given: dict[Tensor, Any], *, local: bool
    ) -> tuple[dict[Tensor, Any], dict[Tensor, Any]]:
        """An optimizer's states between steps, and in a step: ``local`` ones are asked for."""
        table = self.to_target if local else self.to_parameter
        if any(state.keys() - {MASTER} for state in given.values()):
            self._begun.add(own)
        if own in self._begun:  # a master shows without other state, too
            given = given | {p: {} for p in held if p in table and p not in given}
        shown, stored = dict[Tensor, Any](), dict[Tensor, Any]()
        for tensor, state in given.items():
            if tensor not in table:
                shown[tensor] = stored[tensor] = state
                continue
            parameter, target = (tensor, table[tensor]) if local else (table[tensor], tensor)
            plain = local_state(state, parameter) if local else dict(state)
            plain.pop(MASTER, None)
            if local and hasattr(own, "as_stored"):  # one of halfstep's
                plain = own.as_stored(target, plain)
            visible, shape = dict(plain), target.shape
            for key, value in plain.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == shape:
                    visible[key] = place_like(value, parameter)
            if target.dtype != parameter.dtype:
                visible[MASTER] = place_like(target.detach(), parameter)
            shown |= {parameter: visible} if visible else {}
            stored |= {target: plain} if plain else {}  # optimizers begin where they find none
        return shown, stored

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
                states[number] = local_state(state, parameter)
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
        """Show what is kept of sharded parameters in formats that torch can cut anew and gather.

        The next step takes them back as they were.
        """
        sharded = [p for p in own.state if is_sharded(p) and p in self.to_target]
        if self._installed or not sharded or not hasattr(own, "as_values"):
            return
        with self.installed():
            for target in [self.to_target[p] for p in sharded]:
                values = own.as_values(own.state[target])
                if getattr(values.get(REMAINDER), "dtype", None) is torch.int16:
                    values[REMAINDER] = values[REMAINDER].int()  # gloo and NCCL move no int16
                own.state[target] = values
        del self._forms[own]

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


def local_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """A state as steps need it on this rank, however it is placed."""
    found = {key: local_value(value, parameter) for key, value in state.items()}
    if getattr(found.get(REMAINDER), "dtype", None) is torch.int32:
        found[REMAINDER] = found[REMAINDER].short()
    return found


@contextmanager
def on_parts(optimizer: Any) -> Iterator[dict[Any, Tensor]]:
    """Inside, one of halfstep's optimizers without a Precision holds this rank's parts of DTensors.

    Given are the gradients of what it holds there.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    given = {p: g for p in held if (g := local_gradient(p)) is not None}
    sharded = [p for p in held if is_sharded(p)]
    if not sharded:
        yield given
        return
    if optimizer.exchange is None:
        optimizer.exchange = Exchange([optimizer], optimizer.storage["update"] or "nearest")
    exchange: Exchange = optimizer.exchange
    for parameter in sharded:
        part, known = local_part(parameter), exchange.to_target.get(parameter)
        if known is None or known.data_ptr() != part.data_ptr():  # FSDP2 may move it
            target = exchange.to_target[parameter] = as_target(part, parameter)
            exchange.to_parameter[target] = parameter
    with exchange.installed():
        yield {exchange.to_target.get(p, p): gradient for p, gradient in given.items()}


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
