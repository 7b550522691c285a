"""What the tasks with epochs share: dealing out examples, and models from the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.trainer.config.tasks import (
    ClassifierConfig,
    ClassifyConfig,
    FinetuneConfig,
    LMConfig,
)
from halfstep.trainer.data.batches import EpochBatches
from halfstep.trainer.data.config import InstructionsConfig
from halfstep.trainer.models.pretrained.hub import pin
from halfstep.trainer.tasks.task import Task


class EpochTask(Task):
    """A task with epochs, each of which has every example once."""

    config: FinetuneConfig

    def deal(self, config: FinetuneConfig, lengths: npt.ArrayLike) -> None:
        """Deal the examples out to steps by their lengths, and resolve epochs into steps."""
        run = config.run
        self._lengths = np.asarray(lengths)
        self._batches = EpochBatches(self._lengths, run.batch_size, run.seed)
        self.smallest_batch = len(self._lengths) // self._batches.steps_per_epoch
        self.config = config.resolved(self._batches.steps_per_epoch)

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the indices of a step's examples."""
        return self._batches.indices(step)

    def batch_size(self, step: int) -> int:
        """Return the number of a step's examples; steps of an epoch differ by one at most."""
        return len(self.indices(step))

    def rows(self, step: int) -> Mapping[str, list[int]]:
        """Return the positions of a step's examples among the training examples."""
        return {"examples": self.indices(step).tolist()}

    def tokens(self, step: int) -> int:
        """Return the tokens of the step's examples, special tokens included."""
        return int(self._lengths[self.indices(step)].sum())


# A run uses one commit of a hub model throughout: all ranks, model and tokenizer, all resumes.


Config = TypeVar("Config", ClassifyConfig, LMConfig)


def pinned(config: Config, world: World) -> tuple[Config, dict[str, Any]]:
    """Pin the configuration to the model's current commit on the hub; all ranks call it.

    Returns:
        The configuration, and keyword arguments for opening model and tokenizer.

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


Part = TypeVar("Part", ClassifierConfig, InstructionsConfig)


def within(part: Part, section: str, limit: int | None, source: str) -> Part:
    """Limit a section's default ``max_length`` to the number of a model's positions.

    Raises:
        ConfigError: If the user set a ``max_length`` beyond it.
    """
    if limit is None or part.max_length <= limit:
        return part
    if part.max_length != type(part)().max_length:
        raise ConfigError(
            f"{section}.max_length={part.max_length} is over the {limit} positions of "
            f"model.source={source}; lower --max-length"
        )
    return dataclasses.replace(part, max_length=limit)
