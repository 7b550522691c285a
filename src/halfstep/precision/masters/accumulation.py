"""How gradients accumulate in ``p.grad``: unscaled, and added up in the policy's format.

A backward of ``loss * S`` gives every gradient times S. When it ends, ``p.grad`` of all leaves that
it may have reached is divided by S again, so that the training loop always sees the true gradient
there: clipping, masks, noise and norms need not know the scale. Nor need hooks on parameters: the
gradients of these are divided as they become ready, by a hook that runs before the user's. What
earlier backwards have left there is multiplied by S first. S is a power of two and p.grad fp32, so
all of this is exact.

Gradients of 16-bit weights stay 16-bit after one backward, as autograd made them, and become fp32
when a second one is about to be added. Under fp16 they are fp32 from the start, because fp16 could
not hold them unscaled; so are those of parameters with user hooks, which may multiply them by an
fp32 mask. Between two backwards ``p.grad`` accepts a tensor of any dtype.

A loss may also reach leaves that are not the model's: an image that is optimised, or a module that
another optimizer trains. Their gradients are unscaled too.
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

# How many backwards of some Precision each thread runs.
_RUNNING: dict[int, int] = {}
_OPEN: weakref.WeakSet[GradientAccumulation] = weakref.WeakSet()


def is_running(device: torch.device) -> bool:
    """Whether this thread runs a backward of some Precision, or works for one, as on CUDA.

    On a CPU a backward runs in the thread that called it; on CUDA autograd uses its own thread.
    """
    return threading.get_ident() in _RUNNING or (device.type != "cpu" and len(_RUNNING) == 1)


class _Unscale:
    """A hook on a tensor that multiplies its ready gradient by 1 / S, while a backward runs."""

    __torch_unserializable__ = True  # torch warns of hooks that a pickled tensor would lose

    def __init__(self, inverse: float, tensor: Tensor, task: list[int]) -> None:
        self._inverse, self._tensor = inverse, weakref.ref(tensor)
        self._task = task  # autograd's number of the backward, once it has begun

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # a Function's backward returned none
            return None
        if torch._C._current_graph_task_id() not in self._task and self._is_returned():
            return None
        return gradient * self._inverse

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
        self._depth = 0  # of the backwards that run now
        self._watched: dict[
            Tensor, bool
        ] = {}  # parameters, each with whether FSDP2 sets its gradient
        # gradients as the last backward has left them: whose, which object, and its version
        self._left: list[tuple[nn.Parameter, int, int]] = []
        _OPEN.add(self)

    def watch(self, parameter: nn.Parameter) -> None:
        """Make a trainable parameter, in its final dtype, receive gradients as the policy says."""
        self._watched[parameter] = self._by_fsdp and is_sharded(parameter)
        if parameter.dtype in LOW:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = None  # lets ``grad`` have any dtype
            parameter.grad = gradient
            self._widen(parameter)

    @contextmanager
    def running(self, scale: float, loss: Tensor) -> Iterator[None]:
        """The context for a backward of ``loss * scale``.

        The graph of the loss is searched for leaves that are not the model's.
        """
        wide, leaves = self._prepare(), list[Tensor]()
        if scale != 1.0 and not self._depth:  # an outer backward unscales what an inner one adds
            leaves = [*self._watched]
            if not self._by_fsdp:
                foreign = [leaf for leaf in graph_leaves(loss) if leaf not in self._watched]
                wide += [_widened(leaf) for leaf in foreign if _is_widened_elsewhere(leaf)]
                leaves += foreign
        hooks = list[RemovableHandle]()
        if leaves:
            hooked = {leaf for leaf in leaves if self._needs_hook(leaf)}
            hooks = _unscaling(hooked, 1.0 / scale, loss)
            leaves = [leaf for leaf in leaves if leaf not in hooked]
            _multiply_gradients_(leaves, scale)
        thread = threading.get_ident()
        outer = _RUNNING.get(thread, 0)
        _RUNNING[thread] = outer + 1
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            _RUNNING[thread] = outer
            if not outer:
                del _RUNNING[thread]
            for hook in hooks:
                hook.remove()
            for parameter in wide:
                parameter.grad_dtype = None
            for leaf in leaves:
                if self._watched.get(leaf):
                    self._widen(leaf)
            if leaves:
                _multiply_gradients_(leaves, 1.0 / scale)

    def _prepare(self) -> list[Tensor]:
        """Prepare present gradients for autograd to add to; return those that get fp32 ones."""
        wide = []
        for parameter, by_fsdp in self._watched.items():
            if parameter.dtype in LOW:
                self._widen(parameter)
                # torch requires that what a user's hook returns has the gradient's dtype
                at_once = self._widens and parameter.dtype == torch.float16
                if not by_fsdp and (at_once or parameter._backward_hooks):
                    wide.append(_widened(parameter))
        return wide

    def _widen(self, parameter: Tensor) -> None:
        """Convert a present 16-bit gradient to fp32, where gradients are accumulated in it."""
        if self._widens and parameter.grad is not None and parameter.grad.dtype in LOW:
            parameter.grad = parameter.grad.float()

    def _needs_hook(self, leaf: Tensor) -> bool:
        """Whether a leaf's gradient must be unscaled before the end of a backward.

        Hooks of the user's look at it, or what it is added to is fp16, which has no room for S.
        """
        if self._watched.get(leaf):
            return False
        looked_at: Any = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
        return bool(looked_at) or (leaf.dtype == torch.float16 and leaf.grad_dtype != torch.float32)

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

    def close(self) -> None:
        """Make parameters receive gradients as usual in torch, in the dtype of the weight."""
        for parameter in [p for p in self._watched if p.dtype in LOW]:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        self._watched, self._left = {}, []


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


def _unscaling(leaves: set[Tensor], inverse: float, loss: Tensor) -> list[RemovableHandle]:
    """Unscale gradients of a backward of ``loss`` before the user's hooks see them."""
    if not leaves:
        return []
    task: list[int] = []
    # autograd calls a hook on the loss before all others
    handles = [loss.register_hook(lambda _: task.append(torch._C._current_graph_task_id()))]  # type: ignore[no-untyped-call]
    for leaf in leaves:
        handles.append(leaf.register_hook(_Unscale(inverse, leaf, task)))  # type: ignore[no-untyped-call]
        hooks: Any = leaf._backward_hooks
        for number in [*hooks][:-1]:  # torch's C++ goes by insertion, which move_to_end leaves
            hooks[number] = hooks.pop(number)
    return handles


