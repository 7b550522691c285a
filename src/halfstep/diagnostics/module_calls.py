"""In which module's forward an operation runs, and of which forward a backward is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.diagnostics.operations import storage_key


class Place(NamedTuple):
    """Where an operation runs.

    Attributes:
        module: Qualified name of the innermost module; "" for the root, or outside of all.
        class_name: Its class; "" outside of all modules.
        backward: Whether autograd runs it, other than to compute a forward again.
        node: The autograd node that runs.
    """

    module: str = ""
    class_name: str = ""
    backward: bool = False
    node: str = ""


class _Call(NamedTuple):
    """One run of a module's forward.

    Attributes:
        name: Of the module.
        class_name: Its class.
        task: The backward pass in which it ran, -1 for none.
        first: The number that autograd gives to the first node made in it.
        end: One more than the last node's.
    """

    name: str
    class_name: str
    task: int
    first: int
    end: int = sys.maxsize


class ModuleCalls:
    """Follows the forwards of a model's modules by hooks.

    Autograd numbers its nodes in the order in which a thread makes them, so the numbers at a
    forward's start and end tell which nodes it made. That needs no hooks on tensors, and holds for
    whatever a module returns.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._stack: list[_Call] = []
        self._calls: list[_Call] = []

    def hook(self) -> None:
        """Start; after an error no hook is left."""
        try:
            for name, module in self._model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # it takes no hooks
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))
        except BaseException:
            self.unhook()
            raise

    def unhook(self) -> None:
        """Remove all hooks and forget what ran."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._stack, self._calls = [], [], []

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        task = torch._C._current_graph_task_id()
        first = torch._C._autograd._get_sequence_nr()
        self._stack.append(_Call(name, type(module).__name__, task, first))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1].name == name:
            call = self._stack.pop()
            self._calls.append(call._replace(end=torch._C._autograd._get_sequence_nr()))

    def place(self, names: Mapping[int, tuple[str, bool]]) -> Place:
        """Where the operation that runs now is.

        Args:
            names: Of parameters, by the key of their storage.
        """
        task = torch._C._current_graph_task_id()
        top = self._stack[-1] if self._stack else None
        if task == -1 or (top is not None and top.task == task):
            return Place() if top is None else Place(top.name, top.class_name)
        node = torch._C._current_autograd_node()
        if node is None:
            return Place(backward=True)
        kind = node.name().removeprefix("torch::autograd::")
        variable = getattr(node, "variable", None)  # of the node that adds to a leaf's gradient
        if isinstance(variable, Tensor) and storage_key(variable) in names:
            parameter = names[storage_key(variable)][0]
            module = parameter.rpartition(".")[0]
            class_name = type(self._model.get_submodule(module)).__name__
            return Place(module, class_name, True, f"{kind} of {parameter}")
        # Forwards that a backward pass runs again may number their nodes anew, and make none that
        # this same pass goes through.
        number = node._sequence_nr()
        runs = [c for c in self._calls if c.task != task and c.first <= number < c.end]
        runs = [c for c in runs if c.task == runs[-1].task]
        if not runs:
            return Place("", "", True, kind)
        call = min(runs, key=lambda run: run.end - run.first)
        return Place(call.name, call.class_name, True, kind)
