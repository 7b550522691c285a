"""The configurations of fine-tuning: text classification, and causal language models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from halfstep.errors import ConfigError
from halfstep.trainer.config.run import BaseConfig, RunConfig
from halfstep.trainer.data.instructions.config import InstructionsConfig
from halfstep.trainer.data.labelled.config import LabelledConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneRunConfig(RunConfig):
    """How long in epochs, and which state to keep."""

    LEAST_STEPS: ClassVar[int] = 0

    max_steps: int = 0
    """Optimizer steps, skipped ones included; 0: as many as ``epochs`` take."""
    epochs: float = 3.0
    """Times that every training example is seen; unused with ``max_steps``."""
    warmup_ratio: float = 0.06
    """Share of the steps that warm up, where ``schedule.warmup_steps`` is 0."""
    batch_size: int = 32
    """Examples in one optimizer step, over all ranks and micro-batches; the batches of an epoch
    differ by one at most."""
    eval_every: int = 0
    """Evaluate every this many steps and at the end; 0: after every epoch."""
    eval_batches: int = 0
    """Evaluate on this many batches only; 0: every example once."""
    save_every: int = 500
    """Save every this many steps, besides after every evaluation and at the end; 0: only then."""
    best_by: Literal["", "accuracy", "macro_f1", "loss"] = ""
    """What makes an evaluation the best; empty: accuracy of a classifier, else loss."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        RunConfig.__post_init__(self)
        if not self.max_steps and not 0 < self.epochs < math.inf:
            raise ConfigError(f"run.epochs={self.epochs}; allowed: > 0")
        if not 0 <= self.warmup_ratio < 1:
            raise ConfigError(f"run.warmup_ratio={self.warmup_ratio}; allowed: 0 <= x < 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedConfig:
    """What the model sections of both kinds have."""

    source: str = ""
    """A Hugging Face folder, or a name on the hub."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty: the main one."""
    dropout: float = -1.0
    """Dropout of all the model's own layers; below 0: as the model has it."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code that you have read."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        if not self.dropout < 1:
            raise ConfigError(f"model.dropout={self.dropout}; allowed: below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(BaseConfig):
    """What both kinds of fine-tuning have."""

    """What both kinds of fine-tuning have."""

    SHORT: ClassVar[Mapping[str, str]] = {"model": "model.source"}

    model: PretrainedConfig = field(default_factory=PretrainedConfig)
    run: FinetuneRunConfig = field(default_factory=FinetuneRunConfig)

    @property
    def runs_foreign_code(self) -> bool:
        """Whether Python code that comes with the model may run."""
        return self.model.trust_remote_code

    def filled(self, saved: Self) -> Self:
        """With the run's warm-up and its commit of the model."""
        warmup = self.schedule.warmup_steps or saved.schedule.warmup_steps
        revision = self.model.revision or saved.model.revision
        return dataclasses.replace(
            self,
            schedule=dataclasses.replace(self.schedule, warmup_steps=warmup),
            model=dataclasses.replace(self.model, revision=revision),
        )

    def resolved(self, steps_per_epoch: int) -> Self:
        """The configuration with steps in place of epochs.

        Raises:
            ConfigError: If the warm-up is longer than the run.
        """
        run, schedule = self.run, self.schedule
        steps = run.max_steps or max(1, math.ceil(run.epochs * steps_per_epoch - 1e-9))
        warmup = schedule.warmup_steps or int(run.warmup_ratio * steps)
        return dataclasses.replace(
            self,
            run=dataclasses.replace(
                run, max_steps=steps, eval_every=run.eval_every or steps_per_epoch
            ),
            schedule=dataclasses.replace(schedule, warmup_steps=warmup),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig(PretrainedConfig):
    """The model section of a classifier's run."""

    source: str = "scratch:small"
    """``scratch:tiny|small|base``, a Hugging Face folder, or a name on the hub."""
    max_length: int = 128
    """Tokens of a text, special ones included; longer texts are cut, and counted."""
    vocab_size: int = 0
    """Of the tokenizer that ``scratch`` trains; 0: its size's own."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes."""
    class_weights: Literal["none", "balanced"] = "none"
    """``balanced``: every class counts alike in the loss, however many examples it has."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        PretrainedConfig.__post_init__(self)
        if not self.source.strip():
            raise ConfigError("model.source is empty; give scratch:small, a folder or a hub name")
        if self.max_length < 3:
            raise ConfigError(f"model.max_length={self.max_length}; allowed: integers >= 3")
        if self.vocab_size < 0:
            raise ConfigError(f"model.vocab_size={self.vocab_size}; allowed: integers >= 0")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"model.label_smoothing={self.label_smoothing}; allowed: 0 <= x < 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyConfig(FinetuneConfig):
    """Train a text classifier: CSV, TSV, JSONL, JSON or a dataset of the hub."""

    TASK: ClassVar[str] = "classify"
    COMMAND: ClassVar[str] = "finetune classify"

    model: ClassifierConfig = field(default_factory=ClassifierConfig)
    data: LabelledConfig = field(default_factory=LabelledConfig)

    @classmethod
    def shipped(cls, given: Mapping[str, Any]) -> str:
        """A classifier that is loaded takes smaller steps than one from scratch."""
        scratch = str(given.get("model.source", "scratch:")).startswith("scratch:")
        return "classify-scratch" if scratch else "classify-pretrained"


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMConfig(PretrainedConfig):
    """The model section of a language model's fine-tuning."""

    lora_r: int = 8
    """Rank of the LoRA adapters; 0: train all weights instead."""
    lora_alpha: float = 16.0
    """Adapters are scaled by alpha / r."""
    lora_dropout: float = 0.0
    """Dropout before the adapters."""
    lora_targets: tuple[str, ...] = ()
    """Names of modules to adapt, or ``all-linear``; empty: the architecture's usual ones."""
    gradient_checkpointing: bool = False
    """Keep a block's input only, and compute the block again in the backward pass."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        PretrainedConfig.__post_init__(self)
        if self.lora_r < 0:
            raise ConfigError(f"model.lora_r={self.lora_r}; allowed: integers >= 0")
        if not 0 < self.lora_alpha < math.inf:
            raise ConfigError(f"model.lora_alpha={self.lora_alpha}; allowed: > 0")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"model.lora_dropout={self.lora_dropout}; allowed: 0 <= x < 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LMConfig(FinetuneConfig):
    """Tune a causal language model on texts, instructions or chats, by LoRA or in full."""

    TASK: ClassVar[str] = "lm"
    COMMAND: ClassVar[str] = "finetune lm"

    model: CausalLMConfig = field(default_factory=CausalLMConfig)
    data: InstructionsConfig = field(default_factory=InstructionsConfig)

    @classmethod
    def shipped(cls, given: Mapping[str, Any]) -> str:
        """All weights of a language model take smaller steps than its adapters."""
        return "lm-full" if str(given.get("model.lora_r", "")).strip() == "0" else "lm-lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleConfig(FinetuneConfig):
    """A module of the user's own, trained by :class:`halfstep.Trainer`."""

    TASK: ClassVar[str] = "module"
    COMMAND: ClassVar[str] = ""
