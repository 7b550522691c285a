"""Uses the model of a ``halfstep train`` run or of a GPT-2 folder: generate, evaluate, export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import CheckpointError, ConfigError
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.casting.cast import cast_to_policy_
from halfstep.precision.policy.policy import DTYPES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.checkpoint import (
    CHECKPOINTS,
    EXPORTED,
    exported,
    list_checkpoints,
    load_checkpoint,
)
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.config.use import Evaluating, Exporting, Generating, Use
from halfstep.trainer.data.batches import validation_batches
from halfstep.trainer.data.corpus import prepare, prepare_one
from halfstep.trainer.data.tokenizer import Tokenizer, load_tokenizer
from halfstep.trainer.environment import choose_device, policy_on
from halfstep.trainer.models.gpt.hf import load_gpt2
from halfstep.trainer.models.language_model import LanguageModel, generate
from halfstep.trainer.run import run_config
from halfstep.trainer.step import evaluate, perplexity, tokens_per_byte
from halfstep.trainer.tasks.task import Loaded, Measured, Progress, Trained
from halfstep.trainer.tasks.text import FAMILIES


@dataclasses.dataclass
class LoadedGPT(Loaded):
    """A loaded model with its tokenizer and, if it comes from a run, its configuration."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: TrainConfig | None


class TrainedText(Trained):
    """A model from a run of ``train``, or from a Hugging Face GPT-2 folder with its tokenizer."""

    def generate(self, use: Generating) -> str:
        """Return the prompt and its continuation; without a prompt, start a new document."""
        if use.raw:
            raise ConfigError(
                "--raw is for runs of finetune lm, which write a template; leave it out"
            )
        if use.base:
            raise ConfigError("--base is for LoRA runs of finetune lm, whose adapter it leaves out")
        opened = self._open(use)
        tokenizer = opened.tokenizer
        end = tokenizer.end_of_text
        ids = tokenizer.encode(use.prompt) or (tokenizer.encode("\n") if end is None else [end])
        with torch.no_grad(), opened.around():
            tokens_BT = generate(
                opened.model,
                torch.tensor([ids], device=opened.device),
                max_new_tokens=use.max_new_tokens,
                temperature=use.temperature,
                top_k=use.top_k,
                top_p=use.top_p,
                seed=use.seed,
                stop_token=end,
            )
        return tokenizer.decode([i for i in tokens_BT[0].tolist() if i != end])

    def evaluate(self, use: Evaluating, progress: Progress) -> Measured:
        """Measure loss, perplexity and bits per byte on the validation text, or on ``--data``."""
        if use.text_column or use.label_column:
            raise ConfigError(
                "--text-column and --label-column are for classifiers: a GPT is measured on all of "
                "the text of --data"
            )
        opened = self._open(use)
        config = opened.config
        if config is None and not use.data:
            raise ConfigError("evaluate --model needs --data, the text to measure on")
        if config is None or use.data:
            cache = config.data.cache_dir if config else ""
            tokens = prepare_one(use.data, opened.tokenizer, cache, progress)
        else:
            data = dataclasses.replace(config.data, tokenizer=str(self.path / "tokenizer"))
            tokens = prepare(data, progress=progress).validation
        batches = validation_batches(
            tokens,
            block_size=config.block_size if config else opened.model.config.block_size,
            batch_size=use.batch_size,
            max_batches=use.max_batches or None,
        )
        found = evaluate(batches, opened.judge, tokens_per_byte(tokens))
        values: dict[str, Any] = {
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "bits_per_byte": found.bits_per_byte,
            "tokens": found.targets,
            "precision": str(opened.policy),
        }
        bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits per byte"
        text = (
            f"loss {found.loss:.4f} nats per token, perplexity {values['perplexity']:.2f}{bits}, "
            f"on {found.targets:,} tokens in {opened.policy}"
        )
        return Measured(text, {key: value for key, value in values.items() if value is not None})

    def export(self, use: Exporting) -> str:
        """Write the newest checkpoint, with its tokenizer, as a Hugging Face folder."""
        if use.adapter:
            raise ConfigError(f"--adapter: {self.path} is not a run of finetune lm; leave it out")
        model, tokenizer, _ = load_trained(self.path)
        target, dtype = Path(use.output), use.dtype or "fp32"
        FAMILIES[type(model.config)].save(model, target, dtype=DTYPES[dtype])
        tokenizer.save(target)
        return f"{target}: {model.num_parameters():,} parameters in {dtype}"

    def _open(self, use: Use) -> LoadedGPT:
        device = choose_device(use.device)
        config: TrainConfig | None = None
        if self.config is None:
            model: LanguageModel = load_gpt2(self.path)
            tokenizer = load_tokenizer(self.path)
        else:
            model, tokenizer, config = load_trained(self.path)
        if use.precision or config is None:
            policy = parse_policy(use.precision or "fp32", device)
        else:
            policy = policy_on(config.precision, device)
        require_support(policy, device)
        cast_to_policy_(model, policy)
        return LoadedGPT(model.to(device).eval(), policy, device, tokenizer, config)


def load_trained(path: Path) -> tuple[LanguageModel, Tokenizer, TrainConfig]:
    """Load the model of a run's newest checkpoint in fp32, its tokenizer and configuration.

    Raises:
        ConfigError: If the folder holds no run.
        CheckpointError: If it has no checkpoint, or a damaged one.
    """
    run_config(path)  # raises unless the folder holds a run
    found = list_checkpoints(path / CHECKPOINTS)
    if not found:
        raise CheckpointError(f"{path / 'checkpoints'}: no checkpoint has been written yet")
    checkpoint = load_checkpoint(found[-1], kinds=EXPORTED)
    config = _config_of(checkpoint.state.get("config"), found[-1])
    model = FAMILIES[type(config.model)].make(config.model, seed=0)
    expected, weights = dict(model.named_parameters()), exported(checkpoint).weights
    if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in expected.items()}:
        raise CheckpointError(f"{found[-1]}: its weights do not fit its own configuration")
    for name, parameter in expected.items():
        parameter.data.copy_(weights[name])
    return model, load_tokenizer(path / "tokenizer"), config


def _config_of(table: Any, where: Path) -> TrainConfig:
    """Read the configuration from a checkpoint's state; raise CheckpointError if it has none."""
    try:
        config = config_from_table(table, strict=False) if isinstance(table, dict) else None
    except ConfigError as error:
        raise CheckpointError(f"{where}: the configuration in its state: {error}") from error
    if not isinstance(config, TrainConfig):
        raise CheckpointError(
            f"{where}: its state has no configuration of a run of train: it is damaged or foreign. "
            "Remove it to take the one before"
        )
    return config
