"""Training a text classifier on labelled examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.trainer.config.tasks import ClassifierConfig, ClassifyConfig
from halfstep.trainer.data.labelled.config import LabelledData, LabelledTexts
from halfstep.trainer.data.labelled.examples import Examples, encode_examples, padded
from halfstep.trainer.data.labelled.labelled import read_labelled
from halfstep.trainer.data.labelled.length_batches import EpochBatches
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.memory import Need, require_room
from halfstep.trainer.models.pretrained.classifier import PretrainedClassifier, open_classifier
from halfstep.trainer.models.pretrained.scratch import (
    SCRATCH,
    make_classifier,
    refuse_old_run,
    scratch_parameters,
    scratch_size,
    train_tokenizer,
)
from halfstep.trainer.models.pretrained.tokenizer import (
    PretrainedTokenizer,
    open_tokenizer,
    require_vocabulary,
)
from halfstep.trainer.run.model_folder import matrix_parameters, replace_folder
from halfstep.trainer.step import Batch
from halfstep.trainer.tasks.scores import classifier_scores, example_batches, write_report
from halfstep.trainer.tasks.task import Exported, Progress, Task, pinned


class ClassifyTask(Task):
    """A classifier and its examples: a :class:`~halfstep.trainer.tasks.task.Task`."""

    keeps_best = True

    def __init__(
        self, config: ClassifyConfig, device: torch.device, world: World, progress: Progress
    ) -> None:
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
        self.tokenizer: PretrainedTokenizer
        self.model: PretrainedClassifier
        if choice.source.startswith(SCRATCH):
            self._make(config, device, data, weights)
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
        self,
        config: ClassifyConfig,
        device: torch.device,
        data: LabelledData,
        weights: list[float] | None,
    ) -> None:
        """A tokenizer trained on the data, and a model from random weights."""
        choice = config.model
        size = scratch_size(choice.source)
        refuse_old_run(Path(config.run.output_dir))
        vocabulary = choice.vocab_size or size.vocabulary
        require_room(
            Need(scratch_parameters(size, 0, choice.max_length)),
            config.precision,
            device,
            advice="--max-length",
        )
        self.tokenizer = train_tokenizer(data.train.texts, vocabulary, choice.max_length)
        self.model = make_classifier(
            size,
            self.labels,
            vocab_size=self.tokenizer.vocab_size,
            max_length=choice.max_length,
            dropout=None if choice.dropout < 0 else choice.dropout,
            class_weights=weights,
            label_smoothing=choice.label_smoothing,
            seed=config.run.seed,
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
        """(ids_BT int64, mask_BT bool, labels_B int64)."""
        indices = self._batches.indices(step)
        return padded(self._train, indices[rows.start : rows.stop], self.tokenizer.pad_id)

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
            "precision": str(self.config.precision),
            "data": self.identity["data"],
        }
        write_report(folder, evaluation.confusion, self.labels, about)

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write the best state as a folder that ``halfstep predict`` and transformers load."""

        def write(empty: Path) -> None:
            self.model.save_(empty, exported().weights)
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