def _is_widened_elsewhere(leaf: Tensor) -> bool:
    """Whether a leaf is a fp16 weight whose gradients another Precision accumulates in fp32."""
    return leaf.dtype == torch.float16 and any(
        other._widens and leaf in other._watched for other in _OPEN
    )


def _widened(parameter: Tensor) -> Tensor:
    """Make autograd give a parameter fp32 gradients, and convert a present one to fp32."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = torch.float32
    parameter.grad = None if gradient is None else gradient.float()
    return parameter


@torch.no_grad()
def _multiply_gradients_(tensors: Iterable[Tensor], factor: float) -> None:
    """Multiply ``.grad`` of these in one multi-tensor pass, each of its elements once.

    Gradients may share memory, as those of ``a`` and ``b`` do in ``a.view(-1) + b.view(-1)``.
    """
    found = list[tuple[int, int, int, Tensor, Tensor, Tensor]]()
    parts, last, end = list[Tensor](), 0, 0
    for tensor in tensors:
        gradient = tensor.grad
        if gradient is None:
            continue
        part = local_part(gradient)
        if gradient.requires_grad or part.layout is not torch.strided:
            with torch.enable_grad():  # of a backward with create_graph
                tensor.grad = gradient * factor
        else:
            start = int(part.storage_offset()) * part.element_size()
            place = part.untyped_storage()._cdata, start, len(found)
            found.append((*place, tensor, gradient, part))
    for storage, start, _, tensor, gradient, part in sorted(found):
        if storage == last and start < end:
            tensor.grad = gradient * factor
        else:
            parts.append(part)
            last, end = storage, start + part.nbytes
    if parts:
        torch._foreach_mul_(parts, factor)
