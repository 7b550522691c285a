"""The task of ``halfstep train``: a language model of one of the families, trained on text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from halfstep.distributed.layout import Layout
from halfstep.distributed.world import World
from halfstep.errors import ConfigError, DataError
from halfstep.trainer import part
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.data.batches import (
    IGNORED,
    batch,
    start_of_sequence,
    validation_batches,
)
from halfstep.trainer.data.corpus import PreparedData, prepare
from halfstep.trainer.data.records import TABLE_SUFFIXES
from halfstep.trainer.data.tokenizer import Tokenizer
from halfstep.trainer.environment import require_host_room
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.models.language_model import LanguageModel
from halfstep.trainer.models.shapes import GPTConfig, Shape
from halfstep.trainer.step import Batch, Evaluation, Judge, evaluate, tokens_per_byte
from halfstep.trainer.tasks.task import Progress, Task, share_of


def _no_folders(*_: Any, **__: Any) -> Any:
    raise ConfigError("this family of models has no Hugging Face folders; export is for gpt")


@dataclass(frozen=True, slots=True)
class Family:
    """The functions that make and save the networks of one kind of shape."""

    make: Callable[..., LanguageModel]
    """Makes the network from a shape and ``seed``."""
    save: Callable[..., None] = _no_folders
    """Writes a Hugging Face folder, given the network, the path and ``dtype``."""


def _save_gpt2(*args: Any, **options: Any) -> None:
    part("trainer.models.gpt.hf:save_gpt2")(*args, **options)


FAMILIES: Mapping[type[Shape], Family] = {GPTConfig: Family(GPT, _save_gpt2)}


class TextTask(Task):
    """Trains a language model on windows of a token file; see :class:`~.task.Task`."""

    keeps_best = False

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        progress: Progress,
        layout: Layout,
    ) -> None:
        """Prepare the data and build the model; for arguments see ``open_session``.

        Raises:
            HalfstepError: For data, a model folder or a layout that cannot be used.
        """
        self._require_room(config, layout, config.model)  # before the data is prepared
        self.data: PreparedData = world.first_on_machine(
            lambda: prepare(config.data, progress=progress)
        )
        data = self.data
        self.identity: Mapping[str, str] = {
            "training data": data.train.sha256,
            "validation data": data.validation.sha256,
            "tokenizer": data.tokenizer.fingerprint,
        }
        world.require_same(self.identity)
        named = dataclasses.replace(config.model, vocab_size=data.tokenizer.vocab_size)
        self._require_room(config, layout, named)
        self.model = _make_model(config, data.tokenizer)
        self.config: TrainConfig = dataclasses.replace(config, model=self.model.config)
        self.model.require_shares(layout.tensor)
        self.smallest_batch = config.run.batch_size
        self.notes: list[str] = _table_notes(config.data.train)
        which = "training"
        try:  # refuse data shorter than a block here, not at the first step
            self.batch(0, range(1))
            which = "validation"
            next(iter(self._validation(0, 1)))
        except DataError as error:
            given = config.data.validation if which == "validation" else ()
            files = ", ".join(given or config.data.train) or "the standard library"
            raise DataError(f"the {which} data ({files:.200}) is too short: {error}") from error

    @staticmethod
    def _require_room(config: TrainConfig, layout: Layout, shape: Shape) -> None:
        """Refuse a model or a batch that this machine cannot hold."""
        run = config.run
        require_host_room(
            shape.parameters,
            run.batch_size // (run.grad_accum * layout.batch_ranks) * config.block_size,
            "--model.n_layer, --model.n_embd, --model.block_size or --batch-size, or raise "
            "--grad-accum",
        )

    def summary(self) -> str:
        """Describe the run by its numbers of parameters and training tokens."""
        count = self.model.num_parameters()
        return f"{count:,} parameters, {self.data.train.count:,} training tokens"

    def batch_size(self, step: int) -> int:
        """Return the number of sequences, which is the same in every step."""
        return self.config.run.batch_size

    def batch(self, step: int, rows: range) -> Batch:
        """Return (tokens, targets), int64 (B, T): windows at positions drawn by seed and step."""
        return batch(
            self.data.train,
            seed=self.config.run.seed,
            step=step,
            sequences=rows,
            block_size=self.config.block_size,
        )

    def rows(self, step: int) -> Mapping[str, list[int]]:
        """Return where each of a step's windows begins, in tokens of the training file."""
        run, places = self.config.run, self.data.train.count - self.config.block_size
        sequences = range(run.batch_size)
        return {"first_token": [start_of_sequence(run.seed, step, n, places) for n in sequences]}

    def targets(self, batch: Batch) -> float:
        """Return the number of target tokens, all of which enter the loss: no window is padded."""
        return int(batch[1].numel())

    def tokens(self, step: int) -> int:
        """Return the tokens of a step's batch, the same number in every step."""
        return self.config.run.batch_size * self.config.block_size

    def flops(self, tokens: float) -> float:
        """Return the floating-point operations of a step over this many tokens."""
        return self._flops_per_token * tokens

    @cached_property
    def _flops_per_token(self) -> int:
        return self.model.flops_per_token(self.config.block_size)

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure the loss on the same validation windows every time."""
        batches = self._validation(judge.rank, judge.ranks)
        return evaluate(batches, judge, tokens_per_byte(self.data.validation))

    def save(self, folder: Path) -> None:
        """Write the tokenizer to ``folder/tokenizer``."""
        self.data.tokenizer.save(folder / "tokenizer")

    def _validation(self, rank: int, ranks: int) -> Iterable[Batch]:
        """Yield this rank's rows of each validation batch."""
        run = self.config.run
        whole = validation_batches(
            self.data.validation,
            block_size=self.config.block_size,
            batch_size=run.batch_size // run.grad_accum,
            max_batches=run.eval_batches * run.grad_accum or None,
        )
        for tokens_BT, targets_BT in whole:
            rows = share_of(len(tokens_BT), rank, ranks)
            if rows:
                here = slice(rows.start, rows.stop)
                yield tokens_BT[here], targets_BT[here]
            else:  # forwards may be collective, so this rank runs a row that does not count
                yield tokens_BT[:1], torch.full_like(targets_BT[:1], IGNORED)


def _table_notes(paths: Iterable[str]) -> list[str]:
    """Return a note for each file that looks like a table of labelled texts."""
    tables = (path for path in paths if Path(path).suffix.lower() in TABLE_SUFFIXES)
    return [
        (
            f"{path} is read as plain text, separators and header too; to learn its labels: "
            f"halfstep finetune classify --train {quote(path)}"
        )
        for path in tables
    ]


def _make_model(config: TrainConfig, tokenizer: Tokenizer) -> LanguageModel:
    """Make a model with the tokenizer's vocabulary."""
    size = tokenizer.vocab_size
    if config.model.vocab_size not in (0, size):
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but data.tokenizer="
            f"{config.data.tokenizer} has {size} ids; leave model.vocab_size at 0 to follow it"
        )
    shape = dataclasses.replace(config.model, vocab_size=size)
    return FAMILIES[type(shape)].make(shape, seed=config.run.seed)
