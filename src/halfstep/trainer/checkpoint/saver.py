"""Saving beside training: a step waits for a copy of the state, not for the disk."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from halfstep.trainer.checkpoint.shards import Part
from halfstep.trainer.checkpoint.store import Checkpoint, Team, save_part


class Saver:
    """Writes a run's checkpoints in a thread, which training need not wait for.

    Every rank has one, and calls :meth:`save` and :meth:`wait` for the same steps in the same
    order. There are no collectives in the thread. Host memory holds one copy of this rank's part of
    the state at a time.

    An error of a save is raised once, by the next call of any method; if none comes, it is printed
    when the interpreter ends. The interpreter does not end while a save is going on.

    Args:
        folder: The run's ``checkpoints`` folder, which all ranks share.
        keep: How many checkpoints to keep, at least 1.
        team: The ranks that save; the token is the same on all of them and another one in every
            start of the run, without a number. One rank may leave it empty.
        background: Whether training goes on meanwhile; otherwise :meth:`save` waits, and nothing is
            copied.
        meet: Waits for all ranks, and raises if one is gone. Every :meth:`save` and :meth:`wait`
            calls it once, when the other ranks' parts are written and before rank 0 waits for their
            receipts: those of the dead never come. One process needs none.

    Attributes:
        blocked_seconds: How long the last :meth:`save` kept its caller, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        team: Team = Team(),  # noqa: B008  (frozen)
        background: bool = True,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.blocked_seconds = 0.0
        self._folder = folder
        self._keep = keep
        self._team = team
        self._background = background
        self._meet = meet
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._path: Path | None = None  # of a save that nobody has been told of
        self._error: BaseException | None = None  # that nobody has been told of
        atexit.register(self._last_words)

    def save(self, step: int, checkpoint: Checkpoint, *, spared: int | None = None) -> None:
        """Save the state as it is now; the caller may change it as soon as this returns.

        The checkpoint of the step ``spared`` is not removed, whatever its age.

        First waits for the save before it. In the background, only memory is read and written here;
        otherwise the checkpoint is complete on return, on rank 0.

        Raises:
            NonFiniteError: If this or the save before it has a NaN or inf; not begun in the latter
                case, as with any error of the save before it.
            CheckpointError: If it, or the save before it, cannot be written.
        """
        begin = time.perf_counter()
        try:
            if self._background:
                self._settle()
            self._saves += 1
            token = self._team.token
            team = replace(self._team, token=token and f"{token}.{self._saves}")
            part = checkpoint.part(team.rank, step)
            held = [part.copied() if self._background else part]
            self._thread = threading.Thread(
                target=self._work,
                args=(step, held, team, spared),
                name=f"save-step-{step}",
                daemon=False,
            )
            self._thread.start()
            if not self._background:
                self._settle()
        finally:
            self.blocked_seconds = time.perf_counter() - begin

    def finished(self) -> Path | None:
        """The newest checkpoint completed since last told of; does not wait.

        Raises:
            NonFiniteError: If the save found a NaN or inf.
            CheckpointError: If the save could not be written.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._join()
        return self._told()

    def wait(self) -> Path | None:
        """Wait for the save that is going on; then as :meth:`finished`."""
        self._settle()
        return self._told()

    def close(self) -> None:
        """Wait for the save that is going on; the saver is not used after this.

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
        """Wait for the save that is going on, as long as all ranks are there to finish it."""
        if self._team.rank and self._thread is not None:
            self._thread.join()  # its error waits: rank 0 is to be met, and has the receipt
        self._meet()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()  # an interrupt leaves it as it is: asked again, it is joined again
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, step: int, held: list[Part], team: Team, spared: int | None) -> None:
        """The thread. ``held`` gives the only reference to the copy away."""
        try:
            self._path = save_part(self._folder, step, held.pop(), self._keep, team, spared)
        except BaseException as error:
            _forget(error)
            self._error = error

    def _last_words(self) -> None:
        if self._error is not None:
            print(f"halfstep: error: {self._error}", file=sys.stderr)


def _forget(error: BaseException) -> None:
    """Let go of what the frames of an error hold, which is a copy of the whole state."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
