"""Fine-tunes causal language models on texts, instructions or chats, and uses tuned ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError, PrecisionError
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.casting.cast import add_regions_, cast_to_policy_
from halfstep.precision.policy.policy import DTYPES, PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.checkpoint import Exported
from halfstep.trainer.config.tasks import LMConfig
from halfstep.trainer.config.use import Evaluating, Exporting, Generating, Use
from halfstep.trainer.data.batches import IGNORED, evaluation_shares
from halfstep.trainer.data.instructions import prompt_ids, read_instructions
from halfstep.trainer.data.packing import Rows, lm_batch
from halfstep.trainer.environment import choose_device, policy_on
from halfstep.trainer.models.pretrained.lm import PretrainedLM, generate_ids, open_causal_lm
from halfstep.trainer.models.pretrained.lora import LoraLM, add_lora, open_adapted_lm
from halfstep.trainer.models.pretrained.tokenizer import (
    PretrainedTokenizer,
    open_tokenizer,
    require_vocabulary,
)
from halfstep.trainer.step import Batch, Evaluation, Judge, count_targets, mean_loss, perplexity
from halfstep.trainer.tasks.epochs import (
    EpochTask,
    copy_folder,
    frozen_fingerprint,
    matrix_parameters,
    model_folder,
    pinned,
    replace_folder,
    within,
)
from halfstep.trainer.tasks.task import Loaded, Measured, Progress, Trained

PROMPT_FILE = "prompt.json"
"""File of a run folder with the prompt template and a hash of the base that adapters belong to."""


class LMTask(EpochTask):
    """A language model and its rows of tokens: a :class:`~halfstep.trainer.tasks.task.Task`."""

    config: LMConfig
    keeps_best = True

    def __init__(self, config: LMConfig, world: World, progress: Progress, *_: object) -> None:
        """Load model and tokenizer, read the data; for arguments see ``open_session``.

        Raises:
            HalfstepError: For data or a model folder that cannot be used.
        """
        _require_tunable(config)
        config, trust = pinned(config, world)
        run, choice = config.run, config.model
        self.model: PretrainedLM = open_causal_lm(
            choice.source,
            dropout=None if choice.dropout < 0 else choice.dropout,
            gradient_checkpointing=choice.gradient_checkpointing,
            **trust,
        )
        limit = self.model.max_length
        data = within(config.data, "data", limit, choice.source)
        notes = [f"rows have the model's {limit} positions"] * (data is not config.data)
        config = dataclasses.replace(config, data=data)
        tokenizer = open_tokenizer(
            choice.source, max_length=data.max_length, model_limit=limit, **trust
        )
        require_vocabulary(self.model, tokenizer)
        self.tokenizer = InstructionTokenizer(tokenizer, choice.source)
        self.data = read_instructions(config.data, self.tokenizer, run.seed)
        if config.data.packing:
            self.model.check_packing()
        if choice.lora_r:
            self.model = add_lora(
                self.model,
                choice.lora_r,
                choice.lora_alpha,
                choice.lora_dropout,
                choice.lora_targets,
                seed=run.seed,
            )
        self.identity: Mapping[str, str] = {
            "data": self.data.sha256,
            "tokenizer": tokenizer.fingerprint,
            "base model": frozen_fingerprint(self.model),  # before hold_weights_ may convert them
        }
        world.require_same(self.identity)
        held = hold_weights_(self.model, cast(PrecisionPolicy, config.precision))
        self.notes = [*notes, *self.data.notes, *([held] if held else [])]
        self.deal(config, self.data.train_rows.lengths)
        self._matrices = matrix_parameters(self.model)

    def summary(self) -> str:
        """Describe the run by its numbers of parameters, tokens and rows."""
        parameters = list(self.model.parameters())
        every = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        rows = self.data.train_rows
        return (
            f"{trained:,} of {every:,} parameters, {rows.learned_tokens:,} tokens to learn in "
            f"{len(rows):,} rows ({rows.efficiency:.0%} full)"
        )

    def batch(self, step: int, rows: range) -> Batch:
        """Return (ids_BT, targets_BT, positions_BT), all int64, of some rows of a step's batch."""
        indices = self.indices(step)[rows.start : rows.stop]
        return lm_batch(self.data.train_rows, indices, self.tokenizer.wrapped.pad_id)

    def targets(self, batch: Batch) -> float:
        """Return the number of target tokens that enter the loss."""
        return count_targets(batch)

    def flops(self, tokens: float) -> float:
        """Count two operations per matrix weight and token in the forward and for each gradient."""
        frozen = self.config.model.lora_r > 0  # no weight gradients for a frozen base
        return (4.0 if frozen else 6.0) * self._matrices * tokens

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure loss and perplexity on every validation row once."""
        run = self.config.run
        batches = validation_rows(
            self.data.dev_rows,
            run.batch_size // run.grad_accum,
            self.tokenizer.wrapped.pad_id,
            run.eval_batches * run.grad_accum,
            judge.rank,
            judge.ranks,
        )
        return measured_loss(batches, judge, str(self.config.precision))

    def save(self, folder: Path) -> None:
        """Write the tokenizer and the prompt settings."""
        self.tokenizer.wrapped.save(folder / "tokenizer")
        about = {
            "format": self.data.format,
            "template": self.data.template,
            "base_model": self.identity["base model"],
        }
        (folder / PROMPT_FILE).write_text(json.dumps(about, indent=1), encoding="utf-8")

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write the best state to ``model/``: the adapter, or the whole model."""

        def write(empty: Path) -> None:
            self.model.save_(empty, exported().weights)
            self.tokenizer.wrapped.save(empty)

        replace_folder(folder / "model", write)
        what = "adapter" if self.config.model.lora_r else "model"
        return f"{what} in {folder / 'model'}"


