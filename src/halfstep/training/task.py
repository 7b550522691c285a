"""What a run trains: its model, data and measure, behind one protocol that the loop knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from halfstep.training.evaluate import Evaluation, Judge
from halfstep.training.run_config import BaseConfig
from halfstep.training.step import Batch

Progress = Callable[[str, int, int], None]
"""Called while data is prepared: what, how far, of how much."""


class Task(Protocol):
    """A model, its data and its measure.

    All ranks call all methods together, but for those of which it is said otherwise.
    """

    model: Any
    """A module with ``loss_sum(batch) -> (sum, count)``, both fp32 scalars."""
    identity: Mapping[str, str]
    """What a checkpoint must have been made with, such as its data: name to hash."""
    smallest_batch: int
    """Rows of the smallest batch of a step, over all ranks."""
    notes: list[str]
    """What a user should know of the data, one sentence each."""
    keeps_best: bool
    """Whether the state with the best evaluation is kept, besides the newest."""

    @property
    def config(self) -> BaseConfig:
        """With everything filled in that only data and model could tell."""

    def summary(self) -> str:
        """What is trained, and on what, in a few words."""

    def batch_size(self, step: int) -> int:
        """Rows of a step's batch, over all ranks."""

    def batch(self, step: int, rows: range) -> Batch:
        """Rows of a step's batch, on the host; a pure function."""

    def targets(self, batch: Batch) -> float:
        """What the losses' sum is divided by: the sum of this over all batches of the step."""

    def tokens(self, step: int) -> int:
        """Tokens of a step's batch over all ranks, without padding."""

    def flops(self, tokens: float) -> float:
        """Arithmetic of training on so many tokens, in operations."""

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure the model, which is in evaluation mode; every target once over all ranks."""

    def save(self, folder: Path) -> None:
        """Write into a new run folder what the model's use needs besides weights; rank 0."""

    def improved(self, folder: Path, step: int, evaluation: Evaluation) -> None:
        """Write what there is to tell of an evaluation that is the best so far; rank 0."""

    def finish(self, folder: Path, weights: Callable[[], Mapping[str, Tensor]]) -> str:
        """Write what the user takes away, at the run's end; rank 0.

        Args:
            folder: The run's.
            weights: Gives the fp32 weights of the state to take, by name.

        Returns:
            What was written, in words; empty for nothing.
        """
