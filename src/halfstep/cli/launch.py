"""Starts the ranks of ``halfstep train --nproc N`` by torch's own launcher.

``halfstep train --nproc N ... -- OPTIONS`` means ``torchrun --nproc-per-node N OPTIONS -m halfstep
train ...``. Where ranks fail alike,
one of them says it.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from halfstep.cli.commands import Request
from halfstep.cli.main import INTERRUPTED
from halfstep.shown import LAUNCHER

_PROGRAM = ("-m", "halfstep")  # what each rank runs
_SAVING_SECONDS = 600
_GRACE = 1  # seconds after a rank has failed, for which torch waits 30: another may be stopped


def run(request: Request) -> int:
    """Train on ``--nproc`` ranks of this machine; return the code of a rank that failed."""
    nproc = request.start.nproc
    # torchrun's own default is one thread a rank, however many cores there are
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // nproc)))
    words = _without_nproc(request.words)
    typed = ["--nproc", str(nproc), *["--"][: len(request.launcher)], *request.launcher]
    os.environ[LAUNCHER] = shlex.join(typed)
    options = ["--nproc-per-node", str(nproc), *request.launcher]
    chosen: Any = torchrun.get_args_parser().parse_args([*options, *_PROGRAM, *words])
    if getattr(chosen, "shutdown_timeout", 0) is None:  # newer versions of torch have it
        chosen.shutdown_timeout = _SAVING_SECONDS  # torch would kill a save after 30 s
    logging.getLogger(PContext.__module__).addFilter(  # not what a rank has said itself
        lambda line: not re.search(r"closing signal|exitcode: \d", line.getMessage())
    )
    PContext.close = _close  # type: ignore[assignment, method-assign]
    try:
        torchrun.run(chosen)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        return next((code for code in (3, 2, 75, 1, INTERRUPTED) if code in codes), 1)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _close(context: Any, sig: Any = None, timeout: int = 30, *, real: Any = PContext.close) -> None:
    """End ranks: without a signal because one has failed, for which the others can only wait."""
    real(context, sig, timeout if sig else _GRACE)


def _without_nproc(given: list[str]) -> list[str]:
    words: list[str] = []
    left = iter(given)
    for word in left:
        if word == "--nproc":
            next(left)
        elif not word.startswith("--nproc="):
            words.append(word.replace("$", "$$"))  # torch substitutes $ and ${} in arguments
    return words
