"""Trains text classifiers on labelled examples, and uses trained ones.

They are any Hugging Face encoder, or a BERT with random weights and its own tokenizer. A model from
scratch is treated like a pretrained encoder from then on: the same class trains it, and the saved
folder loads in ``transformers`` and can be trained further.

Shapes: B texts, T tokens, C classes.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional

from halfstep.distributed.layout import Layout
from halfstep.distributed.world import World
from halfstep.errors import ConfigError, NonFiniteError
from halfstep.files import write_whole
from halfstep.shown import aligned
from halfstep.trainer.checkpoint import Exported
from halfstep.trainer.config.tasks import ClassifyConfig, Evaluating
from halfstep.trainer.data.batches import (
    Examples,
    Indices,
    LabelledTexts,
    dealt,
    encode_examples,
    evaluation_batches,
    evaluation_shares,
    padded,
)
from halfstep.trainer.data.labelled import read_known, read_labelled
from halfstep.trainer.models import IGNORE_INDEX
from halfstep.trainer.models.pretrained import (
    Pretrained,
    PretrainedTokenizer,
    open_folder,
    open_tokenizer,
    quiet,
)
from halfstep.trainer.step import Batch, Evaluation, Judge, to_device
from halfstep.trainer.tasks.epochs import FinetuneTask, model_folder
from halfstep.trainer.tasks.task import Trained

_BATCHES_AT_ONCE = 32  # texts of this many batches are sorted by length together, to save padding

ClassifierBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(ids_BT int64, mask_BT bool, labels_B int64 with -100 for "does not count")."""


class ClassifyTask(FinetuneTask):
    """A classifier and its examples: a :class:`~halfstep.trainer.tasks.task.Task`."""

    config: ClassifyConfig
    model: PretrainedClassifier

    def __init__(self, config: ClassifyConfig, world: World, layout: Layout) -> None:
        """Read the data, make or load tokenizer and model; for arguments see ``open_session``."""
        run, choice = config.run, config.model
        data = read_labelled(config.data, run.seed)
        self.labels = data.names
        self.notes = list(data.notes)
        smoothing, seed = choice.label_smoothing, run.seed
        if choice.source.startswith(SCRATCH):
            size = scratch_size(choice.source)
            self.tokenizer = train_tokenizer(data.train.texts, size[-1], choice.max_length)
            self.model = make_classifier(
                size,
                data.names,
                vocab_size=self.tokenizer.vocab_size,
                max_length=choice.max_length,
                label_smoothing=smoothing,
                seed=seed,
            )
        else:
            self.model = open_classifier(
                choice.source, data.names, label_smoothing=smoothing, seed=seed,
                mapped=layout.shard > 1,
            )  # fmt: skip
            self.tokenizer = open_tokenizer(
                choice.source, max_length=choice.max_length, model=self.model
            )
        if self.model.head_is_new:
            self.notes.append(
                f"the layer that gives the classes is new: {choice.source} has none for these"
            )
        self._train = self._encoded("training", data.train)
        self._dev = self._encoded("validation", data.dev)
        self.identity: Mapping[str, str] = {
            "data": data.sha256,
            "tokenizer": self.tokenizer.fingerprint,
        }
        world.require_same(self.identity)
        self.deal(config, self._train.lengths)

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
        indices = self.batches.indices(step)[rows.start : rows.stop]
        return _rows(self._train, indices, self.tokenizer.pad_id)

    def targets(self, batch: Batch) -> float:
        """Return the number of examples."""
        return len(batch[2])

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure loss (unsmoothed) and confusion on every validation example once."""
        shares = self.shares(self._dev.lengths, judge)
        batches = dealt(shares, partial(_rows, self._dev, pad_id=self.tokenizer.pad_id), 2)
        return classifier_scores(self.model, batches, self.labels, judge)

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
        write_whole(folder / "report.txt", report_table(values))
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
        folder = model_folder(self.path, self.config.COMMAND)
        self.model = open_classifier(folder, None)
        self.labels: tuple[str, ...] = self.model.names
        length = self.config.model.max_length
        self.tokenizer = open_tokenizer(folder, max_length=length, model=self.model)

    @torch.no_grad()
    def probabilities(self, texts: list[str], batch_size: int) -> np.ndarray[Any, Any]:
        """Return an fp64 array (number of texts, number of labels) whose rows add up to 1."""
        examples = encode_examples(
            self.tokenizer.encode_batch, LabelledTexts(texts, [0] * len(texts))
        )
        found = np.zeros((len(texts), len(self.labels)))
        with self.around():
            for indices in evaluation_batches(examples.lengths, batch_size):
                batch = _rows(examples, indices, self.tokenizer.pad_id)
                logits_BC = self.model.logits(to_device(batch, self.device))
                found[indices] = logits_BC.double().softmax(dim=-1).cpu().numpy()
        self._require_finite(bool(np.isfinite(found).all()))
        return found

    def predict(self, texts: Iterable[str], batch_size: int) -> Iterator[tuple[str, str, float]]:
        """Yield (text, label, probability) for each text in order; reads texts as needed."""
        stream = iter(texts)
        while chunk := list(islice(stream, batch_size * _BATCHES_AT_ONCE)):
            table = self.probabilities(chunk, batch_size)
            best = table.argmax(axis=1)
            for text, number, row in zip(chunk, best, table, strict=True):
                yield text, self.labels[number], float(row[number])
        self._note_cuts()

    def evaluate(self, use: Evaluating) -> tuple[str, dict[str, Any]]:
        """Report the scores on the run's validation texts, or on ``--data``, as text and values."""
        self.open(use)
        examples = encode_examples(self.tokenizer.encode_batch, self._texts(use))
        shares = evaluation_shares(examples.lengths, use.batch_size, use.max_batches)
        batches = dealt(shares, partial(_rows, examples, pad_id=self.tokenizer.pad_id), 2)
        judge = Judge(self.model.loss_sum, self.around, self.device)
        found = classifier_scores(self.model, batches, self.labels, judge)
        self._require_finite(math.isfinite(found.loss))
        self._note_cuts()
        values = {"loss": found.loss, "examples": found.targets, "precision": str(self.policy)}
        values |= report_values(found.confusion, self.labels)
        head = f"loss {found.loss:.4f}, macro F1 {found.macro_f1:.4f} in {self.policy}\n"
        return head + report_table(values), values

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


