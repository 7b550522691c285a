"""How gradients accumulate in ``p.grad``: unscaled, and added up in the policy's format.

A backward of ``loss * S`` gives every gradient times S. It is divided by S again, so that the
training loop always sees the true gradient in ``p.grad``: clipping, masks, noise, norms and hooks
on parameters need not know the scale. S is a power of two and p.grad fp32, so this is exact.

Where anybody could look before a backward ends, a hook divides each gradient before it reaches
``p.grad``. Else one multi-tensor pass divides all of them at the end, which costs the host far
less; what earlier backwards have left in ``p.grad`` is multiplied by S first.

Gradients of 16-bit weights stay 16-bit after one backward, as autograd made them, and become fp32
when a second one is about to be added. Under fp16 they are fp32 from the start, because fp16 could
not hold them unscaled; so are those of parameters with user hooks, which may multiply them by an
fp32 mask. Between two backwards ``p.grad`` accepts a tensor of any dtype.

A loss may also reach leaves that are not the model's: an image that is optimised, or a module that
another optimizer trains. Their gradients are unscaled too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from halfstep.precision.masters.local_part import fsdp_modules, is_sharded, local_part
from halfstep.precision.masters.reduction import Reduction
from halfstep.precision.policy.policy import LOW, PrecisionPolicy

# The threads that run a backward of some Precision, one entry for each backward.
_RUNNING: list[int] = []
# Leaves whose gradients a backward that runs unscales; one inside it, or beside it, does not again.
_REACHED: set[Tensor] = set()
# Whose autograd functions do not look at gradients: code that torch generates, and halfstep.
_BLIND = "torch._functorch.", "torch._library.", "halfstep."


def is_running(device: torch.device) -> bool:
    """Whether this thread runs a backward of some Precision, or works for one, as on CUDA.

    On a CPU a backward runs in the thread that called it; on CUDA autograd uses its own thread.
    """
    return threading.get_ident() in _RUNNING or (device.type != "cpu" and len(set(_RUNNING)) == 1)


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
            torch._C._will_engine_execute_node(get_gradient_edge(tensor).node)
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
        self.reduction = Reduction(policy)
        self._module_hooks: list[Any] = [
            nn.modules.module._global_backward_hooks,
            *(module._backward_hooks for module in model.modules()),
        ]  # what the graph of a loss may not show: those of ``register_backward_hook``
        self._at_once = False  # whether the last backward's gradients were unscaled in one pass
        self._depth = 0  # of the backwards that run now
        self._ends: list[Callable[[], None]] = []  # what follows the last of them, from the end
        self._watched: dict[Tensor, bool] = {}  # with whether FSDP2 sets its gradient
        # gradients as the last backward has left them: whose, which object, and its version
        self._left: list[tuple[nn.Parameter, int, int]] = []

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
        wide = self._prepare()
        if not self._depth and dist.is_available() and dist.is_initialized():
            self.reduction.begin(loss, scale, self._watched)
            self._ends.append(self.reduction.end)
        if scale != 1.0:
            self._unscale(scale, loss, wide)
        self._ends += [partial(setattr, parameter, "grad_dtype", None) for parameter in wide]
        thread = threading.get_ident()
        _RUNNING.append(thread)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            _RUNNING.remove(thread)
            while self._ends and not self._depth:
                self._ends.pop()()

    def _unscale(self, scale: float, loss: Tensor, wide: list[Tensor]) -> None:
        """Have gradients unscaled: by hooks, or when the backward ends if nobody can look."""
        nodes, looks = _accumulators(loss)
        leaves = set[Tensor]()
        if not self._by_fsdp:
            leaves = {node.variable for node in nodes} - self._watched.keys() - _REACHED
            # fp16 weights whose gradients another Precision accumulates in fp32
            theirs = (x for x in leaves if x.dtype == torch.float16 and x.grad_dtype is None)
            wide += map(_widened, theirs)
        leaves |= self._watched.keys() - _REACHED
        self._at_once = not (looks or _are_held(nodes) or self._may_look(leaves))
        late = {leaf for leaf in leaves if self._at_once or self._watched.get(leaf)}
        _multiply_gradients_(late, scale)
        _REACHED.update(leaves)
        self._ends.append(partial(_multiply_gradients_, late, 1.0 / scale))
        self._ends += [partial(self._widen, leaf) for leaf in late if self._watched.get(leaf)]
        self._ends += [hook.remove for hook in _unscaling(leaves - late, 1.0 / scale, loss)]
        self._ends.append(partial(_REACHED.difference_update, leaves))

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

    def _may_look(self, leaves: set[Tensor]) -> bool:
        """Whether gradients of these must be unscaled before the end of a backward.

        A hook or a process group may look at them, or they are added to what cannot be multiplied
        by S in between: fp16 numbers, a user's numbers of any size, and memory of a user's.
        """
        if _RUNNING or any(self._module_hooks):
            return True
        if dist.is_available() and dist.is_initialized():
            return True
        left = {parameter: state for parameter, *state in self._left if self._at_once}
        for leaf in leaves:
            hooks: Any = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
            if hooks or (leaf.dtype == torch.float16 and leaf.grad_dtype != torch.float32):
                return True
            gradient = leaf.grad
            if gradient is not None:
                as_left = left.get(leaf) == [id(gradient), gradient._version]  # type: ignore[call-overload]
                if not as_left or not _is_own(gradient):
                    return True
        return False

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
        self.reduction.close()
        for parameter in [p for p in self._watched if p.dtype in LOW]:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        self._watched, self._left = {}, []


def graph_leaves(loss: Tensor) -> list[Tensor]:
    """The leaf tensors that would get a gradient from a backward of ``loss``, each once."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    return [node.variable for node in _accumulators(loss)[0]]


