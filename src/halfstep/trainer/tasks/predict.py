"""Classifying texts with a classifier from a folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.errors import ConfigError, NonFiniteError
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.casting.cast import around_model, cast_to_policy_
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.data.labelled.config import LabelledTexts
from halfstep.trainer.data.labelled.examples import encode_examples, padded
from halfstep.trainer.data.labelled.length_batches import evaluation_batches
from halfstep.trainer.data.tokenizers.text_tokenizer import load_text_tokenizer
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.models.encoder.encoder import load_encoder
from halfstep.trainer.models.encoder.files import is_encoder_folder
from halfstep.trainer.models.pretrained.classifier import open_classifier
from halfstep.trainer.models.pretrained.folder import open_folder
from halfstep.trainer.models.pretrained.tokenizer import open_tokenizer
from halfstep.trainer.tasks.scores import classifier_scores, example_batches

_BATCHES_AT_ONCE = 32  # as many are sorted by length together


class Predictor:
    """A classifier under a precision policy."""

    def __init__(
        self,
        folder: Path,
        precision: str,
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
        self.model: Any
        self.tokenizer: Any
        if is_encoder_folder(folder):
            self.model = load_encoder(folder)
            self.labels: tuple[str, ...] = tuple(self.model.config.labels)
            self.tokenizer = load_text_tokenizer(folder)
        else:
            names = open_folder(folder, trust_remote_code=trust_remote_code).config.id2label
            self.labels = tuple(names[number] for number in sorted(names))
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
                logits_BC = self.model.logits((ids_BT, mask_BT, labels_B, labels_B - 1))
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
