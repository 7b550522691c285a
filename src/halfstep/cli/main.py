"""``halfstep``: parse, load the one command that was asked for, turn errors into exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from halfstep import __version__
from halfstep.cli.grammar import (
    RUNS,
    build_parser,
    shield_negative_value,
    split_launcher,
    split_overrides,
)
from halfstep.cli.outcome import describe, leave, rank_of_many, tell
from halfstep.errors import HalfstepError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; one rank of many, run as a program, exits here.

    Commands are loaded by name, since importing them all would import torch before ``--help``
    could answer: docs/decisions/0003-command-loading.md.
    """
    code = _run(sys.argv[1:] if argv is None else argv)
    if argv is None and rank_of_many() is not None:
        leave(code)
    return code


def _run(argv: Sequence[str]) -> int:
    if any("\0" in word for word in argv):
        return _complain(ValueError(), "an argument holds a NUL character", 2)
    words, launcher = split_launcher(argv)
    words, overrides = split_overrides(words)
    parser = build_parser(__version__)
    arguments = parser.parse_args(shield_negative_value(words))
    name = arguments.command
    if overrides and name not in RUNS:
        parser.error(f"--{overrides[0][0]} is an option of {' and '.join(RUNS)} only")
    if name in RUNS and arguments.nproc is not None:
        name = "launch"
    elif launcher is not None:
        parser.error("what stands after -- is for torchrun, and needs --nproc N before it")
    arguments.overrides, arguments.words, arguments.launcher = overrides, words, launcher or []
    try:
        command = importlib.import_module(f"halfstep.cli.{name}")
        code = int(command.run(arguments))
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        return _complain(error, "interrupted; what was not saved is lost", 130)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _complain(error, f"no space left on the disk: {error}", 1)
        if error.errno == errno.ENAMETOOLONG:
            return _complain(error, f"a name is too long for this file system: {error}", 2)
        return _complain(error, *describe(error))
    except Exception as error:
        return _complain(error, *describe(_cause(error)))
    tell(code)
    return code


def _cause(error: Exception) -> Exception:
    """The error, or that this torch lacks what was looked for."""
    if isinstance(error, ImportError | AttributeError) and "torch" in sys.modules:
        try:
            # By name, as the commands are: it imports torch.
            importlib.import_module("halfstep.torch_version").require_torch()
        except HalfstepError as cause:
            return cause
    return error


def _complain(error: BaseException, message: str, code: int) -> int:
    tell(code, message, error)
    if os.environ.get("HALFSTEP_DEBUG") == "1":
        raise
    return code
