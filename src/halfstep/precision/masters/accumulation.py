"""How gradients accumulate in ``p.grad``: unscaled, and added up in the policy's format.

A backward of ``loss * S`` gives every gradient times S. Here it is divided by S again before it
reaches ``p.grad``, so that the training loop always sees the true gradient there: clipping, masks,
noise, norms and hooks on parameters need not know the scale. S is a power of two and p.grad fp32,
so the division is exact.

Gradients of 16-bit weights stay 16-bit after one backward, as autograd made them, and become fp32
when a second one is about to be added. Under fp16 they are fp32 from the start, because fp16 could
not hold them unscaled; so are those of parameters with user hooks, which may multiply them by an
fp32 mask. Between two backwards ``p.grad`` accepts a tensor of any dtype.

A loss may also reach leaves that are not the model's: an image that is optimised, or a module that
another optimizer trains. Their gradients are unscaled too, by hooks that last for the backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.precision.masters.local_part import fsdp_modules, is_sharded, local_part
from halfstep.precision.policy.policy import LOW, PrecisionPolicy


class _Receiver:
    """What the hooks of one Precision share: its format, and the backward that it runs."""

    def __init__(self, widens: bool) -> None:
        self.widens = widens  # whether gradients are accumulated in fp32
        self.inverse: float | None = None  # 1 / S, while a backward runs
        self.task: int | None = None  # autograd's number of it

    def begin(self, gradient: Tensor) -> None:
        """Take the number, as a hook on the loss, which autograd calls before all others."""
        self.task = torch._C._current_graph_task_id()


# Thread id to whose backward it runs. Global, as a loss may reach another Precision's model.
_RUNNING: dict[int, _Receiver] = {}


def is_running(device: torch.device) -> bool:
    """Whether this thread runs a backward of some Precision, or works for one, as on CUDA.

    On a CPU a backward runs in the thread that called it; on CUDA autograd uses its own thread.
    """
    return threading.get_ident() in _RUNNING or (device.type != "cpu" and len(_RUNNING) == 1)


class _Unscale:
    """A hook on a tensor that multiplies its ready gradient by 1 / S of the backward."""

    __torch_unserializable__ = True  # torch warns of hooks that a pickled tensor would lose

    def __init__(self, receiver: _Receiver, tensor: Tensor) -> None:
        self.receiver = receiver
        self._tensor = weakref.ref(tensor)

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # a Function's backward returned none
            return None
        running: _Receiver | None = self.receiver
        if self.receiver.inverse is None:
            running = _RUNNING.get(threading.get_ident())
        if running is None and is_running(gradient.device):  # on CUDA, in autograd's own thread
            running = next(iter(_RUNNING.values()), None)
        if running is None or running.inverse is None or running.inverse == 1.0:
            return None
        if torch._C._current_graph_task_id() != running.task and self._is_returned():
            return None
        return gradient * running.inverse

    def _is_returned(self) -> bool:
        """Whether a nested backward returns the gradient, and does not add it to ``.grad``.

        A Function may call ``torch.autograd.grad`` in its backward (adjoints of an ODE, implicit
        layers, reversible networks). What it gets there comes here a second time, when it has
        returned it. A nested ``backward()``, as of a checkpoint, adds it at once.
        """
        tensor = self._tensor()
        if tensor is None:
            return False
        try:
            torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(tensor).node)
        except RuntimeError as error:
            return "autograd.grad()" in str(error)
        return False


class GradientAccumulation:
    """Controls how the parameters of one Precision receive their gradients."""

    def __init__(self, policy: PrecisionPolicy, model: nn.Module) -> None:
        """Find out whether FSDP2 sets the gradients of sharded parameters.

        FSDP2 computes with parameters of its own and writes ``p.grad`` of the sharded ones without
        autograd, so hooks on those do not run.
        """
        self._by_fsdp = next(iter(fsdp_modules(model)), None) is not None
        self._widens = policy.grad_dtype == torch.float32
        self._scaled = policy.loss_scale.kind != "none"
        self._receiver = _Receiver(self._widens)
        self._handles: list[RemovableHandle] = []
        self._low: list[nn.Parameter] = []  # 16-bit ones whose gradients are accumulated in fp32
        self._received: list[nn.Parameter] = []  # 16-bit ones that get gradients from autograd
        self._sharded: list[nn.Parameter] = []
        # gradients as the last backward has left them: whose, which object, and its version
        self._left: list[tuple[nn.Parameter, int, int]] = []

    def watch(self, parameter: nn.Parameter) -> None:
        """Make a trainable parameter, in its final dtype, receive gradients as the policy says."""
        sharded = self._by_fsdp and is_sharded(parameter)
        if sharded:
            self._sharded.append(parameter)
        if parameter.dtype in LOW:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = None  # lets ``grad`` have any dtype
            if self._widens:
                self._low.append(parameter)
                gradient = None if gradient is None else gradient.float()
            if not sharded:
                self._received.append(parameter)
            parameter.grad = gradient
        if self._scaled and not sharded:
            self._handles.append(self._hook(parameter))

    def _hook(self, tensor: Tensor) -> RemovableHandle:
        """Unscale a gradient before the user's hooks see it, those from before as well."""
        handle: RemovableHandle = tensor.register_hook(  # type: ignore[no-untyped-call]
            _Unscale(self._receiver, tensor)
        )
        hooks: Any = tensor._backward_hooks
        for number in [*hooks][:-1]:  # torch's C++ goes by insertion, which move_to_end leaves
            hooks[number] = hooks.pop(number)
        return handle

    @contextmanager
    def running(self, scale: float, loss: Tensor) -> Iterator[None]:
        """The context for a backward of ``loss * scale``.

        The graph of the loss is searched for leaves that are not the model's.
        """
        wide, plain = self._prepare(scale), scale == 1.0
        passing = [] if plain or self._by_fsdp else self._receive_foreign(loss, wide)
        receiver = self._receiver
        if not plain:
            passing.append(loss.register_hook(receiver.begin))  # type: ignore[no-untyped-call]
        thread, before = threading.get_ident(), _RUNNING.get(threading.get_ident())
        outer = receiver.inverse, receiver.task
        receiver.inverse = 1.0 / scale
        _RUNNING[thread] = receiver
        try:
            yield
        finally:
            receiver.inverse, receiver.task = outer
            if before is None:
                del _RUNNING[thread]
            else:
                _RUNNING[thread] = before
            for handle in passing:
                handle.remove()
            for parameter in wide:
                parameter.grad_dtype = None
            if not plain:
                for parameter in self._sharded:
                    gradient = parameter.grad
                    if gradient is not None and gradient.dtype in LOW and self._widens:
                        parameter.grad = gradient.float()
                _multiply_gradients_(self._sharded, 1.0 / scale)

    def _prepare(self, scale: float) -> list[Tensor]:
        """Prepare present gradients for autograd to add to; return those that get fp32 ones."""
        for parameter in self._low:
            if parameter.grad is not None and parameter.grad.dtype in LOW:
                parameter.grad = parameter.grad.float()
        wide: list[Tensor] = []
        for parameter in self._received:
            # torch requires that what a user's hook returns has the gradient's dtype
            hooks = parameter._backward_hooks
            hooked = hooks and len(hooks) > len(_hooks_of(parameter))
            if hooked or (self._widens and parameter.dtype == torch.float16):
                wide.append(_widened(parameter))
        if scale != 1.0:
            _multiply_gradients_(self._sharded, scale)
        return wide

    def _receive_foreign(self, loss: Tensor, wide: list[Tensor]) -> list[RemovableHandle]:
        """Unscale gradients of leaves that are not the model's; widen those of another Precision.

        Widened leaves are appended to ``wide``; leaves that no Precision unscales get hooks.
        """
        handles = []
        for leaf in graph_leaves(loss):
            theirs = [hook.receiver for hook in _hooks_of(leaf).values()]
            if not theirs:
                handles.append(self._hook(leaf))
            elif theirs[0].widens and leaf.dtype == torch.float16 and leaf.grad_dtype is None:
                wide.append(_widened(leaf))
        return handles

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the gradients of these, the smallest first, as a backward has left them."""
        self._left = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                self._left.append((parameter, id(gradient), gradient._version))

    def cleared(self) -> bool:
        """Whether all gradients left by the last backward were since dropped or set to zero."""
        for parameter, identity, version in self._left:
            gradient = parameter.grad
            if gradient is None:
                continue
            if id(gradient) == identity and gradient._version == version:
                return False  # nobody has written it
            if bool(local_part(gradient).any()):
                return False
        return bool(self._left)

    def release(self) -> None:
        """Remove the hooks from all parameters; present gradients stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Make parameters receive gradients as usual in torch, in the dtype of the weight."""
        self.release()
        for parameter in {*self._low, *self._received}:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        self._low, self._received, self._sharded, self._left = [], [], [], []


def graph_leaves(loss: Tensor) -> list[Tensor]:
    """The leaf tensors that would get a gradient from a backward of ``loss``, each once."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    leaves: dict[Tensor, None] = {}
    seen, todo = {loss.grad_fn}, [loss.grad_fn]
    while todo:
        node = todo.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves[node.variable] = None  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return list(leaves)


def _hooks_of(tensor: Tensor) -> dict[int, _Unscale]:
    """The hook that unscales a tensor's gradient, by its id; empty if it has none."""
    hooks: dict[int, Any] = tensor._backward_hooks or {}
    return {number: hook for number, hook in hooks.items() if isinstance(hook, _Unscale)}


def _widened(parameter: Tensor) -> Tensor:
    """Make autograd give a parameter fp32 gradients, and convert a present one to fp32."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = torch.float32
    parameter.grad = None if gradient is None else gradient.float()
    return parameter


def _multiply_gradients_(tensors: Iterable[Tensor], factor: float) -> None:
    for tensor in tensors:
        if tensor.grad is not None:
            local_part(tensor.grad).mul_(factor)
