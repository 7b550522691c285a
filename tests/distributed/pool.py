"""Worker processes with one gloo group for their whole life.

They are copies of one process, which imports what takes seconds before it makes them.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 120  # a job that takes longer hangs
COLLECTIVE_SECONDS = 40  # so does a collective
IMPORTED = ("pytest", "torch._dynamo", "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel", "halfstep.distributed.shard",
            "halfstep.distributed.tensor_parallel", "halfstep.trainer.session")  # fmt: skip
"""What takes long to import, and most workers need."""
JOBS = 40  # after which new processes serve: meshes leave groups, whose threads poll for ever
WHERE_ASKED_FOR = ("accelerate", "transformers.trainer")
"""The same, for workers of tests that have imported it."""


class Pool:
    """``size`` processes that run functions of test modules side by side."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        asked_for = [name for name in WHERE_ASKED_FOR if name in sys.modules]
        context.set_forkserver_preload([*IMPORTED, *asked_for])
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self._folder.name, "rendezvous")
        self._pipes = []
        self._processes = []
        self._jobs = 0
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call ``function(rank, **arguments)`` in every process; the results by rank.

        The function stands at the top of a module; arguments and results are pickled. Where it
        raises in any process, AssertionError shows every process's traceback.
        """
        self._jobs += 1
        if self._jobs > JOBS:
            self.close()
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, arguments))
        answers: list[tuple[bool, Any]] = []
        for pipe in self._pipes:
            try:
                answers.append(
                    pipe.recv() if pipe.poll(SECONDS) else (False, "no answer: it hangs")
                )
            except EOFError:
                answers.append((False, "the process died"))
        if not all(good for good, _ in answers):
            self.close()  # their group may be in any state
            self._start()
            failed = [f"rank {r}: {text}" for r, (good, text) in enumerate(answers) if not good]
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(rank: int, size: int, rendezvous: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # the interpreter's own end may abort after gloo's threads
        torch.manual_seed(0)  # models that nobody seeds are copies of each other
        try:
            answer = (True, getattr(importlib.import_module(module), name)(rank, **arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
