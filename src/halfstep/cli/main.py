"""The ``halfstep`` program: parses a command line, runs its command, maps errors to exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from halfstep import __version__
from halfstep.cli.commands import MODULES, Request, read_words
from halfstep.errors import HalfstepError, NonFiniteError, PeerError

INTERRUPTED = 4
"""Exit code of a run that a signal ended after it had saved."""
_LONGEST = 2000  # characters of an error message
_APART = 0.2  # seconds between the ranks of a machine that have one error; torch looks every 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; as a program that is one of many ranks, exit here.

    Commands are imported by name, as importing all of them would import torch before ``--help``
    could answer: docs/decisions/0003-command-line.md.
    """
    code = _run(sys.argv[1:] if argv is None else argv)
    if argv is None and rank_of_many() is not None:
        _leave(code)
    return code


def _run(argv: Sequence[str]) -> int:
    if list(argv) in (["-v"], ["--version"]):
        print(f"halfstep {__version__}")
        return 0
    try:
        name, arguments = read_words(argv)
        word = name.split()[0]
        module = MODULES.get(word, word)
        if isinstance(arguments, Request) and arguments.start.nproc:
            module = "launch"
        code = int(importlib.import_module(f"halfstep.cli.{module}").run(arguments))
        sys.stdout.flush()
    except SystemExit as end:  # after printing help
        return int(end.code or 0)
    except BrokenPipeError:  # the reader of the pipe, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (Exception, KeyboardInterrupt) as error:
        if rank_of_many() is not None:  # torch ends the others once the first to speak has ended
            last = 8 * isinstance(error, PeerError)
            with suppress(KeyboardInterrupt):  # a launcher forwards what a rank has had
                time.sleep(_APART * (last + int(os.environ.get("LOCAL_RANK", "0"))))
        code = _complain(*describe(error))
        if os.environ.get("HALFSTEP_DEBUG") == "1":
            raise
    return code


def describe(error: BaseException) -> tuple[str, int]:
    """Return the message for an error, and the exit code."""
    match error:
        case HalfstepError():
            return re.sub(r"\[Errno -?\d+\] ", "", str(error)), error.exit_code
        case KeyboardInterrupt():
            return f"interrupted; {error or 'what was not saved is lost'}", 130
        case OSError(filename=str()):  # a name or a place that the user has given
            told = f"{error.filename}: {error.strerror}"
            return told, 1 if error.errno == errno.ENOSPC else 2
        case ModuleNotFoundError():
            return f"{error}; all that commands need: pip install 'halfstep[train,hf]'", 2
    return f"unexpected {type(error).__name__}: {error}; HALFSTEP_DEBUG=1 shows where", 1


def _complain(text: str, code: int) -> int:
    """Print an error in one line, a NaN in its four; with the number of the rank, if many."""
    rank = rank_of_many()
    start = f"halfstep: error: {'' if rank is None else f'rank {rank}: '}"
    lines = text.splitlines() if code == NonFiniteError.exit_code else [text]
    for line in lines or [""]:
        plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(line.split()))
        if len(plain) > _LONGEST:
            plain = f"{plain[:1500]} ... {plain[-400:]}"
        print(f"{start}{plain}", file=sys.stderr)
        start = "  "
    return code


def rank_of_many() -> int | None:
    """Return this process's rank, or None if it runs alone."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(rank) if size.isdecimal() and int(size) > 1 and rank.isdecimal() else None


def _leave(code: int) -> None:
    """End a rank at once, as the interpreter's normal exit may abort once gloo was used."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
