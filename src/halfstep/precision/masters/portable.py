"""What a copy or a pickle of a model under Precision is: a plain model, which needs no halfstep.

* ``copy.deepcopy`` of the model, of a part of it or of a parameter gives fp32 weights with the
  exact values that are trained, and no hooks. An average over such a copy, a target network or a
  momentum encoder then moves by steps that 16 bits would swallow.
* ``pickle`` and ``torch.save`` give the weights as they are stored, and no hooks.
* ``torch.jit.script`` compiles a copy as ``copy.deepcopy`` gives it.

All are told to Python and torch by attributes of the single objects, which :func:`make_plain_`
removes.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from halfstep.errors import PrecisionError
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.rounding import random_bits
from halfstep.precision.policy.policy import LOW

_OF_A_MODULE = ("__reduce_ex__", "__prepare_scriptable__")
_OF_A_PARAMETER = ("__deepcopy__", "__reduce_ex__")
_DEPTH = 40  # frames between AveragedModel's constructor and the copy of a deep parameter
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

Exact = weakref.WeakMethod[Callable[[Tensor], Tensor]]


def make_portable_(
    model: nn.Module, ours: Callable[[object], bool], low: Iterable[nn.Parameter], exact: Exact
) -> None:
    """Let copies and pickles of a model, with all hooks in place, be plain.

    ``ours`` tells halfstep's hooks and forwards. ``low`` are the parameters that were cast to 16
    bits; ``exact`` gives the fp32 values that one of them stands for, and may be gone by then.
    """
    for module in model.modules():
        hooks = (hook for name in _HOOKS for hook in getattr(module, name).values())
        if any(map(ours, (*hooks, module.__dict__.get("forward")))):
            own = weakref.ref(module)
            module.__dict__["__reduce_ex__"] = partial(_reduce_module, own, ours)
            module.__dict__["__prepare_scriptable__"] = partial(_plain_copy, own)
    for parameter in low:
        held = weakref.ref(parameter)
        parameter.__dict__["__deepcopy__"] = partial(_exact_copy, held, exact)
        parameter.__dict__["__reduce_ex__"] = partial(_reduce_parameter, held)


def make_plain_(model: nn.Module) -> None:
    """Take from a model what :func:`make_portable_` gave it for copies and pickles."""
    for module in model.modules():
        for name in _OF_A_MODULE:
            module.__dict__.pop(name, None)
    for parameter in model.parameters():
        for name in _OF_A_PARAMETER:
            parameter.__dict__.pop(name, None)


# Each of these is asked by way of the module or parameter that it holds, which is alive then.


def _reduce_module(
    module: Callable[[], Any], ours: Callable[[object], bool], protocol: Any
) -> tuple[Any, ...]:
    """``__reduce_ex__`` of a module: what its class says, without what is ours."""
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
    """What torch.jit.script compiles: a copy that shares no weight with the model in training."""
    return copy.deepcopy(module())


def _reduce_parameter(parameter: Callable[[], Any], protocol: Any) -> Any:
    """``__reduce_ex__`` of a parameter: as it is stored."""
    held = parameter()
    plain: Any = nn.Parameter(held.data, held.requires_grad)
    return plain.__reduce_ex__(protocol)


def _exact_copy(parameter: Callable[[], Any], exact: Exact, memo: Any) -> nn.Parameter:
    """``__deepcopy__`` of a 16-bit parameter: the fp32 values that are trained."""
    if _averages():
        raise PrecisionError(
            "torch.optim.swa_utils.AveragedModel of a model with 16-bit weights would average "
            "in 16 bits and lose most of its updates. Use halfstep.EMA(model, decay) as "
            "Precision(..., ema=...), which averages the exact weights"
        )
    held, read = parameter(), exact()
    values = held.detach().float() if read is None else read(held)
    return nn.Parameter(values, held.requires_grad)


def _averages() -> bool:
    """Whether an AveragedModel is being made, somewhere up the stack."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if isinstance(frame.f_locals.get("self"), AveragedModel):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


# Which weights a load of the model's state has changed.


# Bytes that are looked at a time: their products take eight times the memory.
_CHUNK = 2**15


class Loaded:
    """A hook before a load of the model's state that remembers which weights it changes.

    A weight that is loaded with the value it has, or that gets it back before the next step, keeps
    what lies behind it. So a resume is exact whether the model or Precision is loaded first, and
    averages may be loaded for an evaluation and the weights again after it.
    """

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        """Names of weights that a load has changed, and what tells their value before it."""

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object
    ) -> None:
        """Note the weights that are about to get another value."""
        for name, parameter in module.named_parameters():
            value = state.get(prefix + name)
            low = parameter.dtype in LOW  # nothing lies behind others
            if low and isinstance(value, Tensor) and name not in self.before:
                own, new = local_part(parameter).detach(), local_part(value).detach()
                if own.shape != new.shape or not torch.equal(new.to(own), own):
                    self.before[name] = _fingerprint(own)

    def changed(self, name: str, visible: Tensor) -> bool:
        """Whether a weight has another value by a load than before it."""
        return name in self.before and self.before[name] != _fingerprint(visible)


def _fingerprint(weight: Tensor) -> int:
    """A number that tells a tensor's bits from others, but for one case in 2^31 at the least."""
    codes = weight.reshape(-1).view(torch.uint8)  # a scalar parameter has no dim to view as bytes
    total = torch.zeros((), dtype=torch.int64, device=codes.device)
    for start in range(0, codes.numel(), _CHUNK):
        part = codes[start : start + _CHUNK].long()
        factors = random_bits(0, 0, part.numel(), start=start, device=codes.device)
        total += (part * factors).sum()
    return int(total)
