"""How gradients arrive in ``p.grad``: unscaled, and added up in the policy's format.

A backward of ``loss * S`` gives every gradient times S. Here it is divided by S again before it
reaches ``p.grad``, so that what can be seen between two lines of a training loop is the gradient:
clipping, masks, noise, norms and hooks on parameters need not know of the scale. S is a power of
two and p.grad fp32, so the division is exact.

Gradients of 16-bit weights stay 16 bit after one backward, as autograd made them, and become fp32
when a second one is about to be added. Under fp16 they are fp32 from the start: unscaled, fp16
could not hold them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.precision.calibrate import graph_leaves
from halfstep.precision.local import fsdp_modules, is_sharded, local_part
from halfstep.precision.policy import LOW, PrecisionPolicy

# The first losses whose graphs are searched for parameters of other models.
_LOOKS = 3
# Those whose model FSDP2 shards: its gathered parameters, which are plain, unscale later.
_BY_FSDP: weakref.WeakSet[Arrivals] = weakref.WeakSet()
# Thread to 1 / S of the backward that it runs: a loss may reach models of another Precision.
_RUNNING: dict[int, float] = {}


def is_running(device: torch.device) -> bool:
    """Whether this thread runs a backward of some Precision, or works for one, as on CUDA.

    Args:
        device: Of what is computed. A CPU's part of a backward runs in the thread that called it.
    """
    return threading.get_ident() in _RUNNING or (device.type != "cpu" and len(_RUNNING) == 1)


class _Unscale:
    """A hook of a parameter: the arriving gradient times 1 / S of the backward that made it."""

    __torch_unserializable__ = True  # torch warns of hooks that a pickled tensor would lose

    def __init__(self) -> None:
        self.inverse: float | None = None  # of a backward of the parameter's own Precision

    def __call__(self, gradient: Tensor) -> Tensor | None:
        inverse = self.inverse
        if inverse is None:
            inverse = _RUNNING.get(threading.get_ident())
        if inverse is None and is_running(gradient.device):  # on CUDA, in a thread of its own
            inverse = next(iter(_RUNNING.values()), None)
        return None if inverse is None or inverse == 1.0 else gradient * inverse


class Arrivals:
    """The parameters of one Precision, as receivers of gradients."""

    def __init__(self, policy: PrecisionPolicy, model: nn.Module) -> None:
        """Ask whether FSDP2 sets the gradients of sharded parameters.

        Args:
            policy: In which format gradients add up, and whether they are scaled.
            model: FSDP2 computes with parameters of its own, and writes ``p.grad`` of the sharded
                ones past autograd, so that no hook of theirs runs.
        """
        self._by_fsdp = next(iter(fsdp_modules(model)), None) is not None
        if self._by_fsdp:
            _BY_FSDP.add(self)
        self._widens = policy.grad_dtype == torch.float32
        self._scaled = policy.loss_scale.kind != "none"
        self._unscale = _Unscale()
        self._handles: list[RemovableHandle] = []
        self._low: list[nn.Parameter] = []
        self._sharded: list[nn.Parameter] = []
        self._left: list[tuple[nn.Parameter, int, int]] = []
        self._looks = _LOOKS

    def watch(self, parameter: nn.Parameter) -> None:
        """Let a trainable parameter, in its final dtype, receive as the policy says."""
        sharded = self._by_fsdp and is_sharded(parameter)
        if sharded:
            self._sharded.append(parameter)
        if parameter.dtype in LOW and self._widens:
            self._low.append(parameter)
            # None: of any format, so that 16 bits stay 16 until they would have to be added
            any_format = sharded or parameter.dtype == torch.bfloat16
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = None if any_format else torch.float32
            if gradient is not None:
                parameter.grad = gradient.float()
        if self._scaled and not sharded:
            for number in _hooks_of(parameter):  # that another Precision has put there
                parameter._backward_hooks.pop(number)  # type: ignore[union-attr]
            self._handles.append(self._hook(parameter))

    def _hook(self, tensor: Tensor) -> RemovableHandle:
        handle: RemovableHandle = tensor.register_hook(self._unscale)  # type: ignore[no-untyped-call]
        _move_first(tensor, handle.id)
        return handle

    def meet(self, loss: Tensor) -> None:
        """Unscale parameters of other models, too, that a loss reaches; the first losses show them.

        A loss module's own, or those of another Precision, whose policy may scale nothing.
        """
        if not self._scaled or self._looks == 0 or _BY_FSDP:
            return
        self._looks -= 1
        for leaf in graph_leaves(loss):
            if isinstance(leaf, nn.Parameter) and not is_sharded(leaf) and not _hooks_of(leaf):
                self._handles.append(self._hook(leaf))

    @contextmanager
    def running(self, scale: float, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
        """The context of a backward of ``loss * scale``.

        Args:
            scale: S.
            inputs: What the backward was asked to find gradients of, where it was asked.
        """
        self._prepare(scale)
        thread, before = threading.get_ident(), _RUNNING.get(threading.get_ident())
        outer, self._unscale.inverse = self._unscale.inverse, 1.0 / scale
        _RUNNING[thread] = 1.0 / scale
        try:
            with ExitStack() as stack:
                for tensor in inputs if scale != 1.0 else ():
                    if tensor.is_leaf and not _hooks_of(tensor):
                        stack.callback(self._hook(tensor).remove)
                yield
        finally:
            self._unscale.inverse = outer
            if before is None:
                del _RUNNING[thread]
            else:
                _RUNNING[thread] = before
            for parameter in self._sharded if scale != 1.0 else ():
                if parameter.grad is not None:
                    if parameter.grad.dtype in LOW and self._widens:
                        parameter.grad = parameter.grad.float()
                    local_part(parameter.grad).mul_(1.0 / scale)

    def _prepare(self, scale: float) -> None:
        """Make what is there ready for more to be added by autograd."""
        for parameter in self._low:
            if parameter.grad is not None and parameter.grad.dtype in LOW:
                parameter.grad = parameter.grad.float()
        for parameter in self._sharded if scale != 1.0 else ():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(scale)

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember how a backward has left the gradients."""
        self._left = [(p, id(p.grad), p.grad._version) for p in parameters if p.grad is not None]

    def cleared(self) -> bool:
        """Whether all gradients that the last backward has left were dropped or set to zero."""
        for parameter, identity, version in self._left:
            gradient = parameter.grad
            if gradient is None:
                continue
            if id(gradient) == identity and gradient._version == version:
                return False
            if bool(local_part(gradient).any()):
                return False
        return bool(self._left)

    def release(self) -> None:
        """Remove the hooks from all parameters; gradients that are there stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Let parameters take gradients as torch's do; 16-bit ones lose those that are there."""
        self.release()
        for parameter in self._low:
            parameter.grad = None  # torch asks for that
            parameter.grad_dtype = parameter.dtype
        self._low, self._sharded, self._left = [], [], []


def _hooks_of(tensor: Tensor) -> list[int]:
    """The numbers of the hooks that unscale a tensor's gradient: one, or none."""
    hooks = tensor._backward_hooks or {}
    return [number for number, hook in hooks.items() if isinstance(hook, _Unscale)]


def _move_first(parameter: Tensor, number: int) -> None:
    """Let a hook run before the user's, which then see the gradient unscaled.

    torch calls them in the order in which the dict was filled.
    """
    hooks = parameter._backward_hooks
    assert hooks is not None
    ours = hooks.pop(number)
    others = [*hooks.items()]
    hooks.clear()
    hooks[number] = ours
    hooks.update(others)