# Using the model of a finished run.


@dataclass
class LoadedLM(Loaded):
    """The best state of a run of ``finetune lm``, loaded under a precision policy."""

    model: PretrainedLM
    tokenizer: InstructionTokenizer
    template: str
    """The prompt template of training; see :mod:`halfstep.trainer.data.config`."""

    def answer(self, prompt: str, *, raw: bool = False, **options: float | None) -> str:
        """Return what the model writes to a prompt, without an end-of-text token.

        Args:
            prompt: A user's question, or with ``raw`` the text to continue.
            raw: Write no template around the prompt.
            options: Options of :func:`~halfstep.trainer.models.pretrained.lm.generate_ids`.

        Returns:
            The answer; where there is no template, the prompt and what follows it.
        """
        tokenizer = self.tokenizer
        if raw:
            ids = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id])]
            ids += tokenizer.encode(prompt)
        else:
            ids = prompt_ids(prompt, tokenizer, self.template)
        ids = ids or [tokenizer.eos_id]  # in pretraining, every document follows this token
        ends = [[tokenizer.eos_id], tokenizer.end_of_turn()]
        with self.around():
            written = generate_ids(self.model, ids, ends=ends, **options)  # type: ignore[arg-type]
        decode = tokenizer.wrapped.decode
        if raw or self.template == "plain":
            return decode([*ids, *written])
        # decoded with the prompt, as a tokenizer may drop the space before the first word
        return decode([*ids, *written])[len(decode(ids)) :].strip()


def load_tuned_lm(
    run: Path,
    config: LMConfig,
    device: torch.device,
    precision: str = "",
    *,
    trust_remote_code: bool = False,
) -> LoadedLM:
    """Open the model of a finished run.

    An empty ``precision`` means the run's. ``trust_remote_code`` must be given here: for safety,
    the setting in the run's own configuration is ignored.

    Raises:
        ConfigError: If the run has not ended yet, or its base model has changed.
        CheckpointError: If a file is damaged.
        PrecisionError: If the policy cannot be honoured.
    """
    policy = parse_policy(precision, device) if precision else policy_on(config.precision, device)
    require_support(policy, device)
    folder, about = model_folder(run), prompt_settings(run)
    model = _open_model(folder, config, trust_remote_code)
    if config.model.lora_r and frozen_fingerprint(model) != about["base_model"]:
        raise ConfigError(
            f"{run}: the base model {config.model.source} has changed since the run, and the "
            "adapter belongs to what it was; put it back"
        )
    tokenizer = open_tokenizer(
        folder,
        max_length=config.data.max_length,
        model_limit=model.max_length,
        trust_remote_code=trust_remote_code,
    )
    cast_for_use_(model, policy)
    model.to(device).eval()
    source = InstructionTokenizer(tokenizer, str(folder))
    return LoadedLM(model, policy, device, source, about["template"])


