"""Classifying texts with a classifier from a folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.errors import CheckpointError, ConfigError, NonFiniteError
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.casting.cast import around_model, cast_to_policy_
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.use import Evaluating, Exporting, Predicting, Use
from halfstep.trainer.data.labelled.config import LabelledTexts
from halfstep.trainer.data.labelled.examples import encode_examples, padded
from halfstep.trainer.data.labelled.labelled import read_known, read_labelled
from halfstep.trainer.data.labelled.length_batches import evaluation_batches
from halfstep.trainer.environment import choose_device
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.models.pretrained.classifier import open_classifier
from halfstep.trainer.models.pretrained.folder import open_folder
from halfstep.trainer.models.pretrained.tokenizer import open_tokenizer
from halfstep.trainer.run.model_folder import copy_folder, model_folder
from halfstep.trainer.tasks.scores import (
    classifier_scores,
    example_batches,
    report_table,
    report_values,
)
from halfstep.trainer.tasks.task import Measured, Progress, Trained

_BATCHES_AT_ONCE = 32  # as many are sorted by length together


class Predictor:
    """A classifier under a precision policy."""

    def __init__(
        self,
        folder: Path,
        precision: str | PrecisionPolicy,
        device: torch.device,
        *,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model and its tokenizer.

        Args:
            folder: Of the model.
            precision: A policy.
            device: To run on.
            max_length: Most tokens of a text, where its run cut texts shorter than the model must.
            trust_remote_code: Let code that comes with the model run.

        Raises:
            ConfigError: If the folder holds no classifier.
            CheckpointError: If its files are damaged.
            PrecisionError: If the device does not honour the policy.
        """
        self.policy = parse_policy(precision)
        require_support(self.policy, device)
        self.device = device
        names = open_folder(folder, trust_remote_code=trust_remote_code).config.id2label
        self.labels: tuple[str, ...] = tuple(names[number] for number in sorted(names))
        self.model = open_classifier(folder, self.labels, trust_remote_code=trust_remote_code)
        if self.model.head_is_new:
            raise ConfigError(
                f"{folder} has no trained classifier on top; fine-tune it by halfstep finetune "
                "classify --model first"
            )
        self.tokenizer = open_tokenizer(
            folder,
            max_length=max_length,
            model_limit=self.model.max_length,
            trust_remote_code=trust_remote_code,
        )
        cast_to_policy_(self.model, self.policy)
        self.model.to(device).eval()

    @torch.no_grad()
    def probabilities(self, texts: list[str], batch_size: int) -> np.ndarray[Any, Any]:
        """(number of texts, number of labels) fp64, each row adding up to 1."""
        examples = encode_examples(self.tokenizer, LabelledTexts(texts, [0] * len(texts)))
        found = np.zeros((len(texts), len(self.labels)))
        for indices in evaluation_batches(examples.lengths, batch_size):
            ids_BT, mask_BT, labels_B = (
                part.to(self.device) for part in padded(examples, indices, self.tokenizer.pad_id)
            )
            with around_model(self.policy, self.model, self.device):
                logits_BC = self.model.logits((ids_BT, mask_BT, labels_B))
            found[indices] = logits_BC.double().softmax(dim=-1).cpu().numpy()
        if not np.isfinite(found).all():
            first = int(np.flatnonzero(~np.isfinite(found).all(axis=1))[0])
            raise NonFiniteError(
                f"the model's outputs for the text {texts[first][:60]!r} are not finite in "
                f"{self._beyond()}",
                cause="forward",
            )
        return found

    def evaluate(self, texts: LabelledTexts, batch_size: int, most: int = 0) -> Evaluation:
        """Loss, accuracy, macro F1 and confusion on labelled texts, or on ``most`` batches of them.

        The numbers of ``texts`` are those of ``labels``.

        Raises:
            NonFiniteError: The loss is not finite.
        """
        examples = encode_examples(self.tokenizer, texts)
        batches = example_batches(examples, batch_size, self.tokenizer.pad_id, most)
        judge = Judge(
            self.model.loss_sum,
            partial(around_model, self.policy, self.model, self.device),
            self.device,
        )
        found = classifier_scores(self.model, batches, self.labels, judge)
        if not math.isfinite(found.loss):
            raise NonFiniteError(
                f"the loss is {found.loss}: the model's outputs are not finite in {self._beyond()}",
                cause="forward",
            )
        return found

    def _beyond(self) -> str:
        if self.policy.compute_dtype == torch.float32:
            return f"{self.policy}: its weights are too large; go back to an earlier state"
        return f"{self.policy}: weights or activations are beyond it; take --precision fp32"

    def predict(self, texts: Iterable[str], batch_size: int) -> Iterator[tuple[str, str, float]]:
        """(text, label, probability) of each text, in their order; reads them as needed."""
        stream = iter(texts)
        while chunk := list(islice(stream, batch_size * _BATCHES_AT_ONCE)):
            table = self.probabilities(chunk, batch_size)
            best = table.argmax(axis=1)
            for text, number, row in zip(chunk, best, table, strict=True):
                yield text, self.labels[number], float(row[number])


