"""Tracks by hooks the forwards of a model's modules: which runs, and which a backward belongs to.

Autograd numbers its nodes in the order in which a thread makes them, so the numbers at a forward's
start and end tell which nodes it made. That needs no hooks on tensors, and works for any type of
module output.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.precision.casting import autocast
from halfstep.precision.masters.local_part import storage_key
from halfstep.precision.masters.portable import Hook, make_modules_plain_, make_modules_portable_

_HALFSTEP = str(Path(__file__).parents[1])
_NONFINITE = str(Path(__file__).parent / "nonfinite")
_TORCH = str(Path(torch.__file__).parent)
_PRECISION = f"{_HALFSTEP}/precision"
_NOT_THE_CALLER = (_TORCH, _NONFINITE, __file__, _PRECISION, f"{_HALFSTEP}/integrations")


class Location(NamedTuple):
    """Where an operation runs; the fields are those of :class:`Cause`."""

    module: str = ""
    class_name: str = ""
    direction: Literal["forward", "backward"] = "forward"
    node: str = ""


class Call(NamedTuple):
    """One run of a module's forward."""

    name: str
    class_name: str
    task: int  # the backward pass in which it ran, -1 for none
    learns: bool  # gradients are on, and this is no forward that a backward pass repeats
    first: int  # the number that autograd gives to the first node made in it
    end: int = sys.maxsize  # one more than the last node's


_searching: weakref.WeakSet[ModuleCalls] = weakref.WeakSet()


class ModuleCalls:
    """The forwards of a model's modules while its hooks are on.

    ``ended`` is called with each forward that has ended, and with its output; ``begun`` with the
    inputs of an outermost one. ``passive``: a module that is computed without a call is not seen,
    nor is what runs while one without ``ended`` is hooked, as that looks for each operation.
    """

    def __init__(
        self,
        model: nn.Module,
        ended: Callable[[Call, Any], None] | None = None,
        *,
        begun: Callable[[Any], None] = lambda args: None,
        passive: bool = False,
    ) -> None:
        self._model, self._ended, self._begun, self._passive = model, ended, begun, passive
        self._handles: list[RemovableHandle] = []
        self._portable: list[nn.Module] = []
        self._running: list[Call] = []
        self._calls: list[Call] = []
        self._thread = 0

    def hook(self) -> None:
        """Register the hooks; if that fails, none is left."""
        self._thread = threading.get_ident()
        if self._ended is None:
            _searching.add(self)
        try:
            for name, module in self._model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # it takes no hooks
                enter = Hook(partial(self._enter, name), passive=self._passive)
                leave = Hook(partial(self._leave, name), passive=self._passive)
                self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))
            self._portable = make_modules_portable_(self._model)
        except BaseException:
            self.unhook()
            raise

    def unhook(self) -> None:
        """Remove all hooks and forget what ran."""
        _searching.discard(self)
        for handle in self._handles:
            handle.remove()
        make_modules_plain_(self._portable)
        self._handles, self._portable, self._calls, self._running = [], [], [], []

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or (self._passive and _searching):
            return
        stack, task = self._running, torch._C._current_graph_task_id()
        if not stack:
            self._begun(args)
        # A checkpoint's forward has no gradients on, but is inside of one that has.
        learns = torch.is_grad_enabled() or bool(stack and stack[-1].learns)
        first = torch._C._autograd._get_sequence_nr()
        stack.append(Call(name, type(module).__name__, task, learns and task == -1, first))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._running
        if torch.compiler.is_compiling() or not stack or stack[-1].name != name:
            return
        call = stack.pop()
        if (
            call.task != -1 or threading.get_ident() == self._thread
        ):  # other threads number their own nodes
            self._calls.append(call._replace(end=torch._C._autograd._get_sequence_nr()))
        if self._ended is not None:
            self._ended(call, output)

    @property
    def running(self) -> str | None:
        """The name of the innermost module whose forward runs; None outside of all."""
        return self._running[-1].name if self._running else None

    def place(self, names: Mapping[int, tuple[str, bool]]) -> Location:
        """The location of the current operation; ``names`` are by the key of the storage."""
        task = torch._C._current_graph_task_id()
        top = self._running[-1] if self._running else None
        if task == -1 or (top is not None and top.task == task):
            return Location() if top is None else Location(top.name, top.class_name)
        node = torch._C._current_autograd_node()
        if node is None:
            return Location(direction="backward")
        kind = node.name().removeprefix("torch::autograd::")
        variable = getattr(node, "variable", None)  # of the node that adds to a leaf's gradient
        if isinstance(variable, Tensor) and storage_key(variable) in names:
            parameter = names[storage_key(variable)][0]
            module = parameter.rpartition(".")[0]
            class_name = type(self._model.get_submodule(module)).__name__
            return Location(module, class_name, "backward", f"{kind} of {parameter}")
        # A forward recomputed by this backward pass may reuse node numbers, but makes no node that
        # the pass itself goes through, so such calls are excluded.
        number = node._sequence_nr()
        runs = [c for c in self._calls if c.task != task and c.first <= number < c.end]
        runs = [c for c in runs if c.task == runs[-1].task]
        if not runs:
            return Location("", "", "backward", kind)
        call = min(runs, key=lambda run: run.end - run.first)
        return Location(call.name, call.class_name, "backward", kind)


class Caller(NamedTuple):
    """The code that called an operation."""

    simulated: dict[str, Any] | None  # the arguments of SimulatedProducts.in_fp32, if it runs it
    source: str = ""  # file and line
    own: bool = False  # whether that is a user's autograd.Function


def caller(thread: int) -> Caller:
    """The user's code that runs an operation in a thread, and a 16-bit simulation that is running.

    The simulation may be above a dispatch mode in the stack. Then the mode sees only the parts of
    an operation, and the operation itself is known from the simulation's frame.
    """
    simulated = None
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code is autocast.SimulatedProducts.in_fp32.__code__:
            simulated = frame.f_locals if simulated is None else simulated
        elif not code.co_filename.startswith(_NOT_THE_CALLER):
            own = code.co_varnames[:1] == ("ctx",) and code.co_name in ("forward", "backward")
            own = own and not code.co_filename.startswith(_HALFSTEP)
            return Caller(simulated, f"{code.co_filename}:{frame.f_lineno}", own)
        frame = frame.f_back
    return Caller(simulated)


def makes_first_gradient() -> bool:
    """Whether the running ``torch.ones_like`` is the first gradient of a loss's ``backward``."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(20):  # dispatch modes may be between
        if frame is None or frame.f_code is torch.autograd._make_grads.__code__:
            break
        frame = frame.f_back
    above = None if frame is None else frame.f_back
    return above is not None and above.f_code is torch.autograd.backward.__code__
