"""The step that a run is at, on which random bits of recipes below 16 bits depend."""

from __future__ import annotations

import torch.distributed as dist


class Clock:
    """Gives random bits for a step.

    Attributes:
        step: How many steps have been taken or skipped; the owner counts.

    Args:
        rank: Which part of each batch this process sees, so that ranks draw other bits.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.step = rank, 0
        self._drawn: dict[int, int] = {}
        self._drawn_at = 0

    def draw(self, stream: int) -> tuple[int, int, int]:
        """Seed, step and stream of random bits: others for each step, rank and micro-batch."""
        if self._drawn_at != self.step:
            self._drawn.clear()
            self._drawn_at = self.step
        drawn = self._drawn.get(stream, 0)
        self._drawn[stream] = drawn + 1
        return drawn + (self.rank << 16), self.step, stream


def make_clock() -> Clock:
    """The clock of this process in a training run."""
    return Clock(dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)
