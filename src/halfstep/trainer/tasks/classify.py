"""Trains text classifiers on labelled examples, and uses trained ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError, NonFiniteError
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.casting.cast import cast_to_policy_, keeping_casts
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.scaling.gradients import in_fp64
from halfstep.trainer.checkpoint import Exported
from halfstep.trainer.config.tasks import ClassifyConfig
from halfstep.trainer.config.use import Evaluating, Exporting, Predicting, Use
from halfstep.trainer.data.batches import Examples, encode_examples, evaluation_batches, padded
from halfstep.trainer.data.config import LabelledData, LabelledTexts
from halfstep.trainer.data.labelled import read_known, read_labelled
from halfstep.trainer.environment import choose_device, require_host_room
from halfstep.trainer.models.pretrained.classifier import PretrainedClassifier, open_classifier
from halfstep.trainer.models.pretrained.scratch import (
    SCRATCH,
    make_classifier,
    scratch_parameters,
    scratch_size,
    train_tokenizer,
)
from halfstep.trainer.models.pretrained.tokenizer import (
    PretrainedTokenizer,
    open_tokenizer,
    require_vocabulary,
)
from halfstep.trainer.step import Batch, Evaluation, Judge
from halfstep.trainer.tasks.epochs import (
    EpochTask,
    copy_folder,
    matrix_parameters,
    model_folder,
    pinned,
    replace_folder,
    within,
)
from halfstep.trainer.tasks.scores import (
    classifier_scores,
    example_batches,
    report_table,
    report_values,
    write_report,
)
from halfstep.trainer.tasks.task import Loaded, Measured, Progress, Trained

_BATCHES_AT_ONCE = 32  # texts of this many batches are sorted by length together, to save padding


class ClassifyTask(EpochTask):
    """A classifier and its examples: a :class:`~halfstep.trainer.tasks.task.Task`."""

    config: ClassifyConfig
    keeps_best = True

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
        weights = None
        if choice.class_weights == "balanced":
            weights = balanced(data.train.labels, len(data.names))
        self.tokenizer: PretrainedTokenizer
        self.model: PretrainedClassifier
        if choice.source.startswith(SCRATCH):
            self._make(config, data, weights)
        else:
            config = self._load(config, weights, world)
        self._train = self._encoded("training", data.train, progress)
        self._dev = self._encoded("validation", data.dev, progress)
        self.identity: Mapping[str, str] = {
            "data": data.sha256,
            "tokenizer": self.tokenizer.fingerprint,
        }
        world.require_same(self.identity)
        self.deal(config, self._train.lengths)
        self._class_weights = None if weights is None else torch.tensor(weights)
        self._matrices = matrix_parameters(self.model)

    def _make(
        self,
        config: ClassifyConfig,
        data: LabelledData,
        weights: list[float] | None,
    ) -> None:
        """Train a tokenizer on the data, and make a model with random weights."""
        choice = config.model
        size = scratch_size(choice.source)
        vocabulary = choice.vocab_size or size.vocabulary
        require_host_room(scratch_parameters(size, 0, choice.max_length), 0, "--max-length")
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
        """Load a Hugging Face encoder and its tokenizer; return the resolved configuration."""
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
        choice = within(choice, "model", limit, choice.source)
        if choice is not config.model:
            self.notes.append(f"texts are cut at the model's {limit} positions")
        self.tokenizer = open_tokenizer(
            choice.source, max_length=choice.max_length, model_limit=limit, **trust
        )
        require_vocabulary(self.model, self.tokenizer)
        return dataclasses.replace(config, model=choice)

    def _encoded(self, role: str, texts: LabelledTexts, progress: Progress) -> Examples:
        before = self.tokenizer.truncated
        examples = encode_examples(self.tokenizer.encode_batch, texts, progress)
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
        """Return the number of examples, or the sum of their class weights if the run has some."""
        labels_B = batch[2]
        if self._class_weights is None:
            return len(labels_B)
        return float(in_fp64(self._class_weights[labels_B]).sum())

    def flops(self, tokens: float) -> float:
        """Count two operations per matrix weight and token in the forward, four in the backward."""
        return 6.0 * self._matrices * tokens

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure loss (unsmoothed, unweighted) and confusion on every validation example once."""
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
        """Write the report on the best state so far: report.txt, report.json."""
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
    """Return class weights that make every class count alike: n / (classes * examples of class).

    **Source:** King and Zeng, "Logistic Regression in Rare Events Data", 2001; the same as
    scikit-learn's ``class_weight="balanced"``.
    """
    counts: list[int] = np.bincount(labels, minlength=classes).tolist()
    return [len(labels) / (classes * count) if count else 0.0 for count in counts]


# Using a classifier from a model folder.


