"""How a trained model is used. These are command options too, so this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from halfstep.option import Amount, AtLeast1, Count, option


@dataclass(frozen=True, kw_only=True)
class Use:
    """Which model to use, on which device and in which precision."""

    run: str = field(
        metadata={
            "help": (
                "A run folder; its newest checkpoint is used, or its best state if it was "
                "fine-tuned."
            )
        }
    )
    device: str = option("auto", "auto, cpu, mps, cuda or cuda:N.")
    precision: str = option("", "Policy of the forward pass; default: the run's own.")


@dataclass(frozen=True, kw_only=True)
class Predicting(Use):
    """Classify texts; write one JSON object per text: text, label, probability."""

    input: str = field(
        metadata={
            "help": (
                ".jsonl, .json, .csv, .tsv, .parquet or .txt (one text per line); '-' reads stdin."
            )
        }
    )
    output: str = option("-", "JSONL file to write; '-', the default, is stdout.")
    text_column: str = option("", "Name of the column that holds the text.")
    batch_size: AtLeast1 = option(64, "Texts in one forward pass.")


@dataclass(frozen=True, kw_only=True)
class Generating(Use):
    """Write text with a trained model."""

    prompt: str = option("", "Text to go on from; '-' reads stdin.")
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
    """Write a trained model in another format."""

    run: str = field(metadata={"help": "The run folder."})
    to: Literal["hf"] = field(metadata={"help": "hf: a Hugging Face folder."})
    output: str = field(metadata={"help": "The folder to write."})
    dtype: Literal["", "fp32", "bf16", "fp16"] = option(
        "", "Dtype of the weights; default: fp32, or the base model's own for merged adapters."
    )
