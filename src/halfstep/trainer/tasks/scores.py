"""Scores a classifier on every example once: loss, accuracy, F1 and the confusion matrix."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.cells import cell_len
from torch.nn import functional

from halfstep.files import write_whole
from halfstep.precision.casting.cast import keeping_casts
from halfstep.precision.scaling.gradients import in_fp64
from halfstep.trainer.data.batches import Examples, evaluation_shares, padded
from halfstep.trainer.models.pretrained.classifier import IGNORED_LABEL
from halfstep.trainer.step import Batch, Evaluation, Judge, to_device


def example_batches(
    examples: Examples, batch_size: int, pad_id: int, most: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Yield a rank's batches, as :func:`evaluation_shares` deals them."""
    for indices, counts in evaluation_shares(examples.lengths, batch_size, most, rank, ranks):
        ids_BT, mask_BT, labels_B = padded(examples, indices, pad_id)
        if not counts:
            labels_B = torch.full_like(labels_B, IGNORED_LABEL)
        yield ids_BT, mask_BT, labels_B


@torch.no_grad()
def classifier_scores(
    model: Any, batches: Iterable[Batch], labels: Sequence[str], judge: Judge, best_by: str = ""
) -> Evaluation:
    """Measure loss (unsmoothed, unweighted) and confusion over the batches of all ranks.

    Args:
        model: A ``PretrainedClassifier`` in evaluation mode.
        batches: This rank's batches, from :func:`example_batches`.
        labels: Names of the classes.
        judge: How a rank evaluates.
        best_by: The measure used as score: ``accuracy`` (also if empty), ``macro_f1`` or ``loss``.
    """
    size = len(labels)
    confusion = torch.zeros(size * size, dtype=torch.float64)
    total = 0.0
    with keeping_casts(judge.device):
        for batch in batches:
            *_, labels_B = here = to_device(batch, judge.device)
            with judge.around():
                logits_BC = model.logits(here)
            losses_B = functional.cross_entropy(
                logits_BC.float(), labels_B, ignore_index=IGNORED_LABEL, reduction="none"
            )
            total += float(in_fp64(losses_B).sum())
            counted = labels_B != IGNORED_LABEL
            cells = labels_B[counted] * size + logits_BC.argmax(dim=-1)[counted]
            confusion += torch.bincount(cells, minlength=size * size).cpu()
    total, *cells_of_all = judge.sum([total, *confusion.tolist()])
    counts = [round(cell) for cell in cells_of_all]
    rows = tuple(tuple(counts[i * size : (i + 1) * size]) for i in range(size))
    examples = sum(counts)
    loss, right, f1 = total / examples, accuracy(rows), macro_f1(rows)
    if not math.isfinite(loss):  # give no accuracy: the argmax of NaNs would count as class 0
        text = f"validation loss {loss}: the model's outputs are not finite"
        return Evaluation(loss=loss, targets=examples, score=math.nan, text=text)
    return Evaluation(
        loss=loss,
        targets=examples,
        score={"accuracy": right, "macro_f1": f1, "loss": -loss}[best_by or "accuracy"],
        text=f"validation loss {loss:.4f}, accuracy {right:.4f}, macro F1 {f1:.4f} on {examples:,} "
        "examples",
        accuracy=right,
        macro_f1=f1,
        confusion=rows,
    )


# Reports from a confusion matrix, as text and JSON.


Confusion = Sequence[Sequence[int]]
"""Number of examples by true class (row) and predicted class (column)."""


@dataclass(frozen=True, slots=True)
class ClassScore:
    """How well one class is predicted; a ratio 0 / 0 counts as 0."""

    label: str
    precision: float
    """Share of the examples predicted as this class that belong to it."""
    recall: float
    """Share of this class's examples that were predicted as it."""
    f1: float
    """Harmonic mean of precision and recall."""
    support: int
    """Number of examples of the class."""


