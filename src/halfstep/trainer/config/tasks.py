"""The configuration classes of all tasks, and how their trained models are used.

These are command options, so this imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from halfstep.errors import ConfigError
from halfstep.option import Amount, AtLeast1, Count, Positive, Range, Share, option
from halfstep.trainer.config.run import BaseConfig, RunConfig
from halfstep.trainer.data.config import DataConfig, InstructionsConfig, LabelledConfig
from halfstep.trainer.models import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRunConfig(RunConfig):
    """How a GPT is trained on text."""

    block_size: Count = option(0, "Tokens of one training sequence; 0: the model's block_size.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(BaseConfig):
    """Train a GPT on text."""

    TASK: ClassVar[str] = "pretrain"
    COMMAND: ClassVar[str] = "train"
    SHORT = BaseConfig.SHORT | {"data": "data.train", "val-data": "data.validation"}

    model: GPTConfig
    data: DataConfig = field(default_factory=DataConfig)
    run: TextRunConfig = field(default_factory=TextRunConfig)

    def __post_init__(self) -> None:
        if self.block_size > self.model.block_size:
            raise ConfigError(
                f"run.block_size={self.run.block_size} is over model.block_size="
                f"{self.model.block_size}; shorten the sequences or raise --model.block_size"
            )

    @property
    def block_size(self) -> int:
        """Tokens of one training sequence."""
        return self.run.block_size or self.model.block_size

    @classmethod
    def shipped(cls, given: Mapping[str, Any]) -> str:
        """Always start from the small GPT that trains on a CPU in minutes."""
        return "gpt-small-cpu"

    def filled(self, saved: Self) -> Self:
        """Take over the saved vocabulary size, and a warm-up as short as the run was."""
        size = self.model.vocab_size or saved.model.vocab_size
        warmup = min(self.schedule.warmup_steps, saved.run.max_steps)
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, vocab_size=size),
            schedule=dataclasses.replace(self.schedule, warmup_steps=warmup),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneRunConfig(RunConfig):
    """Length of a fine-tuning run in epochs, and which state of it to keep."""

    max_steps: Count = option(
        0, "Optimizer steps, skipped ones included; 0: as many as epochs take."
    )
    epochs: Positive = option(
        3.0, "Number of times that each training example is seen; unused with max_steps."
    )
    min_steps: Count = option(
        0, "Optimizer steps to take at least, where neither epochs nor max_steps is asked for."
    )
    warmup_ratio: Share = option(
        0.06, "Fraction of the steps used as warm-up, where schedule.warmup_steps is 0."
    )
    batch_size: AtLeast1 = option(
        32,
        "Examples in one optimizer step, over all ranks and micro-batches; the batches of an "
        "epoch differ by one at most.",
    )
    eval_every: Count = option(
        0, "Evaluate every this many steps and at the end; 0: after every epoch."
    )
    eval_batches: Count = option(0, "Evaluate on this many batches only; 0: every example once.")
    save_every: Count = option(
        500,
        "Save every this many steps, besides after every evaluation and at the end; 0: only then.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedConfig:
    """The model settings that both kinds of fine-tuning share."""

    source: str = option("", "A Hugging Face folder, or a name on the hub.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(BaseConfig):
    """The configuration that both kinds of fine-tuning share."""

    SHORT = BaseConfig.SHORT | {"model": "model.source"}

    model: PretrainedConfig = field(default_factory=PretrainedConfig)
    run: FinetuneRunConfig = field(default_factory=FinetuneRunConfig)

    def filled(self, saved: Self) -> Self:
        """Take over the saved number of warm-up steps."""
        asked = min(self.schedule.warmup_steps, saved.run.max_steps)
        warmup = asked or saved.schedule.warmup_steps
        return dataclasses.replace(
            self, schedule=dataclasses.replace(self.schedule, warmup_steps=warmup)
        )

    def resolved(self, steps_per_epoch: int) -> Self:
        """Replace epochs and the warm-up ratio by numbers of steps."""
        run, schedule = self.run, self.schedule
        steps = run.max_steps or max(1, math.ceil(run.epochs * steps_per_epoch - 1e-9))
        often = steps_per_epoch
        if not run.max_steps and steps < run.min_steps:
            steps = run.min_steps  # a small file; evaluating after every epoch would take longer
            often = max(often, steps // 20)
        warmup = min(schedule.warmup_steps or int(run.warmup_ratio * steps), steps)
        return dataclasses.replace(
            self,
            run=dataclasses.replace(run, max_steps=steps, eval_every=run.eval_every or often),
            schedule=dataclasses.replace(schedule, warmup_steps=warmup),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig(PretrainedConfig):
    """The model section of a classifier's run."""

    source: str = option(
        "scratch:small", "scratch:tiny|small|base, a Hugging Face folder, or a name on the hub."
    )
    max_length: Annotated[int, Range("integers >= 3", lambda x: x >= 3)] = option(
        128, "Tokens of a text, special ones included; longer texts are cut, and counted."
    )
    label_smoothing: Share = option(
        0.0, "Share of each target's probability that is spread evenly over all classes."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyConfig(FinetuneConfig):
    """Train a text classifier: CSV, TSV, JSONL, JSON or a dataset of the hub."""

    TASK: ClassVar[str] = "classify"
    COMMAND: ClassVar[str] = "finetune classify"

    model: ClassifierConfig = field(default_factory=ClassifierConfig)
    data: LabelledConfig = field(default_factory=LabelledConfig)

    @classmethod
    def shipped(cls, given: Mapping[str, Any]) -> str:
        """Choose by source: a pretrained encoder needs a smaller learning rate than scratch."""
        scratch = str(given.get("model.source", "scratch:")).startswith("scratch:")
        return "classify-scratch" if scratch else "classify-pretrained"


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMConfig(PretrainedConfig):
    """The model section of a language model's fine-tuning."""

    lora_r: Count = option(8, "Rank of the LoRA adapters; 0: train all weights instead.")
    lora_alpha: Positive = option(16.0, "Adapters are scaled by alpha / r.")
    lora_dropout: Share = option(0.0, "Dropout before the adapters.")
    lora_targets: tuple[str, ...] = option(
        (), "Names of modules to adapt, or all-linear; empty: the usual ones of the architecture."
    )
    gradient_checkpointing: bool = option(
        False, "Keep only each block's input, and recompute the block in the backward pass."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LMConfig(FinetuneConfig):
    """Tune a causal language model on texts, instructions or chats, by LoRA or in full."""

    TASK: ClassVar[str] = "lm"
    COMMAND: ClassVar[str] = "finetune lm"

    model: CausalLMConfig = field(default_factory=CausalLMConfig)
    data: InstructionsConfig = field(default_factory=InstructionsConfig)

    @classmethod
    def shipped(cls, given: Mapping[str, Any]) -> str:
        """Choose by LoRA rank: full training needs a smaller learning rate than adapters."""
        return "lm-full" if str(given.get("model.lora_r", "")).strip() == "0" else "lm-lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleConfig(FinetuneConfig):
    """A module of the user's own, trained by :class:`halfstep.Trainer`."""

    TASK: ClassVar[str] = "module"
    COMMAND: ClassVar[str] = ""


TASKS: Mapping[str, type[BaseConfig]] = {
    kind.TASK: kind for kind in (TrainConfig, ClassifyConfig, LMConfig, ModuleConfig)
}
"""Value of a file's key ``task`` (absent: ``pretrain``) to the configuration class of that task."""


# How a trained model is used.


@dataclass(frozen=True, kw_only=True)
class Use:
    """Which model to use, on which device and in which precision."""

    run: str = field(
        metadata={"help": "A run folder: its newest checkpoint, or if fine-tuned its best state."}
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    precision: str = option("", "Policy of the forward pass; default: the run's own.")


@dataclass(frozen=True, kw_only=True)
class Predicting(Use):
    """Classify texts; write one JSON object per text: text, label, probability."""

    input: str = field(
        metadata={"help": "A .jsonl, .json, .csv, .tsv or .parquet file, or lines; '-': stdin."}
    )
    output: str = option("-", "JSONL file to write; '-', the default, is stdout.")
    text_column: str = option("", "Name of the column that holds the text.")
    batch_size: AtLeast1 = option(64, "Texts in one forward pass.")


@dataclass(frozen=True, kw_only=True)
class Generating(Use):
    """Write text with a trained model."""

    prompt: str = option("", "Text to go on from.")
    max_new_tokens: Count = option(200, "Write at most this many tokens.")
    temperature: Amount = option(0.8, "How boldly to sample; 0: always the likeliest token.")
    seed: int = option(0, "Random seed of the sampling.")

    @property
    def drawing(self) -> dict[str, Any]:
        """How tokens are drawn, as arguments."""
        return {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "seed")}


@dataclass(frozen=True, kw_only=True)
class Evaluating(Use):
    """Measure a language model's loss, or a classifier's accuracy."""

    data: tuple[str, ...] = option(
        (),
        "Text (for fine-tuned models: records) to measure on; default: the run's validation data.",
    )
    batch_size: AtLeast1 = option(8, "Rows in one forward pass.")
    max_batches: Count = option(0, "Batches to measure on; 0: everything once.")
    json: bool = option(False, "Print one JSON object on stdout.")


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """Write a GPT of ``train`` as a Hugging Face folder.

    What ``finetune`` leaves in ``model/`` is one already, or an adapter for peft.
    """

    run: str = field(metadata={"help": "The run folder."})
    to: Literal["hf"] = field(metadata={"help": "hf: a Hugging Face folder."})
    output: str = field(metadata={"help": "The folder to write."})