# Scores on every example once.


def _rows(examples: Examples, numbers: Indices, pad_id: int) -> ClassifierBatch:
    labels_B = torch.from_numpy(examples.labels[numbers])
    return (*padded(examples.ids, examples.starts, numbers, pad_id), labels_B)


@torch.no_grad()
def classifier_scores(
    model: Any, batches: Iterable[Batch], labels: Sequence[str], judge: Judge
) -> Evaluation:
    """Measure loss (unsmoothed) and confusion over the batches of all ranks."""
    size = len(labels)
    # summed on the device, for which the host waits once; the last cell is of what does not count
    confusion = torch.zeros(size * size + 1, dtype=torch.int64, device=judge.device)
    loss_sum: Any = 0.0
    with judge.around():
        for batch in batches:
            *_, labels_B = here = to_device(batch, judge.device)
            logits_BC = model.logits(here)
            losses_B = functional.cross_entropy(logits_BC.float(), labels_B, reduction="none")
            loss_sum = loss_sum + losses_B.double().sum()
            cells_B = labels_B * size + logits_BC.argmax(dim=-1)
            cells_B = cells_B.where(labels_B != IGNORE_INDEX, size * size)
            confusion.index_add_(0, cells_B, torch.ones_like(cells_B))
    total, *cells_of_all = judge.sum([float(loss_sum), *map(float, confusion[:-1].tolist())])
    counts = [round(cell) for cell in cells_of_all]
    rows = tuple(tuple(counts[i * size : (i + 1) * size]) for i in range(size))
    examples = sum(counts)
    loss, found = total / examples, report_values(rows, labels)
    right, f1 = found["accuracy"], found["macro_f1"]
    if not math.isfinite(loss):  # give no accuracy: the argmax of NaNs would count as class 0
        text = f"validation loss {loss}: the model's outputs are not finite"
        return Evaluation(loss=loss, targets=examples, score=math.nan, text=text)
    return Evaluation(
        loss=loss,
        targets=examples,
        score=right,
        text=f"validation loss {loss:.4f}, accuracy {right:.4f}, macro F1 {f1:.4f} on {examples:,} "
        "examples",
        accuracy=right,
        macro_f1=f1,
        confusion=rows,
    )


