"""Training a text classifier on labelled examples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from halfstep.data.examples import Examples, encode_examples, padded
from halfstep.data.labelled import read_labelled
from halfstep.data.labelled_config import LabelledTexts
from halfstep.data.length_batches import EpochBatches, dropout_keys, evaluation_batches
from halfstep.data.text_tokenizer import train_text_tokenizer
from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.models.classification_loss import IGNORED_LABEL
from halfstep.models.encoder import Encoder
from halfstep.models.encoder_config import VOCAB_SIZES, encoder_config
from halfstep.models.encoder_files import is_encoder_folder
from halfstep.models.pretrained_classifier import open_classifier
from halfstep.models.pretrained_tokenizer import open_tokenizer, require_vocabulary
from halfstep.training.classification_report import accuracy, macro_f1, write_report
from halfstep.training.evaluate import Evaluation, Judge
from halfstep.training.finetune_config import ClassifierConfig, ClassifyConfig
from halfstep.training.model_folder import matrix_parameters, replace_folder, spread
from halfstep.training.pinned import pinned
from halfstep.training.step import Batch, to_device
from halfstep.training.task import Progress

SCRATCH = "scratch:"


class ClassifyTask:
    """A classifier and its examples: a :class:`~halfstep.training.task.Task`."""

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
            size = choice.source.removeprefix(SCRATCH)
            vocabulary = choice.vocab_size or VOCAB_SIZES.get(size, 0)
            # refuses an unknown size before a tokenizer is trained
            every = ("dropout", "token_dropout", "ngram_dropout")
            changes: dict[str, Any] = (
                {} if choice.dropout < 0 else dict.fromkeys(every, choice.dropout)
            )
            shape: Mapping[str, Any] = {"labels": data.names, "max_length": choice.max_length}
            encoder_config(choice.source, vocab_size=vocabulary or 1000, **shape, **changes)
            self.tokenizer = train_text_tokenizer(data.train.texts, vocabulary, choice.max_length)
            architecture = encoder_config(
                size, vocab_size=self.tokenizer.vocab_size, **shape, **changes
            )
            self.model = Encoder(
                architecture,
                seed=run.seed,
                label_smoothing=choice.label_smoothing,
                class_weights=weights,
            )
        elif is_encoder_folder(Path(choice.source)):
            raise ConfigError(
                f"model.source={choice.source} is a classifier that was trained from scratch here; "
                "it predicts (halfstep predict --model), but cannot be trained on: give "
                "scratch:NAME, or a Hugging Face encoder"
            )
        else:
            config, trust = pinned(config, world)
            choice = config.model
            self.model = open_classifier(
                choice.source,
                data.names,
                dropout=None if choice.dropout < 0 else choice.dropout,
                class_weights=weights,
                label_smoothing=choice.label_smoothing,
                seed=run.seed,
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
                config = dataclasses.replace(config, model=choice)
            self.tokenizer = open_tokenizer(
                choice.source,
                max_length=choice.max_length,
                model_limit=self.model.max_length,
                **trust,
            )
            require_vocabulary(self.model, self.tokenizer)
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

    @torch.no_grad()
    def evaluate(self, judge: Judge) -> Evaluation:
        """Loss without smoothing or weights, and confusion, of every validation example once."""
        size = len(self.labels)
        confusion = torch.zeros(size * size, dtype=torch.float64)
        total = 0.0
        for batch in self._validation(judge.rank, judge.ranks):
            *_, labels_B, _ = here = to_device(batch, judge.device)
            with judge.around():
                logits_BC = self.model.logits(here)
            losses_B = functional.cross_entropy(
                logits_BC.float(), labels_B, ignore_index=IGNORED_LABEL, reduction="none"
            )
            total += float(losses_B.double().sum())
            counted = labels_B != IGNORED_LABEL
            cells = labels_B[counted] * size + logits_BC.argmax(dim=-1)[counted]
            confusion += torch.bincount(cells, minlength=size * size).cpu()
        total, *cells_of_all = judge.sum([total, *confusion.tolist()])
        counts = [round(cell) for cell in cells_of_all]
        rows = tuple(tuple(counts[i * size : (i + 1) * size]) for i in range(size))
        examples = sum(counts)
        loss, right, f1 = total / examples, accuracy(rows), macro_f1(rows)
        if not math.isfinite(loss):  # argmax of NaN is class 0, which may well be the right one
            text = f"validation loss {loss}: the model's outputs are not finite"
            return Evaluation(loss=loss, targets=examples, score=math.nan, text=text)
        best_by = self.config.run.best_by or "accuracy"
        return Evaluation(
            loss=loss,
            targets=examples,
            score={"accuracy": right, "macro_f1": f1, "loss": -loss}[best_by],
            text=f"validation loss {loss:.4f}, accuracy {right:.4f}, macro F1 {f1:.4f} on "
            f"{examples:,} examples",
            accuracy=right,
            macro_f1=f1,
            confusion=rows,
        )

    def save(self, folder: Path) -> None:
        """Write the tokenizer."""
        self.tokenizer.save(folder / "tokenizer")

    def improved(self, folder: Path, step: int, evaluation: Evaluation) -> None:
        """Write the report of the best state."""
        about = {"step": step, "loss": evaluation.loss, "precision": self.config.precision}
        write_report(folder, evaluation.confusion, self.labels, about)

    def finish(self, folder: Path, weights: Callable[[], Mapping[str, Tensor]]) -> str:
        """Write the best state as a folder that ``halfstep predict`` and transformers load."""

        def write(empty: Path) -> None:
            self.model.save_(empty, weights())
            self.tokenizer.save(empty)

        replace_folder(folder / "model", write)
        return f"model in {folder / 'model'}, report in {folder / 'report.txt'}"

    def _validation(self, rank: int, ranks: int) -> Iterator[Batch]:
        """A rank's batches: every ``ranks``-th; each rank gets as many."""
        size = self.config.run.batch_size // self.config.run.grad_accum
        batches = evaluation_batches(self._dev.lengths, size)
        most = self.config.run.eval_batches * self.config.run.grad_accum
        batches = spread(batches, most)
        for first in range(0, math.ceil(len(batches) / ranks) * ranks, ranks):
            mine = first + rank
            indices = batches[mine] if mine < len(batches) else batches[0][:1]
            ids_BT, mask_BT, labels_B = padded(self._dev, indices, self.tokenizer.pad_id)
            if mine >= len(batches):  # all ranks run as often: a row that does not count
                labels_B = torch.full_like(labels_B, IGNORED_LABEL)
            yield ids_BT, mask_BT, labels_B, torch.full_like(labels_B, -1)


def balanced(labels: list[int], classes: int) -> list[float]:
    """Weights that make every class count alike: n / (classes * examples of the class).

    **Source:** King and Zeng, "Logistic Regression in Rare Events Data", 2001; the same as
    scikit-learn's ``class_weight="balanced"``.
    """
    counts: list[int] = np.bincount(labels, minlength=classes).tolist()
    return [len(labels) / (classes * count) if count else 0.0 for count in counts]
