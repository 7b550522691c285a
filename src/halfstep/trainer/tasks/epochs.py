"""What the tasks with epochs share: dealing out examples, and models of ``transformers``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from halfstep.distributed.world import World
from halfstep.trainer.checkpoint.tensors import Exported
from halfstep.trainer.config.tasks import (
    ClassifyConfig,
    FinetuneConfig,
    LMConfig,
    PretrainedConfig,
)
from halfstep.trainer.data.batches import EpochBatches
from halfstep.trainer.models.pretrained import Pretrained, pin
from halfstep.trainer.models.pretrained_tokenizer import (
    PretrainedTokenizer,
    open_tokenizer,
    require_vocabulary,
)
from halfstep.trainer.run.model_folder import replace_folder
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


class FinetuneTask(EpochTask):
    """A task with a model and a tokenizer of ``transformers``."""

    model: Pretrained
    tokenizer: PretrainedTokenizer
    keeps_best = True
    leaves = "model"
    """What the run leaves, in a word."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer to ``folder/tokenizer``."""
        self.tokenizer.save(folder / "tokenizer")

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write the best state to ``model/``, for ``transformers`` and the commands to load."""

        def write(empty: Path) -> None:
            self.model.save_(empty, exported().weights)
            self.tokenizer.save(empty)

        replace_folder(folder / "model", write)
        return f"{self.leaves} in {folder / 'model'}"


Config = TypeVar("Config", ClassifyConfig, LMConfig)


def pinned(config: Config, world: World) -> Config:
    """Pin the configuration to the model's current commit on the hub; all ranks call it.

    A run uses one commit throughout: all ranks, model and tokenizer, all resumes.
    """
    choice = config.model
    own = world.main_only(lambda: pin(choice.source, choice.revision))
    model: Any = dataclasses.replace(choice, revision=world.share(own or ""))
    return dataclasses.replace(config, model=model)


def tokenizer_of(
    model: Pretrained, choice: PretrainedConfig, max_length: int
) -> PretrainedTokenizer:
    """Open the tokenizer that comes with a model, and check that it belongs to it."""
    tokenizer = open_tokenizer(
        choice.source,
        max_length=max_length,
        model_limit=model.max_length,
        revision=choice.revision,
    )
    require_vocabulary(model, tokenizer)
    return tokenizer
