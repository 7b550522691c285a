"""Lets ``halfstep contract`` see an unchanged program; first on its PYTHONPATH, Python imports it.

Once torch is imported, a dispatch mode lies below all that the program enters. It passes operations
through until the first forward or backward: until then a module of halfstep may be incomplete.
"""

import importlib
import json
import os
import sys
import threading
import warnings
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

_WANTED = json.loads(os.environ.get("HALFSTEP_CONTRACT", "{}"))


class _AfterTorch:
    """Finds torch as Python does, and begins to listen once that has been imported."""

    looking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return the spec of torch, and nothing for all else; many only ask whether it is there."""
        if name != "torch" or self.looking:
            return None
        self.looking = True
        spec: Any = find_spec(name)
        self.looking = False
        if spec is not None:
            execute = spec.loader.exec_module

            def then_listen(module: Any) -> None:
                sys.meta_path.remove(self)
                execute(module)
                _Program(module)

            spec.loader.exec_module = then_listen
        return spec


class _Program:
    """A process of the program, from the import of torch to the last step that is recorded."""

    def __init__(self, torch: Any) -> None:
        modes = importlib.import_module("torch.utils._python_dispatch")
        hooks = importlib.import_module("torch.nn.modules.module")

        class Mode(modes.TorchDispatchMode):  # type: ignore[misc, name-defined]
            supports_higher_order_operators = True

            def __torch_dispatch__(mode, *call: Any) -> Any:
                return self.dispatched(mode, *call)

        def run(thread: threading.Thread) -> None:
            with Mode():  # modes are each thread's own
                real(thread)

        self.torch, self.top, self.mode = torch, modes, Mode()
        self.seen: Any = None
        self.path = Path(_WANTED["folder"]) / f"{os.getpid()}.json"
        warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks")  # they are ours
        self.hook = hooks.register_module_forward_pre_hook(self.begin)
        real, threading.Thread.run = threading.Thread.run, run  # type: ignore[method-assign, assignment]
        self.mode.__enter__()

    def dispatched(
        self, mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.hook is not None and self.torch._C._current_graph_task_id() != -1:
            self.begin()
        if self.seen is not None and mode is self.mode:
            return self.seen.__torch_dispatch__(func, types, args, kwargs)
        if self.seen is not None:  # of other threads only what they exchange
            self.seen.exchanged(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def begin(self, *call: Any) -> None:
        self.hook = self.hook.remove()
        self.seen = importlib.import_module("halfstep.diagnostics.contract").contract()
        self.seen.before_step, self.seen.after_step = self.before_step, self.write
        self.seen.listen()
        if call:
            self.seen.calls.begin(*call)

    def write(self) -> None:
        self.seen.recorded().write(self.path, "rank", "steps", "asked")

    def before_step(self, optimizer: Any) -> None:
        if self.seen is None or not 0 < _WANTED["steps"] <= self.seen.steps.get(optimizer, 0):
            return
        self.write()
        self.seen = self.seen.close()
        if self.top._get_current_dispatch_mode() is self.mode:
            self.mode.__exit__(None, None, None)
        if _WANTED["stop"]:
            if self.torch.distributed.is_initialized():
                self.torch.distributed.barrier()  # the others are at this step as well
            sys.stdout.flush()
            os._exit(0)


if _WANTED:
    sys.meta_path.insert(0, _AfterTorch())
_others = [path for path in sys.path if path != str(Path(__file__).parent)]
_hidden: Any = PathFinder.find_spec("sitecustomize", _others)  # the user's own
if _hidden is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
