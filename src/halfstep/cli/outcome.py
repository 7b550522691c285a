"""Ends a rank: determines its exit code and message, and reports both to the launcher.

Under ``halfstep train --nproc`` a rank leaves its message to the launcher, which prints what
several ranks say alike once. torch's error files do not suffice: its agent reads only the first
failed rank's. Under any other launcher each rank prints its own message.
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

from halfstep.cli.words import told
from halfstep.errors import HalfstepError, lost_contact
from halfstep.words import message, said

FOLDER = "HALFSTEP_OUTCOME"
"""Environment variable that names the folder where the launcher looks for outcomes."""
INTERRUPTED = 4
_AT_ONCE = (0, 1)  # exit codes after which a rank does not wait for the other ranks' messages
_WAIT_SECONDS = 3.0
_LONGEST = 2000  # characters of an error message


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended: its exit code and its message."""

    rank: int
    code: int
    message: str
    follows: bool
    """Whether this rank failed only because another one did."""
    time: float
    """Seconds since the epoch."""


def rank_of_many() -> int | None:
    """Return this process's rank, or None if it runs alone."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(rank) if size.isdecimal() and int(size) > 1 and rank.isdecimal() else None


def describe(error: BaseException) -> tuple[str, int]:
    """Return the message for an error, and the exit code."""
    if isinstance(error, HalfstepError):
        return said(message(error)), error.exit_code
    if rank_of_many() is not None and lost_contact(error):
        reason = str(error).partition("\n")[0].partition(". This is typically")[0]
        reason = re.sub(r"^\[[^]]*\] ", "", reason)
        return told("lost_contact", reason=reason), 1
    return told("unexpected", kind=type(error).__name__, error=error), 1


def tell(code: int, message: str = "", error: BaseException | None = None) -> None:
    """Report this rank's end to the launcher or, without halfstep's, print the message if any."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    if len(plain) > _LONGEST:
        plain = f"{plain[:1500]} ... {plain[-400:]}"
    rank, folder = rank_of_many(), os.environ.get(FOLDER)
    if folder is not None and "RANK" in os.environ:
        follows = rank is not None and error is not None and lost_contact(error)
        own = Outcome(int(os.environ["RANK"]), code, plain, follows, time.time())
        with suppress(OSError):  # fails only if the launcher, which made the folder, is gone
            file = Path(folder) / f"rank{own.rank}.tmp"
            file.write_text(json.dumps(asdict(own)), encoding="utf-8")
            os.replace(file, file.with_suffix(".json"))
            # The launcher ends all ranks when the first has failed. So a rank with a message that
            # others may have too waits a moment for theirs.
            end = time.monotonic() + (0 if code in _AT_ONCE else _WAIT_SECONDS)
            count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            while time.monotonic() < end and len(read_outcomes(Path(folder))) < count:
                time.sleep(0.02)
            return
    if plain:
        message = plain if rank is None else told("by_rank", rank=rank, message=plain)
        print(told("error", message=message), file=sys.stderr)


def leave(code: int) -> None:
    """End a rank at once, as the interpreter's normal exit may abort once gloo was used."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """Read what the ranks of this machine have reported in this attempt, by rank."""
    found = [Outcome(**json.loads(file.read_text("utf-8"))) for file in folder.glob("rank*.json")]
    return {outcome.rank: outcome for outcome in sorted(found, key=lambda each: each.rank)}