def prompt_settings(run: Path) -> dict[str, str]:
    """Read the template, the data format and the base model's hash of a run.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    file = run / PROMPT_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {key: str(found[key]) for key in ("format", "template", "base_model")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error!r}") from error


def validation_rows(
    rows: Rows, batch_size: int, pad_id: int, most: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Yield a rank's batches, as :func:`evaluation_shares` deals them."""
    for indices, counts in evaluation_shares(rows.lengths, batch_size, most, rank, ranks):
        ids_BT, targets_BT, positions_BT = lm_batch(rows, indices, pad_id)
        if not counts:
            targets_BT = torch.full_like(targets_BT, IGNORED)
        yield ids_BT, targets_BT, positions_BT


def measured_loss(batches: Iterator[Batch], judge: Judge, precision: str) -> Evaluation:
    """Measure loss and perplexity; the text also names the precision."""
    loss, targets = mean_loss(batches, judge)
    text = (
        f"validation loss {loss:.4f} nats per token, perplexity {perplexity(loss):.3f} on "
        f"{targets:,} tokens in {precision}"
    )
    return Evaluation(loss=loss, targets=targets, score=-loss, text=text)


class TrainedLM(Trained):
    """A model or adapter from a run of ``finetune lm``."""

    def generate(self, use: Generating) -> str:
        """Return the answer to a prompt, or its continuation where there is no template."""
        lm = self._open(use)
        if not (use.prompt or use.raw or lm.template == "plain"):
            raise ConfigError("--prompt is empty; give what the model is to answer, or --raw")
        around: AbstractContextManager[None] = nullcontext()
        if use.base:
            if not isinstance(lm.model, LoraLM):
                raise ConfigError(
                    f"--base: {self.path} trained all weights and has no adapter; leave it out"
                )
            around = lm.model.without_adapter()
        with around:
            return lm.answer(
                use.prompt,
                raw=use.raw,
                max_new_tokens=use.max_new_tokens,
                temperature=use.temperature,
                top_k=use.top_k,
                top_p=use.top_p,
                seed=use.seed,
            )

    def evaluate(self, use: Evaluating, progress: Progress) -> Measured:
        """Measure loss and perplexity on the run's validation records, or on ``--data``."""
        lm, data = self._open(use), self.config.data
        if use.data:
            data = dataclasses.replace(data, train=use.data, dev=use.data)
        rows = read_instructions(data, lm.tokenizer, self.config.run.seed).dev_rows
        if data.packing:
            lm.model.check_packing()
        pad_id = lm.tokenizer.wrapped.pad_id
        batches = validation_rows(rows, use.batch_size, pad_id, use.max_batches)
        found = measured_loss(batches, lm.judge, str(lm.policy))
        values = {
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "tokens": found.targets,
            "precision": str(lm.policy),
        }
        return Measured(found.text.removeprefix("validation "), values)

    def export(self, use: Exporting) -> str:
        """Write the best state as one merged model, or as an adapter."""
        choice, target, folder = self.config.model, Path(use.output), model_folder(self.path)
        if use.adapter:
            if not choice.lora_r:
                raise ConfigError(f"--adapter: {self.path} trained all weights; leave it out")
            if use.dtype:
                raise ConfigError(
                    "--dtype with --adapter: an adapter is written as trained, in fp32"
                )
            copy_folder(folder, target)
            return f"{target}: adapter of {choice.source}"
        dtype = DTYPES[use.dtype] if use.dtype else None
        trust = use.trust_remote_code
        model = _open_model(folder, self.config, trust)
        length = self.config.data.max_length
        tokenizer = open_tokenizer(folder, max_length=length, trust_remote_code=trust)
        model.save_(target, {}, merge=True, dtype=dtype)
        tokenizer.save(target)
        count = sum(p.numel() for n, p in model.named_parameters() if ".lora_" not in n)
        written = f"{target}: {count:,} parameters in {dtype_name(dtype or model.stored_dtype)}"
        return f"{written}\n{model.last_merge}" if isinstance(model, LoraLM) else written

    def _open(self, use: Use) -> LoadedLM:
        return load_tuned_lm(
            self.path,
            self.config,
            choose_device(use.device),
            use.precision,
            trust_remote_code=use.trust_remote_code,
        )