def class_scores(confusion: Confusion, labels: Sequence[str]) -> list[ClassScore]:
    """Compute precision, recall and F1 of each class.

    **Source:** van Rijsbergen, "Information Retrieval", 1979, chapter 7; a ratio 0 / 0 is 0, as in
    scikit-learn's ``classification_report`` with ``zero_division=0``.
    """
    scores = []
    for number, label in enumerate(labels):
        hits = confusion[number][number]
        support = sum(confusion[number])
        found = sum(row[number] for row in confusion)
        precision, recall = _ratio(hits, found), _ratio(hits, support)
        f1 = _ratio(2 * hits, found + support)
        scores.append(ClassScore(label, precision, recall, f1, support))
    return scores


def accuracy(confusion: Confusion) -> float:
    """Return the share of all examples whose class was predicted."""
    hits = sum(row[number] for number, row in enumerate(confusion))
    return _ratio(hits, sum(map(sum, confusion)))


def macro_f1(confusion: Confusion) -> float:
    """Return the unweighted mean of the F1 score of each class."""
    scores = class_scores(confusion, [""] * len(confusion))
    return sum(score.f1 for score in scores) / len(scores)


def report_table(confusion: Confusion, labels: Sequence[str]) -> str:
    """Format the scores of all classes, and the confusion matrix, as text in columns."""
    labels = list(map(_printable, labels))
    scores = class_scores(confusion, labels)
    total = sum(score.support for score in scores)
    lines: list[tuple[str, ...]] = [("", "precision", "recall", "F1", "examples")]
    for score in scores:
        lines.append(
            (score.label, *_cells(score.precision, score.recall, score.f1), str(score.support))
        )
    for name, weights in (
        ("macro mean", [1.0] * len(scores)),
        ("weighted mean", [float(score.support) for score in scores]),
    ):
        means = [
            _ratio(
                sum(w * getattr(s, key) for w, s in zip(weights, scores, strict=True)), sum(weights)
            )
            for key in ("precision", "recall", "f1")
        ]
        lines.append((name, *_cells(*means), str(total)))
    counts = [("true \\ found", *labels)]
    counts += [(label, *map(str, row)) for label, row in zip(labels, confusion, strict=True)]
    head = f"accuracy {accuracy(confusion):.4f} on {total} examples"
    return "\n\n".join((head, _columns(lines), _columns(counts))) + "\n"


def report_values(confusion: Confusion, labels: Sequence[str]) -> dict[str, Any]:
    """Return what :func:`report_table` shows as plain values, for JSON."""
    return {
        "accuracy": accuracy(confusion),
        "macro_f1": macro_f1(confusion),
        "classes": [asdict(score) for score in class_scores(confusion, labels)],
        "labels": list(labels),
        "confusion": [list(row) for row in confusion],
    }


def write_report(
    folder: Path, confusion: Confusion, labels: Sequence[str], about: dict[str, Any]
) -> None:
    """Write report.txt and report.json.

    Args:
        folder: An existing folder; files of these names are replaced atomically.
        confusion: The confusion matrix.
        labels: Names of its classes.
        about: Further values for report.json, such as step and loss; NaN and inf become null.
    """
    odd = {k: None for k, v in about.items() if isinstance(v, float) and not math.isfinite(v)}
    values = {**about, **odd, **report_values(confusion, labels)}
    write_whole(folder / "report.txt", report_table(confusion, labels))
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder / "report.json", f"{text}\n")


def _cells(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:.4f}" for value in values)


def _columns(lines: Sequence[Sequence[str]]) -> str:
    """Align text in columns: the first left, the others right; wide characters count as two."""
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        gaps = [" " * (w - cell_len(cell)) for w, cell in zip(widths, line, strict=True)]
        numbers = [gap + cell for gap, cell in zip(gaps[1:], line[1:], strict=True)]
        texts.append("  ".join([line[0] + gaps[0], *numbers]).rstrip())
    return "\n".join(texts)


def _printable(label: str) -> str:
    """Escape tabs, line ends and other control characters, so that a label stays on one line."""
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else repr(c)[1:-1] for c in label
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
