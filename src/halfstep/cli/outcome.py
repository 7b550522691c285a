"""How one rank of many ends: its exit code, its one line, and word of both to its launcher.

Under ``halfstep train --nproc`` a rank leaves its line to the launcher, which tells what several
ranks say alike once. Under any other launcher each rank prints its own.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from halfstep.errors import HalfstepError, lost_contact

FOLDER = "HALFSTEP_OUTCOME"
"""Environment variable that names the folder where the launcher looks for outcomes."""
INTERRUPTED = 4
_AT_ONCE = (0, 1)  # exit codes after which nobody waits for what the other ranks have to say
_WAIT_SECONDS = 3.0
_LONGEST = 2000  # characters of a line of error
_FILES = "rank*.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one rank."""

    rank: int
    code: int
    message: str
    follows: bool
    """It only follows from the end of another rank."""
    time: float
    """Seconds since the epoch."""


def rank_of_many() -> int | None:
    """This process's rank, or None if it runs alone."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(rank) if size.isdecimal() and int(size) > 1 and rank.isdecimal() else None


def describe(error: BaseException) -> tuple[str, int]:
    """The line for an error, and the exit code."""
    if isinstance(error, HalfstepError):
        return str(error), error.exit_code
    if rank_of_many() is not None and lost_contact(error):
        reason = str(error).partition("\n")[0].partition(". This is typically")[0]
        reason = re.sub(r"^\[[^]]*\] ", "", reason)
        return f"lost contact with another rank ({reason}); its own message tells why", 1
    return f"unexpected {type(error).__name__}: {error}; HALFSTEP_DEBUG=1 shows where", 1


def tell(code: int, message: str = "", error: BaseException | None = None) -> None:
    """Leave word of this rank's end to the launcher, or print the line, if there is one.

    The launcher ends all ranks when the first has failed; so a rank with something to say that
    the others may say alike waits a moment for them.
    """
    message = _printable(" ".join(message.split()))
    rank = rank_of_many()
    folder = os.environ.get(FOLDER)
    if folder is not None and "RANK" in os.environ:
        follows = rank_of_many() is not None and error is not None and lost_contact(error)
        try:
            _write(
                Path(folder), Outcome(int(os.environ["RANK"]), code, message, follows, time.time())
            )
        except OSError:
            pass  # the launcher, which made the folder, is gone
        else:
            if code not in _AT_ONCE:
                _wait_for_others(Path(folder))
            return
    if message:
        who = "" if rank is None else f"rank {rank}: "
        print(f"halfstep: error: {who}{message}", file=sys.stderr)


def _printable(message: str) -> str:
    """A message without control characters, which could steer the terminal, and not endless."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    return plain if len(plain) <= _LONGEST else f"{plain[:1500]} ... {plain[-400:]}"


def leave(code: int) -> None:
    """End a rank at once: after gloo's work the interpreter's own end may abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """What the ranks of this machine have said since :func:`forget_outcomes`, by rank."""
    found = [Outcome(**json.loads(file.read_text("utf-8"))) for file in folder.glob(_FILES)]
    return {outcome.rank: outcome for outcome in sorted(found, key=lambda each: each.rank)}


def forget_outcomes(folder: Path) -> None:
    """Make ready for another attempt."""
    for file in folder.glob(_FILES):
        file.unlink()


def _write(folder: Path, outcome: Outcome) -> None:
    temporary = folder / f"rank{outcome.rank}.tmp"
    temporary.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    os.replace(temporary, temporary.with_suffix(".json"))


def _wait_for_others(folder: Path) -> None:
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    end = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < end:
        if len(list(folder.glob(_FILES))) >= count:
            return
        time.sleep(0.02)
