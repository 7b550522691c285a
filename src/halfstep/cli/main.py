"""The ``halfstep`` program: parses a command line, runs its command, maps errors to exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress

from halfstep import __version__
from halfstep.cli.commands import Request
from halfstep.cli.grammar import read_words
from halfstep.errors import HalfstepError, lost_contact

INTERRUPTED = 4
"""Exit code of a run that a signal ended after it had saved."""
_LONGEST = 2000  # characters of an error message


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
    if any("\0" in word for word in argv):
        return _complain(ValueError(), "an argument holds a NUL character", 2)
    if list(argv) == ["--version"]:
        print(f"halfstep {__version__}")
        return 0
    try:
        name, arguments = read_words(argv)
        module = name.split()[0]
        if isinstance(arguments, Request):
            module = "train" if arguments.start.nproc is None else "launch"
        code = int(importlib.import_module(f"halfstep.cli.{module}").run(arguments))
        sys.stdout.flush()
    except SystemExit as end:  # after printing help
        return int(end.code or 0)
    except KeyboardInterrupt as error:
        return _complain(error, "interrupted; what was not saved is lost", 130)
    except BrokenPipeError:  # the reader of the pipe, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        return _complain(error, *_told(error))
    return code


def _told(error: Exception) -> tuple[str, int]:
    """Return the message for an error, and the exit code."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the disk: {error}", 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"a name is too long for this file system: {error}", 2
    extra = extra_with(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if extra:
        return f"{error}; install what this needs: pip install 'halfstep[{extra}]'", 2
    return describe(_cause(error))


def extra_with(module: str) -> str:
    """Name the extra of halfstep that installs a module's package, preferably ``train``, or ""."""
    # Imported only here, as importlib.metadata takes as long to import as all of the grammar.
    requires = importlib.import_module("importlib.metadata").requires
    package, extras = module.partition(".")[0].lower(), []
    for line in requires("halfstep") or []:
        found = re.match(r"([\w.-]+).*extra *== *['\"]([\w-]+)", line)
        if found and found[1].replace("-", "_").lower() == package:
            extras.append(found[2])
    return "train" if "train" in extras else next(iter(extras), "")


def _cause(error: Exception) -> Exception:
    """Return the error, or its cause if that is a torch version which lacks something."""
    if isinstance(error, ImportError | AttributeError) and "torch" in sys.modules:
        try:
            # By name, as the commands are: it imports torch.
            importlib.import_module("halfstep.torch_compat").require_torch()
        except HalfstepError as cause:
            return cause
    return error


def _complain(error: BaseException, text: str, code: int) -> int:
    """Print an error in one line, with the number of the rank where there are several."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    if len(plain) > _LONGEST:
        plain = f"{plain[:1500]} ... {plain[-400:]}"
    rank = rank_of_many()
    plain = plain if rank is None else f"rank {rank}: {plain}"
    print(f"halfstep: error: {plain}", file=sys.stderr)
    if os.environ.get("HALFSTEP_DEBUG") == "1":
        raise
    return code


def rank_of_many() -> int | None:
    """Return this process's rank, or None if it runs alone."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(rank) if size.isdecimal() and int(size) > 1 and rank.isdecimal() else None


def describe(error: BaseException) -> tuple[str, int]:
    """Return the message for an error, and the exit code."""
    if isinstance(error, HalfstepError):
        return str(error), error.exit_code
    if rank_of_many() is not None and lost_contact(error):
        reason = str(error).partition("\n")[0].partition(". This is typically")[0]
        reason = re.sub(r"^\[[^]]*\] ", "", reason)
        return f"lost contact with another rank ({reason}); its own message tells why", 1
    return f"unexpected {type(error).__name__}: {error}; HALFSTEP_DEBUG=1 shows where", 1


def _leave(code: int) -> None:
    """End a rank at once, as the interpreter's normal exit may abort once gloo was used."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
