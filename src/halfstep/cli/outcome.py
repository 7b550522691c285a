"""How one rank of many ends: its exit code, its one line, and word of both to its launcher.

Under ``halfstep train --nproc`` a rank leaves its line to the launcher, which tells what several
ranks say alike once. torch's error files do not do: its agent reads only the first rank's, as it
ends the others. Under any other launcher each rank prints its own line.
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
    """Leave word of this rank's end to the launcher, or print the line, if there is one."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    if len(plain) > _LONGEST:
        plain = f"{plain[:1500]} ... {plain[-400:]}"
    rank, folder = rank_of_many(), os.environ.get(FOLDER)
    if folder is not None and "RANK" in os.environ:
        follows = rank is not None and error is not None and lost_contact(error)
        own = Outcome(int(os.environ["RANK"]), code, plain, follows, time.time())
        with suppress(OSError):  # else the launcher, which made the folder, is gone
            file = Path(folder) / f"rank{own.rank}.tmp"
            file.write_text(json.dumps(asdict(own)), encoding="utf-8")
            os.replace(file, file.with_suffix(".json"))
            # The launcher ends all ranks when the first has failed; so one with something to say
            # that the others may say alike waits a moment for them.
            end = time.monotonic() + (0 if code in _AT_ONCE else _WAIT_SECONDS)
            count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            while time.monotonic() < end and len(read_outcomes(Path(folder))) < count:
                time.sleep(0.02)
            return
    if plain:
        who = "" if rank is None else f"rank {rank}: "
        print(f"halfstep: error: {who}{plain}", file=sys.stderr)


def leave(code: int) -> None:
    """End a rank at once: after gloo's work the interpreter's own end may abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """What the ranks of this machine have said in this attempt, by rank."""
    found = [Outcome(**json.loads(file.read_text("utf-8"))) for file in folder.glob("rank*.json")]
    return {outcome.rank: outcome for outcome in sorted(found, key=lambda each: each.rank)}
