"""Watches the training loop around a Precision and refuses what would silently train wrongly.

Each mistake here is one that a loop written for plain torch or ``torch.amp`` makes easily: an
``optimizer.step()`` by hand, a second Precision over the same parameters, another optimizer that
would update 16-bit weights in 16 bits, another loss scaler, or a forward outside the policy's
context.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.errors import PrecisionError
from halfstep.precision.casting.autocast import active_autocast
from halfstep.precision.casting.cast import give_back_, is_cast
from halfstep.precision.masters.arrivals import Arrivals, is_running
from halfstep.precision.masters.portable import Hook, Loaded, make_plain_
from halfstep.precision.policy.policy import LOW, PrecisionPolicy, dtype_name

# How many first losses are checked for another scaler; a loop that uses one does so at once.
_LOOKS = 3
_OWNERS: Any = WeakIdKeyDictionary()
"""Maps a parameter to a weak reference to the :class:`StepDoor` of the Precision training it."""
_DOORS: Any = WeakIdKeyDictionary()
"""Maps an optimizer to a weak reference to the :class:`StepDoor` that it steps through."""
_KEEPING: weakref.WeakSet[StepDoor] = weakref.WeakSet()
"""The doors of policies whose 16-bit weights no other optimizer may update."""
_watching: list[RemovableHandle] = []
"""The one hook of all optimizers, there while :data:`_KEEPING` has doors."""


class StepDoor:
    """Optimizer hooks that refuse any step not made by the optimizers' own Precision."""

    def __init__(
        self,
        policy: PrecisionPolicy,
        optimizers: Sequence[Optimizer],
        names: Mapping[Tensor, str],
    ) -> None:
        """Claim the optimizers' parameters; ``names`` maps the model's parameters to their names.

        Where the policy keeps more than its 16-bit weights, no other optimizer may step them, and
        the own optimizers stay shut even when the Precision is gone.
        """
        self._policy = policy
        # whether the weights are 16-bit and an optimizer without this policy would lose updates
        self._keeps = policy.keeps_more_than_weights or policy.update != "nearest"
        self._optimizers = optimizers
        self._names = names
        self._parameters: list[Tensor] = []
        self.is_open = False
        """Whether the Precision itself is stepping now."""
        self.take()
        own = weakref.ref(self)
        for optimizer in optimizers:
            _DOORS[optimizer] = own

        def refuse(optimizer: Optimizer, *_: Any) -> None:
            _require_open(own(), type(optimizer).__name__)

        self._handles = [o.register_step_pre_hook(refuse) for o in optimizers]
        if self._keeps:
            _KEEPING.add(self)
            if not _watching:
                _watching.append(register_optimizer_step_pre_hook(_require_mine))

    def take(self) -> None:
        """Claim the parameters that the optimizers hold now; groups may have been added or removed.

        Parameters that another Precision trains are refused before anything is changed.
        """
        held = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        if len(held) == len(self._parameters):
            return
        for parameter in held:
            if _owner_of(parameter) not in (None, self):
                raise PrecisionError(
                    f"{self._names.get(parameter, 'a parameter')} is trained by another Precision "
                    "already, whose masters and loss scale this one would override. Call close() "
                    "on that one first; for several optimizers give one Precision a list of them"
                )
        own = weakref.ref(self)
        for parameter in self._parameters:
            _OWNERS.pop(parameter, None)
        for parameter in held:
            _OWNERS[parameter] = own
        self._parameters = held

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow the optimizers to step inside the block."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def close(self) -> None:
        """Release the optimizers and parameters: they may step without a Precision again."""
        for handle in self._handles:
            handle.remove()
        self.leave()
        if not _KEEPING and _watching:
            _watching.pop().remove()

    def leave(self) -> None:
        """Release what the Precision held; if it kept more than weights, optimizers stay shut."""
        if not self._keeps:
            for handle in self._handles:
                handle.remove()
        for parameter in self._parameters:
            _OWNERS.pop(parameter, None)
        # the hook of all optimizers stays: this may run while torch reads them
        _KEEPING.discard(self)
        self._handles, self._parameters, self._optimizers = [], [], []

    def require_mine(self, optimizer: Optimizer) -> None:
        """Refuse a step over this model's 16-bit weights by an optimizer without a Precision."""
        if self.is_open or any(optimizer is mine for mine in self._optimizers):
            return
        door = _DOORS.get(optimizer, lambda: None)()
        if door is not None and door.is_open:
            return  # it has claimed all parameters of its optimizers, which are then not this one's
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in LOW or parameter not in self._names:
                    continue
                if _owner_of(parameter) in (None, self):
                    raise PrecisionError(
                        f"{type(optimizer).__name__}.step() would update "
                        f"{self._names[parameter]}, which policy {self._policy} keeps in "
                        f"{dtype_name(parameter.dtype)}, in {dtype_name(parameter.dtype)}: this "
                        "optimizer is not the Precision's. Give it all optimizers of the model: "
                        "Precision(policy, model, [first, second])"
                    )


def _require_mine(optimizer: Optimizer, *_: Any) -> None:
    """Refuse, as a hook of all optimizers, a step over the 16-bit weights of some Precision."""
    for door in list(_KEEPING):
        door.require_mine(optimizer)


def _owner_of(parameter: Tensor) -> StepDoor | None:
    """The door of the live Precision that trains a parameter, or None."""
    door: StepDoor | None = _OWNERS.get(parameter, lambda: None)()
    return door


