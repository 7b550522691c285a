"""Records, inside a process of an unchanged program, what ``halfstep contract`` asks for.

A dispatch mode lies below all that the program enters, and passes operations through until the
first forward or backward. Only then is the recorder imported: torch may have been imported by a
module of halfstep that is not complete yet.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

VARIABLE = "HALFSTEP_CONTRACT"
"""Environment variable with what to do: a JSON object with ``folder``, ``steps`` and ``stop``."""
_PATIENCE = 30.0  # seconds that a rank which stops the program waits for the others


class _Bottom(TorchDispatchMode):
    """Hands operations to the recorder, once there is one."""

    supports_higher_order_operators = True
    see: Callable[..., Any] | None = None
    begin: Callable[[], None] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.begin is not None and torch._C._current_graph_task_id() != -1:
            self.begin()
        if self.see is None:
            return func(*args, **(kwargs or {}))
        return self.see(func, types, args, kwargs)


def listen() -> None:
    """Begin at the first forward or backward of this process."""
    wanted = json.loads(os.environ[VARIABLE])
    bottom, real = _Bottom(), threading.Thread.run  # type: ignore[no-untyped-call]

    def begin() -> None:
        bottom.begin = None
        first.remove()
        _record(bottom, **wanted)

    def begin_module(module: torch.nn.Module, args: Any) -> None:
        begin()
        bottom.recorder.calls.begin(module, args)  # type: ignore[attr-defined]

    def run(thread: threading.Thread) -> None:
        """Run a thread, of which only the collectives are seen: modes are each thread's own."""
        other = _Bottom()  # type: ignore[no-untyped-call]

        def see(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            if bottom.see is not None and str(func).startswith(("c10d.", "_c10d_functional.")):
                bottom.recorder.exchanged(func, args, kwargs or {})  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))

        other.see = see
        with other:
            real(thread)

    bottom.begin = begin
    first = register_module_forward_pre_hook(begin_module)
    threading.Thread.run = run  # type: ignore[method-assign]
    bottom.__enter__()  # type: ignore[no-untyped-call]


def _record(bottom: Any, folder: str, steps: int, stop: bool) -> None:
    recorder = importlib.import_module("halfstep.diagnostics.contract").contract()
    path = Path(folder) / f"{os.getpid()}.json"

    def write() -> None:
        one = recorder.recorded()
        rows = [[*row, sorted(where)] for row, where in one.rows.items()]
        found = {name: getattr(one, name) for name in ("world", "rank", "steps", "axes", "asked")}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found | {"rows": rows, "made": dict(one.made)}))
        os.replace(part, path)

    def before_step(optimizer: Any) -> None:
        if steps and recorder.steps.get(optimizer, 0) >= steps:
            write()
            bottom.see = None
            recorder.close()
            if _get_current_dispatch_mode() is bottom:
                bottom.__exit__(None, None, None)
            if stop:
                _end(path, recorder.recorded().world)

    recorder.before_step, recorder.after_step = before_step, write
    recorder.listen()
    bottom.recorder, bottom.see = recorder, recorder.__torch_dispatch__


def _end(path: Path, ranks: int) -> None:
    """End this process once all ranks have recorded: no checkpoint is written any more."""
    path.with_suffix(".done").touch()
    until = time.monotonic() + _PATIENCE
    while len([*path.parent.glob("*.done")]) < ranks and time.monotonic() < until:
        time.sleep(0.05)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