def _accumulators(loss: Tensor) -> tuple[list[Any], bool]:
    """The nodes of a graph that add to ``.grad``, and whether Python of others runs in others."""
    todo: list[Any] = [get_gradient_edge(loss).node] if loss.requires_grad else []
    found, looks, seen = list[Any](), False, {*todo}
    while todo:
        node = todo.pop()
        if type(node).__name__ == "AccumulateGrad":
            found.append(node)
        elif isinstance(node, BackwardCFunction):  # also of modules' hooks and of checkpoints
            looks = looks or not node._forward_cls.__module__.startswith(_BLIND)  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found, looks


def _are_held(nodes: list[Any]) -> bool:
    """Whether somebody holds one of these nodes, as one does who has hooks on it."""
    with torch.enable_grad():
        graph: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    nodes.append(graph.next_functions[0][0])  # which nobody holds
    *counts, alone = [sys.getrefcount(node) for node in nodes]
    return any(count > alone for count in counts)


def _unscaling(leaves: set[Tensor], inverse: float, loss: Tensor) -> list[RemovableHandle]:
    """Unscale gradients of a backward of ``loss`` before the user's hooks see them."""
    if not leaves:
        return []
    task: list[int] = []
    # autograd calls a hook on the loss before all others
    handles = [loss.register_hook(lambda _: task.append(torch._C._current_graph_task_id()))]  # type: ignore[no-untyped-call]
    for leaf in [leaf for leaf in leaves if leaf.requires_grad]:
        handles.append(leaf.register_hook(_Unscale(inverse, leaf, task)))  # type: ignore[no-untyped-call]
        hooks: Any = leaf._backward_hooks
        for number in [*hooks][:-1]:  # torch's C++ goes by insertion, which move_to_end leaves
            hooks[number] = hooks.pop(number)
    return handles


def _widened(parameter: Tensor) -> Tensor:
    """Make autograd give a parameter fp32 gradients, and convert a present one to fp32."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = torch.float32
    parameter.grad = None if gradient is None else gradient.float()
    return parameter


def _is_own(gradient: Tensor) -> bool:
    """Whether nobody else holds the memory of a gradient, as one of its views would."""
    if gradient.layout is not torch.strided or gradient.requires_grad:
        return False
    uses: int = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return uses == 2  # the gradient, and the object that was asked


@torch.no_grad()
def _multiply_gradients_(tensors: Iterable[Tensor], factor: float) -> None:
    """Multiply ``.grad`` of these in one multi-tensor pass; what others may hold is replaced.

    Gradients may share memory, as those of ``a`` and ``b`` do in ``a.view(-1) + b.view(-1)``.
    """
    parts = list[Tensor]()
    for tensor in tensors:
        gradient = tensor.grad
        if gradient is None:
            continue
        part = local_part(gradient)
        if part is not gradient or _is_own(gradient):  # FSDP2's are parts of a buffer of its own
            parts.append(part)
        else:
            with torch.enable_grad():  # of a backward with create_graph
                tensor.grad = gradient * factor
    if parts:
        torch._foreach_mul_(parts, factor)
