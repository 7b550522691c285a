"""What a rank says to the others where no collective can carry it: in the group's store.

A rank that fails leaves its word before its process ends. The others notice only that end: their
collectives fail, with a text about sockets. Here they look for the reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch.distributed as dist

from halfstep.errors import PeerError, lost_contact

_SECONDS = 1.0  # ranks that wait for each other time out one after the other


def say(text: str) -> None:
    """Leave this rank's word; "" takes it back. Waits for nobody."""
    word = text[:2000].encode(errors="replace").decode()  # a path may hold any bytes
    with suppress(RuntimeError):  # the store's process may be gone
        _store().set(f"halfstep/{dist.get_rank()}", f"={word}")


def tell(error: BaseException) -> None:
    """Say why this rank cannot go on; nothing if the reason is another rank."""
    if isinstance(error, Exception | KeyboardInterrupt) and _many() and not lost_contact(error):
        say(f"{type(error).__name__}: {error}")


def heard(ranks: Iterable[int], seconds: float = 0.0) -> str:
    """What these ranks have said, after a wait of at most so long for those that have not."""
    words, end = dict.fromkeys(ranks, ""), time.monotonic() + seconds
    with suppress(RuntimeError):
        while True:
            for rank in words:
                key = f"halfstep/{rank}"
                words[rank] = _store().get(key).decode()[1:] if _store().check([key]) else ""
            if all(words.values()) or time.monotonic() > end:
                break
            time.sleep(0.02)
    return "; ".join(f"rank {rank}: {word or 'says nothing'}" for rank, word in words.items())


def lost(error: BaseException, ranks: Sequence[int], doing: str) -> None:
    """Raise PeerError with the other ranks' words if the error means that one of them is gone."""
    if ranks and lost_contact(error) and not isinstance(error, PeerError) and _many():
        say(doing)
        others = heard([rank for rank in ranks if rank != dist.get_rank()], _SECONDS)
        text = f"lost contact with another rank, as this one {doing}: {others}"
        raise PeerError(text) from error


@cache
def listen() -> None:
    """From now on also say what this process ends with where nothing catches it."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, traceback: Any) -> None:
        tell(error)
        before(kind, error, traceback)

    sys.excepthook = hook


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _store() -> Any:
    world: Any = dist.group.WORLD
    return world.get_group_store()
