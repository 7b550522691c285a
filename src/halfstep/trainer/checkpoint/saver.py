"""Saves checkpoints in the background: a step waits for a copy of the state, not for the disk."""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from halfstep.trainer.checkpoint.shards import Part
from halfstep.trainer.checkpoint.store import Checkpoint, Team, save_part


class Saver:
    """Writes a run's checkpoints in a thread, so that training need not wait for the disk.

    Every rank has one, and calls :meth:`save` and :meth:`wait` for the same steps in the same
    order. The thread runs no collectives, which could interleave with those of training. Host
    memory holds one copy of this rank's part of the state at a time.

    An error in a save is raised once, by the next call of any method; if there is none, it is
    printed when the interpreter exits. The interpreter does not exit during a save.

    Args:
        folder: The run's ``checkpoints`` folder, which all ranks share.
        keep: How many checkpoints to keep, at least 1.
        team: The ranks that save. Its token, without a number, is the same on all ranks but
            different at every start of the run. A single rank may leave it empty.
        meet: Waits for all ranks, and raises if one is gone. Every :meth:`save` and :meth:`wait`
            calls it once, after the other ranks have written their parts and before rank 0 waits
            for their receipts, which a dead rank would never send. One process needs none.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        team: Team = Team(),  # noqa: B008  (frozen)
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._team = team
        self._meet = meet
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._path: Path | None = None  # a completed checkpoint that was not yet returned
        self._error: BaseException | None = None  # an error that was not yet raised
        atexit.register(self._last_words)

    def save(
        self, step: int, checkpoint: Checkpoint, *, spared: int | None = None, still: bool = False
    ) -> None:
        """Save the state as it is now; the caller may change it as soon as this returns.

        The checkpoint of the step ``spared`` is not removed, whatever its age. A caller who says
        ``still`` changes nothing before :meth:`wait` returns, and saves the memory of a copy.

        This first waits for the save before it, whose error it raises instead of beginning.

        Raises:
            NonFiniteError: If this save or the one before it has a NaN or inf.
            CheckpointError: If this save or the one before it cannot be written.
        """
        self._settle()
        self._saves += 1
        token = self._team.token
        team = replace(self._team, token=token and f"{token}.{self._saves}")
        part = checkpoint.part(team.rank, step)
        held = [part if still else part.copied()]
        self._thread = threading.Thread(
            target=self._work,
            args=(step, held, team, spared),
            name=f"save-step-{step}",
            daemon=False,  # else it is what the thread that trains is
        )
        self._thread.start()

    def finished(self) -> Path | None:
        """Return the checkpoint completed since the last call, if any, without waiting.

        Raises:
            NonFiniteError: If the save found a NaN or inf.
            CheckpointError: If the save could not be written.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._join()
        return self._told()

    def wait(self) -> Path | None:
        """Wait for the running save, then return and raise as :meth:`finished` does."""
        self._settle()
        return self._told()

    def close(self) -> None:
        """Wait for the running save; the saver must not be used after this.

        Raises:
            NonFiniteError: If the save found a NaN or inf.
            CheckpointError: If the save could not be written.
        """
        try:
            self._join()
        finally:
            atexit.unregister(self._last_words)

    def _told(self) -> Path | None:
        path, self._path = self._path, None
        return path

    def _settle(self) -> None:
        """Wait for the running save, provided that all ranks are alive to finish it."""
        if self._team.rank and self._thread is not None:
            self._thread.join()  # _join raises its error later: rank 0 waits in meet() first
        self._meet()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()  # if interrupted, the thread is kept, and the next call joins it
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, step: int, held: list[Part], team: Team, spared: int | None) -> None:
        """Run in the thread; popping ``held`` leaves no other reference to the copied state."""
        try:
            self._path = save_part(self._folder, step, held.pop(), self._keep, team, spared)
        except BaseException as error:
            _forget(error)
            self._error = error

    def _last_words(self) -> None:
        if self._error is not None:
            print(f"halfstep: error: {self._error}", file=sys.stderr)


def _forget(error: BaseException) -> None:
    """Clear the frames of an error's traceback, which would keep a copy of the state alive."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
