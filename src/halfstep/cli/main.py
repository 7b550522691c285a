"""``halfstep``: parse, load the one command that was asked for, turn errors into exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from halfstep import __version__
from halfstep.cli.arguments import build_parser, shield_negative_value, split_overrides
from halfstep.errors import HalfstepError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Commands are loaded by name, since importing them all would import torch before ``--help``
    could answer: docs/decisions/0003-command-loading.md.
    """
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    parser = build_parser(__version__)
    arguments = parser.parse_args(shield_negative_value(words))
    if overrides and arguments.command != "train":
        parser.error(f"--{overrides[0][0]} is an option of train only")
    arguments.overrides = overrides
    try:
        command = importlib.import_module(f"halfstep.cli.{arguments.command}")
        code = int(command.run(arguments))
        sys.stdout.flush()
    except HalfstepError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted; what was not saved is lost", 130)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _complain(f"no space left on the disk: {error}", 1)
        return _unexpected(error)
    except Exception as error:
        return _unexpected(error)
    return code


def _complain(message: str, code: int) -> int:
    if os.environ.get("HALFSTEP_DEBUG") == "1":
        raise
    print(f"halfstep: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _unexpected(error: Exception) -> int:
    text = f"unexpected {type(error).__name__}: {error}; HALFSTEP_DEBUG=1 shows where"
    return _complain(text, 1)