def _require_open(door: StepDoor | None, name: str) -> None:
    """Refuse an optimizer's step unless its Precision is alive and is stepping itself."""
    if door is None:
        raise PrecisionError(
            f"{name}.step(): the Precision of this optimizer is gone, and with it the bits that "
            "its 16-bit weights cannot hold. Keep the Precision in a variable for as long as the "
            "model is trained, or call its close() to go on without it"
        )
    if not door.is_open:
        raise PrecisionError(
            f"{name}.step() was called by hand (or by a GradScaler), and this optimizer "
            "belongs to a Precision, which checks, clips, rounds and scales the loss. Call "
            "precision.step(loss) instead, without a GradScaler; or precision.close() to go on "
            "without it"
        )


class ForwardWatch:
    """A forward hook of the model and its children that checks for the policy's context.

    The output of a forward outside the context gets a tensor hook that refuses gradients of
    ``Precision.backward``. So a forward that is never trained on may run anywhere.
    """

    def __init__(self, policy: PrecisionPolicy, device: torch.device) -> None:
        self._policy = policy
        self._device = device
        self._needed = policy.compute_dtype != torch.float32 or policy.tf32

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Watch a model and its children: a method other than ``forward`` may call the latter."""
        watched = {id(m): m for m in (model, *model.children())}
        return [module.register_forward_hook(self) for module in watched.values()]

    __name__ = "ForwardWatch"  # torch.export asks every hook for one

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Check a forward that has just run.

        It refuses a ``torch.autocast`` of another format inside the policy's context, and
        ``torch.export`` inside that of a ``*-mixed`` policy: the exported program would keep some
        of the casts, and fail when it runs.
        """
        if torch.compiler.is_exporting() and active_autocast() and self._policy.casts_per_op:
            raise PrecisionError(
                f"torch.export records no autocast, which policy {self._policy} computes in. Call "
                "torch.export.export(model, ...) outside of precision.autocast(): the program then "
                "computes in fp32, and in 16 bits where it is called inside torch.autocast"
            )
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if is_running(self._device):  # activation checkpointing recomputes it inside a backward
            return
        context = active_autocast()
        if context is not None and context.policy.compute_dtype == self._policy.compute_dtype:
            self._require_one_format(module)
            return
        if self._needed or torch.is_autocast_enabled(self._device.type):
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._refuse_gradient)  # type: ignore[no-untyped-call]

    def _refuse_gradient(self, gradient: Tensor) -> None:
        """Refuse, as a tensor hook, the gradient of a forward that ran outside the context."""
        if is_running(gradient.device):
            policy = self._policy
            form = "tf32" if policy.tf32 else dtype_name(policy.compute_dtype)
            raise PrecisionError(
                "the loss comes from a forward outside of precision.autocast(), which did not run "
                f"as policy {policy} says ({form}). Put forward and loss inside "
                "`with precision.autocast():`"
            )

    def _require_one_format(self, module: nn.Module) -> None:
        kind = self._device.type
        if not torch.is_autocast_enabled(kind):
            return
        found = torch.get_autocast_dtype(kind)
        if found != self._policy.compute_dtype:
            raise PrecisionError(
                f"a torch.autocast to {dtype_name(found)} was on in the forward of "
                f"{type(module).__name__}, inside precision.autocast() of policy {self._policy}, "
                f"which computes in {dtype_name(self._policy.compute_dtype)}. Take that autocast "
                "out, be it a context or a decorator of forward; enabled=False is allowed"
            )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output or a batch, through nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class OneScaler:
    """Refuses a loss that a GradScaler has already scaled; checks only the first few losses."""

    def __init__(self) -> None:
        self._looks = _LOOKS

    def require(self, loss: Tensor) -> None:
        """Refuse a loss that is the product with the scale of a GradScaler that still exists."""
        if self._looks == 0:
            return
        self._looks -= 1
        node: Any = loss.grad_fn
        if type(node).__name__ != "MulBackward0":
            return
        for name in ("_saved_other", "_saved_self"):
            factor = getattr(node, name, None)
            if not isinstance(factor, Tensor) or factor.numel() != 1:
                continue
            # a Python number is saved as an fp64 scalar
            if factor.dtype == torch.float32 and _is_of_scaler(factor):
                raise PrecisionError(
                    f"the loss was scaled by a GradScaler (times {float(factor):g}) before "
                    "precision.backward, which scales by itself where the policy says so. Give it "
                    "the plain loss and leave the GradScaler out"
                )


def _is_of_scaler(factor: Tensor) -> bool:
    """Whether a GradScaler holds this very tensor object as its scale."""
    for holder in gc.get_referrers(factor):
        held: Iterable[Any] = (holder,)
        if isinstance(holder, dict) and holder.get("_scale") is factor:
            held = gc.get_referrers(holder)
        if any(isinstance(one, torch.amp.GradScaler) for one in held):
            return True
    return False


def is_ours(value: object) -> bool:
    """Whether a hook or a replaced ``forward`` was put on a model by Precision, or by a watch."""
    value = getattr(value, "hook", value)  # torch wraps load_state_dict pre-hooks
    return isinstance(value, ForwardWatch | Hook | Loaded) or is_cast(value)


def release(
    door: StepDoor,
    arrivals: Arrivals,
    hooks: Sequence[RemovableHandle],
    model: nn.Module | None,
) -> None:
    """Remove the hooks that must not outlive a Precision, where they would refuse later use."""
    door.leave()
    arrivals.release()
    for hook in hooks:
        hook.remove()
    if model is not None:
        give_back_whole_(model)


def give_back_whole_(model: nn.Module) -> None:
    """Take the casts at a model's border off it, and what lets it be saved as a plain one."""
    give_back_(model)
    make_plain_(model)
