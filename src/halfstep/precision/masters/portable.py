"""Makes copies and pickles of a model under Precision plain models, which need no halfstep.

The same holds of a model whose steps are watched.

* ``copy.deepcopy`` of the model, of a part of it or of a parameter gives fp32 weights with the
  exact trained values, and no hooks. So an average of weights, a target network or a momentum
  encoder made from such a copy follows updates that 16 bits would lose. Its layers have no recipe.
* ``pickle`` and ``torch.save`` give the weights as they are stored, and no hooks.
* ``torch.jit.script`` compiles such a copy.

Python and torch learn of this by attributes on each object (``__reduce_ex__`` and the like), which
:func:`make_plain_` removes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.rounding import random_bits
from halfstep.precision.policy.policy import LOW

_OF_A_MODULE = ("__reduce_ex__", "__prepare_scriptable__")
_OF_A_PARAMETER = ("__deepcopy__", "__reduce_ex__")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
)
_NUMBERED = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


class Hook:
    """A function as a hook that copies and pickles of a model leave out."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self.__self__ = getattr(run, "__self__", None)  # of a method, as Python names its owner

    def __call__(self, *args: Any) -> None:
        """Run the function."""
        self._run(*args)


Exact = weakref.WeakMethod[Callable[[Tensor], Tensor]]


def make_portable_(
    model: nn.Module, ours: Callable[[object], bool], low: Iterable[nn.Parameter], exact: Exact
) -> None:
    """Make copies and pickles of a model, whose hooks must all be in place, plain.

    ``ours`` recognises halfstep's hooks and forwards. ``low`` are the parameters that were cast to
    16 bits; ``exact``, a weak reference, gives the exact fp32 values of one of them.
    """
    make_modules_portable_(model, ours)
    for parameter in low:
        held = weakref.ref(parameter)
        parameter.__dict__["__deepcopy__"] = partial(_exact_copy, held, exact)
        parameter.__dict__["__reduce_ex__"] = partial(_reduce_parameter, held)


def make_modules_portable_(model: nn.Module, ours: Callable[[object], bool]) -> list[nn.Module]:
    """Make copies and pickles of modules that have hooks plain, and return those that were not."""
    changed = []
    for module in model.modules():
        hooks = (hook for name in _HOOKS for hook in getattr(module, name).values())
        if "__reduce_ex__" in module.__dict__:
            continue
        if any(map(ours, (*hooks, module.__dict__.get("forward")))):
            own = weakref.ref(module)
            module.__dict__["__reduce_ex__"] = partial(_reduce_module, own, ours)
            module.__dict__["__prepare_scriptable__"] = partial(_plain_copy, own)
            changed.append(module)
    return changed


def make_modules_plain_(modules: Iterable[nn.Module]) -> None:
    """Remove from modules what :func:`make_modules_portable_` added."""
    for module in modules:
        for name in _OF_A_MODULE:
            module.__dict__.pop(name, None)


def make_plain_(model: nn.Module) -> None:
    """Remove from a model what :func:`make_portable_` added for copies and pickles."""
    make_modules_plain_(model.modules())
    for parameter in model.parameters():
        for name in _OF_A_PARAMETER:
            parameter.__dict__.pop(name, None)


# Python calls each of these through the module or parameter it refers to, which is thus alive.


def _reduce_module(
    module: Callable[[], Any], ours: Callable[[object], bool], protocol: Any
) -> tuple[Any, ...]:
    """``__reduce_ex__`` of a module: its class's result without halfstep's hooks and forwards."""
    held = module()
    kind: Any = type(held)
    made, arguments, state, *rest = kind.__reduce_ex__(held, protocol)
    if isinstance(state, Mapping):
        state = _without_ours(state, ours)
    return made, arguments, state, *rest


def _without_ours(state: Mapping[str, Any], ours: Callable[[object], bool]) -> dict[str, Any]:
    plain = {key: value for key, value in state.items() if key not in _OF_A_MODULE}
    if ours(plain.get("forward")):
        del plain["forward"]
    dropped: set[int] = set()
    for name in _HOOKS:
        hooks = plain[name]
        dropped |= {key for key, hook in hooks.items() if ours(hook)}
        plain[name] = type(hooks)((k, h) for k, h in hooks.items() if not ours(h))
    for name in _NUMBERED:
        marks = plain[name]
        plain[name] = type(marks)((k, v) for k, v in marks.items() if k not in dropped)
    return plain


def _plain_copy(module: Callable[[], Any]) -> Any:
    """``__prepare_scriptable__``: a copy that shares no weight with the model in training."""
    return copy.deepcopy(module())


def _reduce_parameter(parameter: Callable[[], Any], protocol: Any) -> Any:
    """``__reduce_ex__`` of a parameter: a plain parameter with the stored values."""
    held = parameter()
    plain: Any = nn.Parameter(held.data, held.requires_grad)
    return plain.__reduce_ex__(protocol)


def _exact_copy(parameter: Callable[[], Any], exact: Exact, memo: Any) -> nn.Parameter:
    """``__deepcopy__`` of a 16-bit parameter: a copy with its exact fp32 values."""
    held, read = parameter(), exact()
    values = held.detach().float() if read is None else read(held)
    return nn.Parameter(values, held.requires_grad)


# Which weights ``model.load_state_dict`` has changed.


# Bytes hashed at a time: their int64 products take eight times the memory.
_CHUNK = 2**15


class Loaded:
    """A ``load_state_dict`` pre-hook that remembers which weights a load changes.

    A weight that is loaded with the value it has, or that gets it back before the next step, keeps
    its master or remainder. So a resume is exact whether the model or Precision is loaded first,
    and averages may be loaded for an evaluation if the weights are loaded again after it.
    """

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        """Names of weights that a load has changed, with the fingerprint of their earlier value."""

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object
    ) -> None:
        """Note the weights that are about to get another value."""
        for name, parameter in module.named_parameters():
            value = state.get(prefix + name)
            low = parameter.dtype in LOW  # others have no master or remainder
            if low and isinstance(value, Tensor) and name not in self.before:
                own, new = local_part(parameter).detach(), local_part(value).detach()
                if own.shape != new.shape or not torch.equal(new.to(own), own):
                    self.before[name] = _fingerprint(own)

    def changed(self, name: str, visible: Tensor) -> bool:
        """Whether a weight that was loaded differs from its value before the load."""
        return name in self.before and self.before[name] != _fingerprint(visible)


def _fingerprint(weight: Tensor) -> int:
    """A hash of a tensor's bits; two tensors collide with a probability of at most 2^-31."""
    codes = weight.reshape(-1).view(torch.uint8)  # a scalar parameter has no dim to view as bytes
    total = torch.zeros((), dtype=torch.int64, device=codes.device)
    for start in range(0, codes.numel(), _CHUNK):
        part = codes[start : start + _CHUNK].long()
        factors = random_bits(0, 0, part.numel(), start=start, device=codes.device)
        total += (part * factors).sum()
    return int(total)
