"""How a trained model is to be used; no torch here, as these are options of commands too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Use:
    """Which model, where and in which precision."""

    run: str = ""
    """A run folder; its newest checkpoint is used, of fine-tuning its best state."""
    model: str = ""
    """In place of a run: the folder of a model with its tokenizer."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = ""
    """Policy of the forward pass; default: the run's own, fp32 for --model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code that you have read."""

    def __post_init__(self) -> None:
        """Raise ConfigError unless there is one model."""
        if bool(self.run) == bool(self.model):
            raise ConfigError("give one of --run and --model: which model is to be used")


@dataclass(frozen=True, kw_only=True)
class Predicting(Use):
    """Classify texts; writes one JSON object a text: text, label, probability."""

    input: str
    """.jsonl, .json, .csv, .tsv, .parquet or .txt (one text a line); '-' reads stdin."""
    output: str = "-"
    """JSONL; '-', the default, is stdout."""
    text_column: str = ""
    """Name of the text's column."""
    batch_size: int = 64
    """Texts in one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Generating(Use):
    """Write text with a trained model."""

    prompt: str = ""
    """Text to go on from; '-' reads stdin."""
    max_new_tokens: int = 200
    """Most tokens to write."""
    temperature: float = 0.8
    """How boldly to sample; 0: always the likeliest token."""
    top_k: int | None = None
    """Sample from so many likeliest tokens only."""
    top_p: float | None = None
    """Sample from the likeliest tokens that have this much probability together."""
    seed: int = 0
    """Seed of the sampling."""
    raw: bool = False
    """For a run of finetune lm: go on from the prompt as it is, without its template."""


@dataclass(frozen=True, kw_only=True)
class Evaluating(Use):
    """Measure a language model's loss, or a classifier's accuracy."""

    data: tuple[str, ...] = ()
    """Text (of fine-tuning: records) to measure on; default: the run's validation data."""
    batch_size: int = 8
    """Rows in one forward pass."""
    max_batches: int = 0
    """Batches to measure on; 0: everything once."""
    text_column: str = ""
    """Of a classifier's --data; default: as in training."""
    label_column: str = ""
    """Name of its label column; default: as in training."""
    drop_empty: bool = False
    """Of a classifier: leave out empty texts."""
    json: bool = False
    """One JSON object on stdout."""


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """Write a trained model in another format."""

    run: str
    """The run folder."""
    to: Literal["hf"]
    """hf: a Hugging Face folder."""
    output: str
    """The folder to write."""
    dtype: Literal["", "fp32", "bf16", "fp16"] = ""
    """Number format of the weights; default fp32, of merged adapters the base's own."""
    adapter: bool = False
    """Of a LoRA run: the adapter for peft, instead of merging it into its base."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code that you have read."""