# Reports from a confusion matrix: the number of examples by true class (row) and predicted class
# (column). A ratio 0 / 0 is 0, as in scikit-learn's classification_report with zero_division=0.


def report_values(confusion: Sequence[Sequence[int]], labels: Sequence[str]) -> dict[str, Any]:
    """Return the scores of all classes, and the confusion matrix, as plain values for JSON.

    **Source:** van Rijsbergen, "Information Retrieval", 1979, chapter 7.
    """
    scores = []
    for number, row in enumerate(confusion):
        hits, support = row[number], sum(row)
        predicted = sum(other[number] for other in confusion)
        scores.append(
            {
                "precision": hits / max(predicted, 1),
                "recall": hits / max(support, 1),
                "f1": 2 * hits / max(predicted + support, 1),
                "support": support,
            }
        )
    hits = sum(row[number] for number, row in enumerate(confusion))
    return {
        "accuracy": hits / sum(map(sum, confusion)),
        "macro_f1": sum(score["f1"] for score in scores) / len(scores),
        "classes": [{"label": label, **score} for label, score in zip(labels, scores, strict=True)],
        "labels": list(labels),
        "confusion": [list(row) for row in confusion],
    }


def report_table(values: Mapping[str, Any]) -> str:
    """Format what :func:`report_values` returns as text in columns."""
    keys, classes = ("precision", "recall", "f1"), values["classes"]
    total = sum(one["support"] for one in classes)
    lines = [["", "precision", "recall", "F1", "examples"]]
    for one in classes:
        lines.append([one["label"], *(f"{one[key]:.4f}" for key in keys), str(one["support"])])
    means = (sum(one[key] for one in classes) / len(classes) for key in keys)
    lines.append(["macro mean", *(f"{mean:.4f}" for mean in means), str(total)])
    rows = zip(values["labels"], values["confusion"], strict=True)
    counts = [["actual \\ predicted", *values["labels"]]]
    counts += [[label, *map(str, row)] for label, row in rows]
    head = f"accuracy {values['accuracy']:.4f} on {total} examples"
    tables = (aligned(table, range(1, len(table[0]))) for table in (lines, counts))
    return "\n\n".join((head, *tables)) + "\n"


# The models.


class PretrainedClassifier(Pretrained):
    """A ``transformers`` classifier with loss sums.

    Attributes:
        names: Names of the classes.
        head_is_new: Whether the classification head was drawn rather than loaded.
    """

    def __init__(
        self,
        model: Any,
        names: Sequence[str],
        label_smoothing: float = 0.0,
        head_is_new: bool = False,
    ) -> None:
        super().__init__(model)
        self.names = tuple(names)
        self.label_smoothing = label_smoothing
        self.head_is_new = head_is_new

    def logits(self, batch: ClassifierBatch) -> Tensor:
        """Compute logits ``(B, C)`` in fp32; the batch's labels are ignored."""
        ids_BT, mask_BT = batch[:2]
        out: Tensor = self.model(input_ids=ids_BT, attention_mask=mask_BT.long()).logits
        return out.float()

    def loss_sum(self, batch: ClassifierBatch) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy and the number of labels that count, fp32 scalars.

        Targets are smoothed in training only.

        **Source:** Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016, section 7.
        """
        logits_BC, labels_B = self.logits(batch), batch[2]
        loss = functional.cross_entropy(
            logits_BC,
            labels_B,
            reduction="sum",
            label_smoothing=self.label_smoothing if self.training else 0.0,
        )
        return loss, (labels_B != IGNORE_INDEX).sum().to(loss.dtype)

    def read_back(self, folder: Path) -> dict[str, Tensor]:
        """Read the weights, with a head of the folder's own."""
        return dict(open_classifier(folder, None).named_parameters())


