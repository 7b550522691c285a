"""Trains text classifiers on labelled examples, and uses trained ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.distributed.world import World
from halfstep.errors import ConfigError, NonFiniteError
from halfstep.files import write_whole
from halfstep.precision.scaling.gradients import in_fp64
from halfstep.trainer.checkpoint import Exported
from halfstep.trainer.config.tasks import ClassifyConfig, Evaluating, Predicting
from halfstep.trainer.data.batches import Examples, encode_examples, evaluation_batches, padded
from halfstep.trainer.data.config import LabelledData, LabelledTexts
from halfstep.trainer.data.labelled import read_known, read_labelled
from halfstep.trainer.data.token_file import Progress
from halfstep.trainer.models.classifier import (
    SCRATCH,
    PretrainedClassifier,
    make_classifier,
    open_classifier,
    scratch_size,
    train_tokenizer,
)
from halfstep.trainer.models.pretrained_tokenizer import PretrainedTokenizer, open_tokenizer
from halfstep.trainer.step import Batch, Evaluation, Judge
from halfstep.trainer.tasks.epochs import (
    FinetuneTask,
    model_folder,
    pinned,
    tokenizer_of,
)
from halfstep.trainer.tasks.scores import (
    classifier_scores,
    example_batches,
    report_table,
    report_values,
)
from halfstep.trainer.tasks.task import Measured, Trained

_BATCHES_AT_ONCE = 32  # texts of this many batches are sorted by length together, to save padding


class ClassifyTask(FinetuneTask):
    """A classifier and its examples: a :class:`~halfstep.trainer.tasks.task.Task`."""

    config: ClassifyConfig
    model: PretrainedClassifier

    def __init__(
        self, config: ClassifyConfig, world: World, progress: Progress, *_: object
    ) -> None:
        """Read the data, make or load tokenizer and model; for arguments see ``open_session``.

        Raises:
            HalfstepError: For data or a model folder that cannot be used.
        """
        run, choice = config.run, config.model
        data = read_labelled(config.data, run.seed)
        self.labels = data.names
        self.notes = list(data.notes)
        if choice.source.startswith(SCRATCH):
            self._make(config, data)
        else:
            config = self._load(config, world)
        self._train = self._encoded("training", data.train)
        self._dev = self._encoded("validation", data.dev)
        self.identity: Mapping[str, str] = {
            "data": data.sha256,
            "tokenizer": self.tokenizer.fingerprint,
        }
        world.require_same(self.identity)
        self.deal(config, self._train.lengths)

    def _make(self, config: ClassifyConfig, data: LabelledData) -> None:
        choice = config.model
        size = scratch_size(choice.source)
        self.tokenizer = train_tokenizer(data.train.texts, size.vocabulary, choice.max_length)
        self.model = make_classifier(
            size,
            self.labels,
            vocab_size=self.tokenizer.vocab_size,
            max_length=choice.max_length,
            dropout=None if choice.dropout < 0 else choice.dropout,
            label_smoothing=choice.label_smoothing,
            seed=config.run.seed,
        )

    def _load(self, config: ClassifyConfig, world: World) -> ClassifyConfig:
        config = pinned(config, world)
        choice = config.model
        self.model = open_classifier(
            choice.source,
            self.labels,
            dropout=None if choice.dropout < 0 else choice.dropout,
            label_smoothing=choice.label_smoothing,
            seed=config.run.seed,
            revision=choice.revision,
        )
        if self.model.head_is_new:
            self.notes.append(
                f"the layer that gives the classes is new: {choice.source} has none for these"
            )
        self.tokenizer = tokenizer_of(self.model, choice, choice.max_length)
        return config

    def _encoded(self, role: str, texts: LabelledTexts) -> Examples:
        before = self.tokenizer.truncated
        examples = encode_examples(self.tokenizer.encode_batch, texts)
        cut = self.tokenizer.truncated - before
        if cut:
            self.notes.append(
                f"{cut} of {len(examples)} {role} texts are longer than "
                f"{self.tokenizer.max_length} tokens and were cut (--max-length)"
            )
        return examples

    def summary(self) -> str:
        """Describe the run by its numbers of parameters, examples and classes."""
        count = sum(p.numel() for p in self.model.parameters())
        return (
            f"{count:,} parameters, {len(self._train):,} training and {len(self._dev):,} "
            f"validation examples of {len(self.labels)} classes"
        )

    def batch(self, step: int, rows: range) -> Batch:
        """Return (ids_BT int64, mask_BT bool, labels_B int64) of some rows of a step's batch."""
        indices = self.indices(step)[rows.start : rows.stop]
        return padded(self._train, indices, self.tokenizer.pad_id)

    def targets(self, batch: Batch) -> float:
        """Return the number of examples."""
        return len(batch[2])

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure loss (unsmoothed) and confusion on every validation example once."""
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

    def improved(self, folder: Path, step: int, evaluation: Evaluation) -> None:
        """Write the report on the best state so far: report.txt, report.json."""
        if not evaluation.confusion:  # the model's outputs were not finite
            return
        values = {
            "step": step,
            "loss": evaluation.loss,
            "precision": str(self.config.precision),
            "data": self.identity["data"],
            **report_values(evaluation.confusion, self.labels),
        }
        write_whole(folder / "report.txt", report_table(evaluation.confusion, self.labels))
        text = json.dumps(values, indent=1, ensure_ascii=False)
        write_whole(folder / "report.json", f"{text}\n")

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write the best state; its report is there already."""
        return f"{super().finish(folder, exported)}, report in {folder / 'report.txt'}"


