"""The configuration of the data of a causal-LM fine-tuning, checked without reading any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from halfstep.errors import ConfigError
from halfstep.trainer.data.config import check_fraction, check_paths

Format: TypeAlias = Literal["auto", "alpaca", "chat", "text", "prompt-completion"]
Template: TypeAlias = Literal["", "plain", "alpaca", "vicuna", "tokenizer"]
DropLong: TypeAlias = Literal["truncate", "drop", "refuse"]

AUTO, ALPACA, CHAT, TEXT, COMPLETION = "auto", "alpaca", "chat", "text", "prompt-completion"
PLAIN, VICUNA, TOKENIZER = "plain", "vicuna", "tokenizer"
DROP, REFUSE = "drop", "refuse"
TEMPLATES_OF = {
    ALPACA: (ALPACA, VICUNA, TOKENIZER),
    COMPLETION: (PLAIN, ALPACA, VICUNA, TOKENIZER),
    CHAT: (TOKENIZER, VICUNA),
    TEXT: (PLAIN,),
}
"""Templates that can write each format; the first is the one that "" stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionsConfig:
    """The data section of a causal-LM fine-tuning: which records, and how they become rows."""

    train: tuple[str, ...] = ()
    """Files of records (.jsonl .json .csv .tsv .parquet) or texts (.txt), globs and folders of
    them, or ``datasets:NAME[/CONFIG][@SPLIT]``."""
    dev: tuple[str, ...] = ()
    """The same for evaluation; empty means ``dev_fraction`` of the documents of ``train``."""
    dev_fraction: float = 0.1
    """Share of the documents held out, drawn with the seed, in (0, 1); unused with ``dev``."""
    format: Format = "auto"
    """``alpaca``, ``chat``, ``text`` or ``prompt-completion``; ``auto`` goes by the fields."""
    template: Template = ""
    """``plain``, ``alpaca``, ``vicuna``, ``tokenizer`` (its own chat template); empty means the one
    of the format: alpaca for alpaca, plain for prompt-completion and text, and for chat the
    tokenizer's own, or vicuna where the tokenizer has none."""
    max_length: int = 1024
    """Maximal number of tokens in a row, at least 2."""
    packing: bool = True
    """Whether several documents share a row (without seeing each other) to save padding."""
    mask_prompt: bool = True
    """Whether only answers are learned; otherwise prompts too."""
    drop_long: DropLong = "truncate"
    """What becomes of longer documents: ``truncate`` (cut at the right; plain text is cut into
    several documents instead), ``drop`` or ``refuse``."""

    def __post_init__(self) -> None:
        for field in ("train", "dev"):
            check_paths(field, getattr(self, field))
        check_fraction("dev_fraction", self.dev_fraction, "evaluate on other records give data.dev")
        if self.max_length < 2:
            raise ConfigError(
                f"data.max_length must be a whole number of at least 2 (a token and the one after "
                f"it), got {self.max_length!r}"
            )
        if self.format != AUTO:
            check_template(self.format, self.template)


def check_template(format: str, template: str) -> None:
    """Refuses a template that cannot write a format: Alpaca's words have no place for a chat."""
    if template and template not in TEMPLATES_OF[format]:
        raise ConfigError(
            f"data.template {template} cannot write records of the format {format}; use "
            f"{' or '.join(TEMPLATES_OF[format])}, or leave it empty"
        )
