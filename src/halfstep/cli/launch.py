"""Starts the ranks of ``halfstep train --nproc N`` by torch's own launcher.

``halfstep train --nproc N ... -- OPTIONS`` means ``torchrun --nproc-per-node N OPTIONS -m halfstep
train ...``. Each rank prints its own message.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from halfstep.cli.commands import Request
from halfstep.cli.main import INTERRUPTED

_PROGRAM = ("-m", "halfstep")  # what each rank runs
_SAVING_SECONDS = 600


def run(request: Request) -> int:
    """Train on ``--nproc`` ranks of this machine; return the code of a rank that failed."""
    nproc = request.start.nproc
    # torchrun's own default is one thread a rank, however many cores there are
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // nproc)))
    words = _without_nproc(request.words)
    options = ["--nproc-per-node", str(nproc), *request.launcher]
    chosen: Any = torchrun.get_args_parser().parse_args([*options, *_PROGRAM, *words])
    if getattr(chosen, "shutdown_timeout", 0) is None:  # newer versions of torch have it
        chosen.shutdown_timeout = _SAVING_SECONDS  # torch would kill a save after 30 s
    try:
        torchrun.run(chosen)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        return next((code for code in (3, 2, 75, 1, INTERRUPTED) if code in codes), 1)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _without_nproc(given: list[str]) -> list[str]:
    words: list[str] = []
    left = iter(given)
    for word in left:
        if word == "--nproc":
            next(left)
        elif not word.startswith("--nproc="):
            words.append(word.replace("$", "$$"))  # torch substitutes $ and ${} in arguments
    return words
