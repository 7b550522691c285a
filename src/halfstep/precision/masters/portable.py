"""Makes copies and pickles of a model under Precision plain models, which need no halfstep.

The same holds of a model whose steps are watched.

* ``copy.deepcopy`` of the model or of a part of it gives fp32 weights with the exact trained
  values, and no hooks. So an average of weights, a target network or a momentum encoder made from
  such a copy follows updates that 16 bits would lose. Its layers have no recipe.
* ``pickle`` and ``torch.save`` give the weights as they are stored, and no hooks.

Python learns of this by attributes on each object, which :func:`make_plain_` removes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from halfstep.precision.casting.autocast import ForwardWatch
from halfstep.precision.casting.cast import is_cast

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_NUMBERED = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


class Hook:
    """A function as a hook that copies and pickles of a model leave out.

    A ``passive`` one may be left out by whoever computes a module without calling it.
    """

    def __init__(self, run: Callable[..., None], *, passive: bool = False) -> None:
        self._run, self.passive = run, passive

    def __call__(self, *args: Any) -> None:
        """Run the function."""
        self._run(*args)


def _is_ours(value: object) -> bool:
    """Whether a hook or a replaced ``forward`` was put on a model by halfstep."""
    return isinstance(value, ForwardWatch | Hook) or is_cast(value)


Exact = weakref.WeakMethod[Callable[[Tensor], Tensor]]


def make_portable_(model: nn.Module, low: Iterable[nn.Parameter], exact: Exact) -> None:
    """Make copies and pickles of a model, whose hooks must all be in place, plain.

    ``low`` are the parameters that were cast to 16 bits; ``exact``, a weak reference, gives the
    exact fp32 values of one of them.
    """
    make_modules_portable_(model)
    for parameter in low:
        held = weakref.ref(parameter)
        parameter.__dict__["__deepcopy__"] = partial(_exact_copy, held, exact)
        parameter.__dict__["__reduce_ex__"] = partial(_reduce_parameter, held)


def make_modules_portable_(model: nn.Module) -> list[nn.Module]:
    """Make copies and pickles of modules that have hooks plain, and return those that were not."""
    changed = []
    for module in model.modules():
        hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
        ours = any(map(_is_ours, (*hooks, module.__dict__.get("forward"))))
        if ours and "__reduce_ex__" not in module.__dict__:
            module.__dict__["__reduce_ex__"] = partial(_reduce_module, weakref.ref(module))
            changed.append(module)
    return changed


def make_modules_plain_(modules: Iterable[nn.Module]) -> None:
    """Remove from modules what :func:`make_modules_portable_` added."""
    for module in modules:
        module.__dict__.pop("__reduce_ex__", None)


def make_plain_(model: nn.Module) -> None:
    """Remove from a model what :func:`make_portable_` added for copies and pickles."""
    make_modules_plain_(model.modules())
    for parameter in model.parameters():
        for name in ("__deepcopy__", "__reduce_ex__"):
            parameter.__dict__.pop(name, None)


# Python calls each of these through the module or parameter it refers to, which is thus alive.


def _reduce_module(module: Callable[[], Any], protocol: Any) -> tuple[Any, ...]:
    """``__reduce_ex__`` of a module: its class's result without halfstep's hooks and forwards."""
    held = module()
    kind: Any = type(held)
    made, arguments, state, *rest = kind.__reduce_ex__(held, protocol)
    if isinstance(state, Mapping):
        state = _without_ours(state)
    return made, arguments, state, *rest


def _without_ours(state: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in state.items() if key != "__reduce_ex__"}
    if _is_ours(plain.get("forward")):
        del plain["forward"]
    # one number is that of one hook in all of these
    ours = {key for name in _HOOKS for key, hook in plain[name].items() if _is_ours(hook)}
    for name in (*_HOOKS, *_NUMBERED):
        held = plain[name]
        plain[name] = type(held)((k, v) for k, v in held.items() if k not in ours)
    return plain


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
