"""Training a text classifier on labelled examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.finetune import ClassifierConfig, ClassifyConfig
from halfstep.trainer.data.labelled.config import LabelledData, LabelledTexts
from halfstep.trainer.data.labelled.examples import Examples, encode_examples, padded
from halfstep.trainer.data.labelled.labelled import read_labelled
from halfstep.trainer.data.labelled.length_batches import EpochBatches, dropout_keys
from halfstep.trainer.data.tokenizers.text_tokenizer import train_text_tokenizer
from halfstep.trainer.environment import choose_device
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.memory import Need, require_room
from halfstep.trainer.models.encoder.config import VOCAB_SIZES, encoder_config
from halfstep.trainer.models.encoder.encoder import Encoder
from halfstep.trainer.models.encoder.files import is_encoder_folder
from halfstep.trainer.models.pretrained.classifier import open_classifier
from halfstep.trainer.models.pretrained.tokenizer import open_tokenizer, require_vocabulary
from halfstep.trainer.run.model_folder import matrix_parameters, replace_folder
from halfstep.trainer.step import Batch
from halfstep.trainer.tasks.scores import classifier_scores, example_batches, write_report
from halfstep.trainer.tasks.task import Progress, pinned

SCRATCH = "scratch:"


class ClassifyTask:
    """A classifier and its examples: a :class:`~halfstep.trainer.tasks.task.Task`."""

    keeps_best = True

    def __init__(self, config: ClassifyConfig, world: World, progress: Progress) -> None:
        """Read the data, make or load tokenizer and model; arguments as of ``open_session``.

        Raises:
            HalfstepError: For data or a model folder that cannot be used.
        """
        run, choice = config.run, config.model
        data = read_labelled(config.data, run.seed)
        self.labels = data.names
        self.notes = list(data.notes)
        weights = None
        if choice.class_weights == "balanced":
            weights = balanced(data.train.labels, len(data.names))
        self.tokenizer: Any
        self.model: Any
        if choice.source.startswith(SCRATCH):
            self._make(config, data, weights)
        elif is_encoder_folder(Path(choice.source)):
            raise ConfigError(
                f"model.source={choice.source} is a classifier that was trained from scratch here; "
                "it predicts (halfstep predict --model), but cannot be trained on: give "
                "scratch:NAME, or a Hugging Face encoder"
            )
        else:
            config = self._load(config, weights, world)
        self._train = self._encoded("training", data.train, progress)
        self._dev = self._encoded("validation", data.dev, progress)
        self.identity: Mapping[str, str] = {
            "data": data.sha256,
            "tokenizer": self.tokenizer.fingerprint,
        }
        world.require_same(self.identity)
        self._batches = EpochBatches(self._train.lengths, run.batch_size, run.seed)
        self._lengths = self._train.lengths
        self.smallest_batch = len(self._train) // self._batches.steps_per_epoch
        self.config: ClassifyConfig = config.resolved(self._batches.steps_per_epoch)
        self._class_weights = None if weights is None else torch.tensor(weights)
        self._matrices = matrix_parameters(self.model)

    def _make(
        self, config: ClassifyConfig, data: LabelledData, weights: list[float] | None
    ) -> None:
        """A tokenizer trained on the data, and a model of our own."""
        choice = config.model
        size = choice.source.removeprefix(SCRATCH)
        vocabulary = choice.vocab_size or VOCAB_SIZES.get(size, 0)
        every = ("dropout", "token_dropout", "ngram_dropout")
        changes: dict[str, Any] = {} if choice.dropout < 0 else dict.fromkeys(every, choice.dropout)
        shape = {"labels": data.names, "max_length": choice.max_length, **changes}
        # refuses an unknown size before a tokenizer is trained
        planned = encoder_config(choice.source, vocab_size=vocabulary or 1000, **shape)
        require_room(
            Need(dataclasses.replace(planned.as_gpt(), vocab_size=0).parameters),
            parse_policy(config.precision),
            choose_device(config.run.device),
            advice="--max-length",
        )
        self.tokenizer = train_text_tokenizer(data.train.texts, vocabulary, choice.max_length)
        self.model = Encoder(
            encoder_config(size, vocab_size=self.tokenizer.vocab_size, **shape),
            seed=config.run.seed,
            label_smoothing=choice.label_smoothing,
            class_weights=weights,
        )

    def _load(
        self, config: ClassifyConfig, weights: list[float] | None, world: World
    ) -> ClassifyConfig:
        """A Hugging Face encoder and its tokenizer; returns the configuration as it is run."""
        config, trust = pinned(config, world)
        choice = config.model
        self.model = open_classifier(
            choice.source,
            self.labels,
            dropout=None if choice.dropout < 0 else choice.dropout,
            class_weights=weights,
            label_smoothing=choice.label_smoothing,
            seed=config.run.seed,
            **trust,
        )
        if self.model.head_is_new:
            self.notes.append(
                f"the layer that gives the classes is new: {choice.source} has none for these"
            )
        limit = self.model.max_length
        if limit is not None and choice.max_length > limit:
            if choice.max_length != ClassifierConfig().max_length:
                raise ConfigError(
                    f"model.max_length={choice.max_length} is over the {limit} positions of "
                    f"model.source={choice.source}; lower --max-length"
                )
            self.notes.append(f"texts are cut at the model's {limit} positions")
            choice = dataclasses.replace(choice, max_length=limit)
        self.tokenizer = open_tokenizer(
            choice.source, max_length=choice.max_length, model_limit=limit, **trust
        )
        require_vocabulary(self.model, self.tokenizer)
        return dataclasses.replace(config, model=choice)

    def _encoded(self, role: str, texts: LabelledTexts, progress: Progress) -> Examples:
        before = self.tokenizer.truncated
        examples = encode_examples(self.tokenizer, texts, progress)
        cut = self.tokenizer.truncated - before
        if cut:
            self.notes.append(
                f"{cut} of {len(examples)} {role} texts are longer than "
                f"{self.tokenizer.max_length} tokens and were cut (--max-length)"
            )
        return examples

    def summary(self) -> str:
        """Parameters, examples and classes."""
        count = sum(p.numel() for p in self.model.parameters())
        return (
            f"{count:,} parameters, {len(self._train):,} training and {len(self._dev):,} "
            f"validation examples of {len(self.labels)} classes"
        )

    def batch_size(self, step: int) -> int:
        """Examples of the step; those of an epoch differ by one at most."""
        return len(self._batches.indices(step))

    def batch(self, step: int, rows: range) -> Batch:
        """(ids_BT int64, mask_BT bool, labels_B int64, dropout keys_B int64)."""
        indices = self._batches.indices(step)
        keys = dropout_keys(self.config.run.seed, step, len(indices))
        here = slice(rows.start, rows.stop)
        part = padded(self._train, indices[here], self.tokenizer.pad_id)
        return *part, torch.from_numpy(keys[here].copy())

    def targets(self, batch: Batch) -> float:
        """Examples, or the sum of their classes' weights."""
        labels_B = batch[2]
        if self._class_weights is None:
            return len(labels_B)
        return float(self._class_weights.double()[labels_B].sum())

    def tokens(self, step: int) -> int:
        """Tokens of the step's examples, special ones included."""
        return int(self._lengths[self._batches.indices(step)].sum())

    def flops(self, tokens: float) -> float:
        """Two operations a matrix weight and token forward, four backward."""
        return 6.0 * self._matrices * tokens

    def evaluate(self, judge: Judge) -> Evaluation:
        """Loss without smoothing or weights, and confusion, of every validation example once."""
        run = self.config.run
        batches = example_batches(
            self._dev,
            run.batch_size // run.grad_accum,
            self.tokenizer.pad_id,
            run.eval_batches * run.grad_accum,
            judge.rank,
            judge.ranks,
        )
        return classifier_scores(self.model, batches, self.labels, judge, run.best_by)

    def save(self, folder: Path) -> None:
        """Write the tokenizer to ``folder/tokenizer``."""
        self.tokenizer.save(folder / "tokenizer")

    def improved(self, folder: Path, step: int, evaluation: Evaluation) -> None:
        """Write the report of the best state."""
        about = {
            "step": step,
            "loss": evaluation.loss,
            "precision": self.config.precision,
            "data": self.identity["data"],
        }
        write_report(folder, evaluation.confusion, self.labels, about)

    def finish(self, folder: Path, weights: Callable[[], Mapping[str, Tensor]]) -> str:
        """Write the best state as a folder that ``halfstep predict`` and transformers load."""

        def write(empty: Path) -> None:
            self.model.save_(empty, weights())
            self.tokenizer.save(empty)

        replace_folder(folder / "model", write)
        return f"model in {folder / 'model'}, report in {folder / 'report.txt'}"


def balanced(labels: list[int], classes: int) -> list[float]:
    """Weights that make every class count alike: n / (classes * examples of the class).

    **Source:** King and Zeng, "Logistic Regression in Rare Events Data", 2001; the same as
    scikit-learn's ``class_weight="balanced"``.
    """
    counts: list[int] = np.bincount(labels, minlength=classes).tolist()
    return [len(labels) / (classes * count) if count else 0.0 for count in counts]