class TrainedClassifier(Trained):
    """What a run of ``finetune classify`` left, or the folder of a classifier."""

    def predict(self, use: Predicting, texts: Iterable[str]) -> Iterator[tuple[str, str, float]]:
        """(text, label, probability) of each text, in their order."""
        predictor = self._open(use)

        def found() -> Iterator[tuple[str, str, float]]:
            yield from predictor.predict(texts, use.batch_size)
            self.notes += _cut(predictor)

        return found()

    def evaluate(self, use: Evaluating, progress: Progress) -> Measured:
        """The report on the run's validation texts, or on others."""
        predictor = self._open(use)
        texts, notes = self._texts(use, predictor.labels)
        found = predictor.evaluate(texts, use.batch_size, use.max_batches)
        precision = str(predictor.policy)
        values = {"loss": found.loss, "examples": found.targets, "precision": precision}
        head = f"loss {found.loss:.4f}, macro F1 {found.macro_f1:.4f} in {precision}\n"
        return Measured(
            head + report_table(found.confusion, predictor.labels),
            values | report_values(found.confusion, predictor.labels),
            notes + _cut(predictor),
        )

    def export(self, use: Exporting) -> str:
        """Copy the best state, which is a folder for others already."""
        if use.adapter:
            raise ConfigError(f"--adapter: {self.path} is not a run of finetune lm; leave it out")
        if use.dtype not in ("", "fp32"):
            raise ConfigError(f"--dtype {use.dtype}: a classifier is written in fp32")
        copy_folder(model_folder(self.path), Path(use.output))
        return f"{use.output}: classifier in fp32"

    def _open(self, use: Use) -> Predictor:
        return Predictor(
            model_folder(self.path) if self.config else self.path,
            use.precision or (self.config.precision if self.config else "fp32"),
            choose_device(use.device),
            max_length=self.config.model.max_length if self.config else None,
            trust_remote_code=use.trust_remote_code,
        )

    def _texts(self, use: Evaluating, labels: tuple[str, ...]) -> tuple[LabelledTexts, list[str]]:
        """``--data``, or what the run was validated on, in the classifier's numbers; and notes."""
        config = self.config
        if config is None:
            raise ConfigError("evaluate of a classifier needs --run, the run that trained it")
        given = {"text_column": use.text_column, "label_column": use.label_column}
        changes = {key: value for key, value in given.items() if value}
        drop = use.drop_empty or config.data.drop_empty
        data = dataclasses.replace(config.data, drop_empty=drop, **changes)
        if use.data or data.dev:
            role = "test" if use.data else "dev"
            texts, note = read_known(use.data or data.dev, data, labels, role)
            return texts, [note] if note else []
        whole = read_labelled(data, config.run.seed)
        report = self.path / "report.json"
        try:
            before = json.loads(report.read_text(encoding="utf-8"))["data"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{report} is missing or damaged: {error!r}") from error
        if whole.sha256 != before:
            raise ConfigError(
                f"{', '.join(data.train)} has changed since the run, so the validation texts drawn "
                "from it would be others; put it back, or give --data"
            )
        return whole.dev, list(whole.notes)


def _cut(predictor: Predictor) -> list[str]:
    """A note on texts that were too long, if there were any."""
    tokenizer = predictor.tokenizer
    cut = tokenizer.truncated
    return [f"{cut} texts were cut at {tokenizer.max_length} tokens"] * bool(cut)
