"""The configurations of all tasks: of GPTs trained on text here, of fine-tuning beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from halfstep.errors import ConfigError
from halfstep.trainer.config.finetune import (
    ClassifierConfig,
    ClassifyConfig,
    FinetuneConfig,
    LMConfig,
    ModuleConfig,
)
from halfstep.trainer.config.run import BaseConfig, RunConfig
from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.models.shapes import Shape, of_the_run

__all__ = [
    "TASKS",
    "ClassifierConfig",
    "ClassifyConfig",
    "FinetuneConfig",
    "LMConfig",
    "ModuleConfig",
    "TextRunConfig",
    "TrainConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRunConfig(RunConfig):
    """How a GPT is trained on text."""

    block_size: int = 0
    """Tokens of one training sequence; 0: the model's block_size."""
    init_from: str = ""
    """A local Hugging Face GPT-2 folder to start from instead of random weights. Its shape takes
    the place of ``model``'s, whose dropout and activation_checkpointing stay."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        RunConfig.__post_init__(self)
        if self.block_size < 0:
            raise ConfigError(f"run.block_size={self.block_size}; allowed: >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(BaseConfig):
    """Train a GPT on text."""

    TASK: ClassVar[str] = "pretrain"
    COMMAND: ClassVar[str] = "train"
    SHORT: ClassVar[Mapping[str, str]] = {"data": "data.train", "val-data": "data.validation"}

    model: Shape
    data: DataConfig = field(default_factory=DataConfig)
    run: TextRunConfig = field(default_factory=TextRunConfig)

    def __post_init__(self) -> None:
        """Raise for contradictions between the parts."""
        BaseConfig.__post_init__(self)
        if self.run.init_from and self.data.tokenizer.startswith("bpe:"):
            raise ConfigError(
                f"data.tokenizer={self.data.tokenizer} would give the words of run.init_from="
                f"{self.run.init_from} other ids than it was trained with; give --tokenizer its "
                "tokenizer.json or folder"
            )
        if not self.run.init_from and self.block_size > self.model.block_size:
            raise ConfigError(
                f"run.block_size={self.run.block_size} is over model.block_size="
                f"{self.model.block_size}; shorten the sequences or raise --model.block_size"
            )

    @classmethod
    def shipped(cls, given: Mapping[str, Any]) -> str:
        """Always the same one."""
        return "gpt-small-cpu"

    def filled(self, saved: Self) -> Self:
        """With the run's vocabulary, or with the shape of the model that it started from."""
        shape = self.model
        if self.run.init_from and self.run.init_from == saved.run.init_from:
            shape = dataclasses.replace(saved.model, **of_the_run(shape))
        elif not shape.vocab_size:
            shape = dataclasses.replace(shape, vocab_size=saved.model.vocab_size)
        return dataclasses.replace(self, model=shape)

    @property
    def block_size(self) -> int:
        """Tokens of one training sequence."""
        return self.run.block_size or self.model.block_size


TASKS: Mapping[str, type[BaseConfig]] = {
    kind.TASK: kind for kind in (TrainConfig, ClassifyConfig, LMConfig, ModuleConfig)
}
"""The value of a file's key ``task``, absent for ``pretrain``, to the class of its tree."""