class TrainedClassifier(Trained):
    """A classifier from a run of ``finetune classify``."""

    model: PretrainedClassifier
    tokenizer: PretrainedTokenizer

    def load(self) -> None:
        """Load the best state; texts are cut as in training."""
        folder = model_folder(self.path)
        self.model = open_classifier(folder, None)
        self.labels: tuple[str, ...] = self.model.names
        self.tokenizer = open_tokenizer(
            folder, max_length=self.config.model.max_length, model_limit=self.model.max_length
        )

    @torch.no_grad()
    def probabilities(self, texts: list[str], batch_size: int) -> np.ndarray[Any, Any]:
        """Return an fp64 array (number of texts, number of labels) whose rows add up to 1."""
        examples = encode_examples(
            self.tokenizer.encode_batch, LabelledTexts(texts, [0] * len(texts))
        )
        found = np.zeros((len(texts), len(self.labels)))
        with self.around():
            for indices in evaluation_batches(examples.lengths, batch_size):
                ids_BT, mask_BT, labels_B = (
                    part.to(self.device)
                    for part in padded(examples, indices, self.tokenizer.pad_id)
                )
                logits_BC = self.model.logits((ids_BT, mask_BT, labels_B))
                found[indices] = in_fp64(logits_BC).softmax(dim=-1).cpu().numpy()
        self._require_finite(bool(np.isfinite(found).all()))
        return found

    def classify(self, texts: Iterable[str], batch_size: int) -> Iterator[tuple[str, str, float]]:
        """Yield (text, label, probability) for each text in order; reads texts as needed."""
        stream = iter(texts)
        while chunk := list(islice(stream, batch_size * _BATCHES_AT_ONCE)):
            table = self.probabilities(chunk, batch_size)
            best = table.argmax(axis=1)
            for text, number, row in zip(chunk, best, table, strict=True):
                yield text, self.labels[number], float(row[number])
        self._note_cuts()

    def predict(self, use: Predicting, texts: Iterable[str]) -> Iterator[tuple[str, str, float]]:
        """Return (text, label, probability) for each text, in order."""
        return self.open(use).classify(texts, use.batch_size)

    def evaluate(self, use: Evaluating, progress: Progress) -> Measured:
        """Report the scores on the run's validation texts, or on ``--data``."""
        self.open(use)
        examples = encode_examples(self.tokenizer.encode_batch, self._texts(use))
        batches = example_batches(examples, use.batch_size, self.tokenizer.pad_id, use.max_batches)
        judge = Judge(self.model.loss_sum, self.around, self.device)
        found = classifier_scores(self.model, batches, self.labels, judge)
        self._require_finite(math.isfinite(found.loss))
        self._note_cuts()
        values = {"loss": found.loss, "examples": found.targets, "precision": str(self.policy)}
        head = f"loss {found.loss:.4f}, macro F1 {found.macro_f1:.4f} in {self.policy}\n"
        return Measured(
            head + report_table(found.confusion, self.labels),
            values | report_values(found.confusion, self.labels),
        )

    def _texts(self, use: Evaluating) -> LabelledTexts:
        """Read ``--data`` or the run's validation texts, numbered by the model's labels."""
        data, role = self.config.data, "test" if use.data else "dev"
        if use.data or data.dev:
            return read_known(use.data or data.dev, data, self.labels, role, self.notes)
        whole = read_labelled(data, self.config.run.seed)
        report = json.loads((self.path / "report.json").read_text(encoding="utf-8"))
        if whole.sha256 != report["data"]:
            raise ConfigError(
                f"{', '.join(data.train)} has changed since the run, so the validation texts drawn "
                "from it would be others; put it back, or give --data"
            )
        self.notes += whole.notes
        return whole.dev

    def _require_finite(self, finite: bool) -> None:
        if not finite:
            raise NonFiniteError(
                f"the model's outputs are not finite in {self.policy}: take --precision fp32, or "
                "an earlier state if it is that already",
                cause="forward",
            )

    def _note_cuts(self) -> None:
        if cut := self.tokenizer.truncated:
            self.notes.append(f"{cut} texts were cut at {self.tokenizer.max_length} tokens")
