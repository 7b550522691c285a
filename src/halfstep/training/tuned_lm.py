"""The language model that a run of ``finetune lm`` left, ready for use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from halfstep.data.batches import IGNORED
from halfstep.data.instructions import prompt_ids
from halfstep.data.length_batches import evaluation_shares
from halfstep.data.packing import Rows, lm_batch
from halfstep.errors import CheckpointError, ConfigError
from halfstep.models.lm_generate import generate_ids
from halfstep.models.lora import open_adapted_lm
from halfstep.models.pretrained_lm import PretrainedLM, open_causal_lm
from halfstep.models.pretrained_tokenizer import open_tokenizer
from halfstep.precision.autocast import require_support
from halfstep.precision.cast import around_model
from halfstep.precision.parse import parse_policy
from halfstep.precision.policy import PrecisionPolicy
from halfstep.training.evaluate import Evaluation, Judge, mean_loss, perplexity
from halfstep.training.finetune_config import LMConfig
from halfstep.training.frozen_base import cast_for_use_
from halfstep.training.instruction_tokenizer import InstructionTokenizer
from halfstep.training.model_folder import frozen_fingerprint
from halfstep.training.step import Batch

PROMPT_FILE = "prompt.json"
"""In a run folder: how prompts are written, and a hash of the base that adapters belong to."""


@dataclass(frozen=True, slots=True)
class TunedLM:
    """A run's best state in evaluation mode."""

    model: PretrainedLM
    tokenizer: InstructionTokenizer
    template: str
    """How training wrote prompts: see :class:`~halfstep.data.instructions_config`."""
    policy: PrecisionPolicy
    device: torch.device

    def around(self) -> AbstractContextManager[None]:
        """The context of a forward pass in the policy's precision."""
        return around_model(self.policy, self.model, self.device)

    def answer(self, prompt: str, *, raw: bool = False, **options: float | None) -> str:
        """What the model writes to a prompt, without the end that it may have come to.

        Args:
            prompt: A user's words, or with ``raw`` the text to go on from.
            raw: Write no template around the prompt.
            options: Of :func:`~halfstep.models.lm_generate.generate_ids`.

        Returns:
            The answer; where there is no template, the prompt and what follows it.
        """
        tokenizer = self.tokenizer
        if raw:
            ids = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id])]
            ids += tokenizer.encode(prompt)
        else:
            ids = prompt_ids(prompt, tokenizer, self.template)
        ids = ids or [tokenizer.eos_id]  # as documents stand in pretraining
        ends = [[tokenizer.eos_id], tokenizer.end_of_turn()]
        with self.around():
            written = generate_ids(self.model, ids, ends=ends, **options)  # type: ignore[arg-type]
        decode = tokenizer.wrapped.decode
        if raw or self.template == "plain":
            return decode([*ids, *written])
        # a tokenizer may drop the blank before a first word, so the answer is not decoded alone
        return decode([*ids, *written])[len(decode(ids)) :].strip()


def open_tuned_lm(
    run: Path,
    config: LMConfig,
    device: torch.device,
    precision: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> TunedLM:
    """Open what a finished run left.

    Args:
        run: Its folder.
        config: Its configuration.
        device: To put the model on.
        precision: A policy; None: the run's.
        trust_remote_code: Let code that comes with the model run; a run's own configuration is not
            believed in this.

    Raises:
        ConfigError: The run has not ended yet, or its base is another model now.
        CheckpointError: A file is damaged.
        PrecisionError: The policy cannot be honoured.
    """
    policy = parse_policy(precision or config.precision)
    require_support(policy, device)
    folder, about = model_folder(run), prompt_settings(run)
    model: PretrainedLM
    if config.model.lora_r:
        model = open_adapted_lm(
            folder, revision=config.model.revision, trust_remote_code=trust_remote_code
        )
        if frozen_fingerprint(model) != about["base_model"]:
            raise ConfigError(
                f"{run}: the base model {config.model.source} has changed since the run, and the "
                "adapter belongs to what it was; put it back"
            )
    else:
        model = open_causal_lm(folder, trust_remote_code=trust_remote_code)
    tokenizer = open_tokenizer(
        folder,
        max_length=config.data.max_length,
        model_limit=model.max_length,
        trust_remote_code=trust_remote_code,
    )
    cast_for_use_(model, policy)
    model.to(device).eval()
    source = InstructionTokenizer(tokenizer, str(folder))
    return TunedLM(model, source, about["template"], policy, device)


def model_folder(run: Path) -> Path:
    """Where a run of ``finetune`` left its best state.

    Raises:
        ConfigError: It has not ended yet.
    """
    folder = run / "model"
    if not folder.is_dir():
        raise ConfigError(
            f"--run {run} has no model yet: it is written when the run ends; go on with it by "
            f"halfstep finetune classify (or lm) --resume --output-dir {run}"
        )
    return folder


def prompt_settings(run: Path) -> dict[str, str]:
    """Template, format and base of a run.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    file = run / PROMPT_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {key: str(found[key]) for key in ("format", "template", "base_model")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error!r}") from error


def validation_batches(
    rows: Rows, batch_size: int, pad_id: int, most: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """A rank's batches, as :func:`evaluation_shares` deals them."""
    for indices, counts in evaluation_shares(rows.lengths, batch_size, most, rank, ranks):
        ids_BT, targets_BT, positions_BT = lm_batch(rows, indices, pad_id)
        if not counts:
            targets_BT = torch.full_like(targets_BT, IGNORED)
        yield ids_BT, targets_BT, positions_BT


def measure(batches: Iterator[Batch], judge: Judge, precision: str) -> Evaluation:
    """Loss and perplexity, and in which precision they were computed."""
    loss, targets = mean_loss(batches, judge)
    text = (
        f"validation loss {loss:.4f} nats per token, perplexity {perplexity(loss):.3f} on "
        f"{targets:,} tokens in {precision}"
    )
    return Evaluation(loss=loss, targets=targets, score=-loss, text=text)
