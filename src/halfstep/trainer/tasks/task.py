"""What a run trains: its model, data and measure, behind one protocol that the loop knows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from halfstep.distributed.world import World
from halfstep.trainer.config.config import config_to_table
from halfstep.trainer.config.finetune import ClassifyConfig, LMConfig
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.models.pretrained.hub import pin
from halfstep.trainer.step import Batch

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


# What ranks have alike, and what each has for itself.


def facts(config: BaseConfig) -> dict[str, str]:
    """What all ranks must have alike: versions, and every key but where data is kept."""
    table = config_to_table(config)
    table["data"].pop("cache_dir", None)
    sections = {name: part for name, part in table.items() if isinstance(part, dict)}
    facts = {"torch version": torch.__version__, "halfstep version": metadata.version("halfstep")}
    facts |= {name: str(value) for name, value in table.items() if name not in sections}
    return facts | {
        f"{name}.{key}": str(value)
        for name, part in sections.items()
        for key, value in part.items()
    }


def share_of(size: int, rank: int, ranks: int) -> range:
    """Which of ``size`` things a rank takes; the shares follow each other without a gap."""
    return range(rank * size // ranks, (rank + 1) * size // ranks)


def dropout_seed(seed: int, step: int, first_row: int) -> int:
    """A seed for each micro-batch, by its first row in the step's batch.

    So a resumed run needs no random state, and a rank's masks are those of a micro-batch of one
    process that begins at the same row.
    """
    text = f"dropout {seed} {step} {first_row}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


# One commit of a model on the hub for a whole run: all ranks, model and tokenizer, resumes.


Config = TypeVar("Config", ClassifyConfig, LMConfig)


def pinned(config: Config, world: World) -> tuple[Config, dict[str, Any]]:
    """The configuration with the commit that its model's name means now; all ranks together.

    Returns:
        The configuration, and what opening model and tokenizer takes: revision and trust.

    Raises:
        ConfigError: If there is no such model.
    """
    choice = config.model
    trust = choice.trust_remote_code
    own = world.main_only(lambda: pin(choice.source, choice.revision, trust_remote_code=trust))
    revision = world.share(own or "")
    model: Any = dataclasses.replace(choice, revision=revision)
    options = {"revision": revision, "trust_remote_code": trust}
    return dataclasses.replace(config, model=model), options