def _require_tunable(config: LMConfig) -> None:
    if config.run.best_by not in ("", "loss"):
        raise ConfigError(f"run.best_by={config.run.best_by} is for classifiers; allowed: loss")
    if not config.model.source:
        raise ConfigError(
            "model.source is empty; name a model to tune by --model: a folder, or a hub name"
        )


def _open_model(folder: Path, config: LMConfig, trust: bool) -> PretrainedLM:
    """Load the whole model, or the adapter on its base model."""
    if config.model.lora_r:
        return open_adapted_lm(folder, revision=config.model.revision, trust_remote_code=trust)
    return open_causal_lm(folder, trust_remote_code=trust)


# The dtype of a model's weights while it is tuned under a policy.


def hold_weights_(model: PretrainedLM, policy: PrecisionPolicy) -> str:
    """Make trained weights fp32; keep a frozen base as stored if the policy computes in its dtype.

    Any other base, such as an fp16 base under ``bf16-mixed``, is held in fp32, which is exact:
    operations would otherwise mix two 16-bit dtypes, or compute in another than the policy's.

    Args:
        model: The model as it was opened, with or without adapters; changed in place.
        policy: The run's precision policy.

    Returns:
        A note for the user; empty if there is nothing to say.

    Raises:
        PrecisionError: If the policy keeps weights in a 16-bit dtype other than the base's, and so
            would round the frozen base.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    stored = model.stored_dtype
    if not frozen:
        model.float()
        return ""
    if policy.param_dtype != torch.float32:
        if policy.param_dtype != stored:
            compute = dtype_name(policy.compute_dtype)
            raise PrecisionError(
                f"precision {policy} keeps all weights in {dtype_name(policy.param_dtype)}, and "
                f"would round the frozen base, which is stored in {dtype_name(stored)}; use "
                f"{compute}-mixed, or --lora-r 0 to train all weights"
            )
        return ""
    if stored == torch.float32 or (stored == policy.compute_dtype and not policy.rules):
        return ""
    more = sum(p.numel() * (4 - p.element_size()) for p in frozen)
    model.float()
    form = dtype_name(stored) if stored.itemsize == 2 else "fp64"
    return (
        f"the frozen base is stored in {form} and held in fp32, as precision {policy} does not "
        f"compute in {form} throughout: {max(more, 0) / 1e6:,.0f} MB more"
        + (f"; {form}-mixed keeps it as it is" if form != "fp64" and not policy.rules else "")
    )


def cast_for_use_(model: PretrainedLM, policy: PrecisionPolicy) -> None:
    """Give the weights their dtypes in training, and compute as there, without an optimizer.

    Raises:
        PrecisionError: As :func:`hold_weights_`.
    """
    hold_weights_(model, policy)
    if policy.param_dtype == torch.float32 and policy.casts == "op":
        add_regions_(place(policy, model))  # a frozen base stays in 16 bits
    else:
        cast_to_policy_(model, policy)


# A pretrained tokenizer behind the interface that the data of a language model needs.


class InstructionTokenizer:
    """Adapts to :class:`~halfstep.trainer.data.instructions.LMTokenizer`."""

    def __init__(self, tokenizer: PretrainedTokenizer, source: str) -> None:
        """Wrap a tokenizer.

        Raises:
            ConfigError: If it has no end-of-text token.
        """
        if tokenizer.eos_id is None:
            raise ConfigError(
                f"model.source={source}: its tokenizer has no end-of-text token (eos_token in "
                "tokenizer_config.json), so a tuned model could not learn to stop; set one"
            )
        self.wrapped = tokenizer
        self.eos_id: int = tokenizer.eos_id
        self.bos_id = tokenizer.bos_id
        self.special_tokens: Sequence[str] = tokenizer.special_tokens

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self.wrapped.encode_plain([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        return self.wrapped.encode_plain(texts)

    def render_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool
    ) -> str | None:
        """Write a chat in the tokenizer's own template; None if it has none."""
        return self.wrapped.chat(messages, add_generation_prompt)

    def end_of_turn(self) -> list[int]:
        """Return the ids with which the chat template ends an answer; empty without a template."""
        text = self.render_chat(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], False
        )
        return [] if text is None else self.encode(text.rpartition("!")[2].rstrip())