def open_classifier(
    source: str | os.PathLike[str],
    names: Sequence[str] | None,
    *,
    label_smoothing: float = 0.0,
    seed: int = 0,
    mapped: bool = False,
) -> PretrainedClassifier:
    """Load a pretrained encoder with a head for these classes, in fp32 on the CPU, in train mode.

    The head is the folder's own if its ``id2label`` equals ``names`` in order (None: whatever the
    folder says); otherwise it is drawn from ``seed``. For ``mapped`` see :func:`open_folder`.

    Raises:
        ConfigError: If the source or the architecture cannot be used.
        CheckpointError: If the folder is damaged or lacks weights of the encoder.
    """
    folder = open_folder(source, mapped=mapped)
    own = [name for _, name in sorted(folder.config.id2label.items())]
    names = own if names is None else list(names)
    _name_classes(folder.config, names)
    model, drawn = folder.build(
        "AutoModelForSequenceClassification",
        torch.float32,
        head="kept" if names == own else "new",
        seed=seed,
    )
    is_new = any(".pooler." not in name for name in drawn)
    return PretrainedClassifier(model, names, label_smoothing, is_new)


def _name_classes(config: Any, names: Sequence[str]) -> None:
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "single_label_classification"


# From scratch.


SCRATCH = "scratch:"
"""Prefix of the names of models that are made from scratch, not loaded."""


SIZES = {"tiny": (2, 2, 64, 2048), "small": (2, 4, 128, 4608), "base": (6, 8, 512, 8192)}
"""Layers, heads and width (0.2, 1.0 and 23 million parameters), and the most ids of the tokenizer.

Other settings are the defaults of ``BertConfig``.

**Source:** docs/decisions/0014-scratch-classifier.md.
"""
_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
"""BERT's special tokens; in this order they get the ids 0 to 3."""
_SPACE = "▁"
"""The library's character for a space, which makes the space a part of the word after it."""


def scratch_size(source: str) -> tuple[int, int, int, int]:
    """Return the entry of ``SIZES`` that ``scratch:NAME`` names, or raise ConfigError."""
    name = source.removeprefix(SCRATCH)
    if name not in SIZES:
        allowed = ", ".join(SCRATCH + known for known in SIZES)
        raise ConfigError(f"there is no model {source!r}. Allowed: {allowed}")
    return SIZES[name]


def make_classifier(
    size: tuple[int, int, int, int],
    names: Sequence[str],
    *,
    vocab_size: int,
    max_length: int,
    label_smoothing: float = 0.0,
    seed: int = 0,
) -> PretrainedClassifier:
    """Make a BERT classifier in fp32 on the CPU, in training mode, with weights from ``seed``.

    ``max_length`` is the number of positions. The other arguments are those of
    :func:`open_classifier`.
    """
    transformers = import_module("transformers")
    layers, heads, width, _ = size
    config = transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max_length,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    _name_classes(config, names)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config)
    return PretrainedClassifier(model, names, label_smoothing)


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int) -> PretrainedTokenizer:
    """Train a tokenizer of at most ``vocab_size`` ids on the texts, the same on every machine.

    Width and case of letters are folded (NFKC, lowercase). All characters become ids or, if there
    are too many, the most frequent ones (ties: lower code points first). Then pairs are merged
    (BPE) within words, which are separated by spaces, so that a Chinese phrase is one word. Text is
    always data: ``[CLS]`` inside a text never becomes the special id.

    **Source:** Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL
    2016.
    """
    special = list(_SPECIAL.values())
    engine = Tokenizer(models.BPE(unk_token=_SPECIAL["unk_token"]))
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # The space before a word distinguishes it from the same letters inside of another word.
    engine.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never")
    # Select the alphabet here, as the library breaks ties at the limit by the order of a hash map.
    # A character in the initial alphabet counts as more frequent than any other.
    alphabet = _most_frequent(texts, engine.normalizer, max(vocab_size - len(special), 1))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once says nothing about other texts
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer=trainer)
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=engine,
        model_max_length=max_length,
        split_special_tokens=True,
        **_SPECIAL,
    )
    return PretrainedTokenizer(tokenizer, max_length)


def _most_frequent(texts: Iterable[str], normalizer: Any, limit: int) -> list[str]:
    """Return the most frequent characters of normalized texts; equal counts by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    if " " in counts:
        counts[_SPACE] += counts.pop(" ")
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]