class LoadedClassifier(Loaded):
    """A trained classifier, loaded from a folder to run under a precision policy."""

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

        ``max_length`` is the number of tokens at which texts are cut; None leaves only the limits
        of the model and its tokenizer.

        Raises:
            ConfigError: If the folder holds no classifier.
            CheckpointError: If its files are damaged.
            PrecisionError: If the device does not honour the policy.
        """
        self.policy = parse_policy(precision, device)
        require_support(self.policy, device)
        self.device = device
        self.model = open_classifier(folder, None, trust_remote_code=trust_remote_code)
        self.labels: tuple[str, ...] = self.model.names
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
        """Return an fp64 array (number of texts, number of labels) whose rows add up to 1."""
        examples = encode_examples(
            self.tokenizer.encode_batch, LabelledTexts(texts, [0] * len(texts))
        )
        found = np.zeros((len(texts), len(self.labels)))
        with keeping_casts(self.device):
            for indices in evaluation_batches(examples.lengths, batch_size):
                ids_BT, mask_BT, labels_B = (
                    part.to(self.device)
                    for part in padded(examples, indices, self.tokenizer.pad_id)
                )
                with self.around():
                    logits_BC = self.model.logits((ids_BT, mask_BT, labels_B))
                found[indices] = in_fp64(logits_BC).softmax(dim=-1).cpu().numpy()
        if not np.isfinite(found).all():
            first = int(np.flatnonzero(~np.isfinite(found).all(axis=1))[0])
            raise NonFiniteError(
                f"the model's outputs for the text {texts[first][:60]!r} are not finite in "
                f"{self._beyond()}",
                cause="forward",
            )
        return found

    def evaluate(self, texts: LabelledTexts, batch_size: int, most: int = 0) -> Evaluation:
        """Measure loss, accuracy, macro F1 and confusion on labelled texts.

        The label numbers of ``texts`` index ``labels``; ``most`` limits the number of batches.

        Raises:
            NonFiniteError: If the loss is not finite.
        """
        examples = encode_examples(self.tokenizer.encode_batch, texts)
        batches = example_batches(examples, batch_size, self.tokenizer.pad_id, most)
        found = classifier_scores(self.model, batches, self.labels, self.judge)
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
        """Yield (text, label, probability) for each text in order; reads texts as needed."""
        stream = iter(texts)
        while chunk := list(islice(stream, batch_size * _BATCHES_AT_ONCE)):
            table = self.probabilities(chunk, batch_size)
            best = table.argmax(axis=1)
            for text, number, row in zip(chunk, best, table, strict=True):
                yield text, self.labels[number], float(row[number])


class TrainedClassifier(Trained):
    """A classifier from a run of ``finetune classify``, or from a model folder."""

    def predict(self, use: Predicting, texts: Iterable[str]) -> Iterator[tuple[str, str, float]]:
        """Yield (text, label, probability) for each text, in order."""
        predictor = self._open(use)

        def found() -> Iterator[tuple[str, str, float]]:
            yield from predictor.predict(texts, use.batch_size)
            self.notes += _cut(predictor)

        return found()

    def evaluate(self, use: Evaluating, progress: Progress) -> Measured:
        """Report the scores on the run's validation texts, or on ``--data``."""
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
        """Copy the best state, which the run has already written as a Hugging Face folder."""
        if use.adapter:
            raise ConfigError(f"--adapter: {self.path} is not a run of finetune lm; leave it out")
        if use.dtype not in ("", "fp32"):
            raise ConfigError(f"--dtype {use.dtype}: a classifier is written in fp32")
        copy_folder(model_folder(self.path), Path(use.output))
        return f"{use.output}: classifier in fp32"

    def _open(self, use: Use) -> LoadedClassifier:
        return LoadedClassifier(
            model_folder(self.path) if self.config else self.path,
            use.precision or (self.config.precision if self.config else "fp32"),
            choose_device(use.device),
            max_length=self.config.model.max_length if self.config else None,
            trust_remote_code=use.trust_remote_code,
        )

    def _texts(self, use: Evaluating, labels: tuple[str, ...]) -> tuple[LabelledTexts, list[str]]:
        """Read ``--data`` or the run's validation texts, numbered by ``labels``; also notes."""
        config = self.config
        if config is None:
            raise ConfigError("evaluate of a classifier needs --run, the run that trained it")
        given = {"text_column": use.text_column, "label_column": use.label_column}
        changes = {key: value for key, value in given.items() if value}
        data = dataclasses.replace(config.data, **changes)
        if use.data or data.dev:
            role = "test" if use.data else "dev"
            return read_known(use.data or data.dev, data, labels, role), []
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


def _cut(predictor: LoadedClassifier) -> list[str]:
    """Return a note on the texts that were cut, or no note if none was."""
    tokenizer = predictor.tokenizer
    cut = tokenizer.truncated
    return [f"{cut} texts were cut at {tokenizer.max_length} tokens"] * bool(cut)
