"""What a rank says to the others where no collective can carry it: in the store of the group.

A rank that fails leaves its word before its process ends, and its end is what the others notice:
their collectives fail, with a text about sockets. They look here for the reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch.distributed as dist

from halfstep.errors import PeerError, lost_contact

SECONDS = 3.0  # a word is there before its rank is gone; ranks that wait time out one by one


def say(text: str) -> None:
    """Leave this rank's word; "" takes it back. Waits for nobody."""
    with suppress(RuntimeError):  # the store's process may be gone
        word = text[:2000].encode(errors="replace").decode()  # a path may hold any bytes
        _store().set(f"halfstep/{dist.get_rank()}", f"={word}")


def tell(error: BaseException) -> None:
    """Say why this rank cannot go on; nothing if the reason is another rank."""
    own = isinstance(error, Exception | KeyboardInterrupt) and not lost_contact(error)
    if own and dist.is_initialized() and dist.get_world_size() > 1:
        say(f"{type(error).__name__}: {error}")


def heard(ranks: Iterable[int], *, wait: bool = False) -> dict[int, str]:
    """The words of those of these ranks that have left one; waits a little until all have."""
    found: dict[int, str] = {}
    ranks, end = [*ranks], time.monotonic() + SECONDS * wait
    with suppress(RuntimeError):
        while len(found) < len(ranks):
            for rank in ranks:
                key = f"halfstep/{rank}"
                word = _store().get(key).decode()[1:] if _store().check([key]) else ""
                if word:
                    found[rank] = word
            if time.monotonic() > end:
                break
            time.sleep(0.02)
    return found


def reason(error: BaseException) -> PeerError | None:
    """The error to raise in place of lost contact: another rank's own words, if it left some."""
    if not (dist.is_initialized() and lost_contact(error)) or isinstance(error, PeerError):
        return None
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    words = heard(others)
    return PeerError(told(words)) if words else None


def told(words: dict[int, str]) -> str:
    """Words by rank, for a message."""
    return "; ".join(f"rank {rank}: {word}" for rank, word in sorted(words.items()))


@cache
def listen() -> None:
    """From now on also say what this process ends with where nothing catches it."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, traceback: Any) -> None:
        tell(error)
        if (peer := reason(error)) is not None:
            peer.__cause__ = error
            kind, error = PeerError, peer
        before(kind, error, traceback)

    sys.excepthook = hook


def _store() -> Any:
    world: Any = dist.group.WORLD
    return world.get_group_store()
