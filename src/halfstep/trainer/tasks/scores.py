"""Scores a classifier on every example once: loss, accuracy, F1 and the confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from halfstep.precision.scaling.gradients import in_fp64
from halfstep.shown import aligned
from halfstep.trainer.data.batches import Examples, evaluation_shares, padded
from halfstep.trainer.models.classifier import IGNORED_LABEL
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
    """Measure loss (unsmoothed) and confusion over the batches of all ranks.

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
    with judge.around():
        for batch in batches:
            *_, labels_B = here = to_device(batch, judge.device)
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


# Reports from a confusion matrix: the number of examples by true class (row) and predicted class
# (column). A ratio 0 / 0 is 0, as in scikit-learn's classification_report with zero_division=0.


def class_scores(confusion: Sequence[Sequence[int]]) -> list[dict[str, float]]:
    """Compute precision, recall, F1 and support (number of examples) of each class.

    **Source:** van Rijsbergen, "Information Retrieval", 1979, chapter 7.
    """
    scores = []
    for number, row in enumerate(confusion):
        hits, support = row[number], sum(row)
        predicted = sum(other[number] for other in confusion)
        scores.append(
            {
                "precision": _ratio(hits, predicted),
                "recall": _ratio(hits, support),
                "f1": _ratio(2 * hits, predicted + support),
                "support": support,
            }
        )
    return scores


def accuracy(confusion: Sequence[Sequence[int]]) -> float:
    """Return the share of all examples whose class was predicted."""
    hits = sum(row[number] for number, row in enumerate(confusion))
    return _ratio(hits, sum(map(sum, confusion)))


def macro_f1(confusion: Sequence[Sequence[int]]) -> float:
    """Return the unweighted mean of the F1 score of each class."""
    return sum(score["f1"] for score in class_scores(confusion)) / len(confusion)


def report_table(confusion: Sequence[Sequence[int]], labels: Sequence[str]) -> str:
    """Format the scores of all classes, and the confusion matrix, as text in columns."""
    scores = class_scores(confusion)
    supports = [score["support"] for score in scores]
    total = sum(supports)
    lines = [["", "precision", "recall", "F1", "examples"]]
    keys = ("precision", "recall", "f1")
    for label, score in zip(labels, scores, strict=True):
        lines.append([label, *(f"{score[key]:.4f}" for key in keys), str(score["support"])])
    for name, weights in (("macro mean", [1.0] * len(scores)), ("weighted mean", supports)):
        sums = (sum(w * s[key] for w, s in zip(weights, scores, strict=True)) for key in keys)
        means = [f"{_ratio(value, sum(weights)):.4f}" for value in sums]
        lines.append([name, *means, str(total)])
    counts = [["actual \\ predicted", *labels]]
    counts += [[label, *map(str, row)] for label, row in zip(labels, confusion, strict=True)]
    head = f"accuracy {accuracy(confusion):.4f} on {total} examples"
    tables = (aligned(table, range(1, len(table[0]))) for table in (lines, counts))
    return "\n\n".join((head, *tables)) + "\n"


def report_values(confusion: Sequence[Sequence[int]], labels: Sequence[str]) -> dict[str, Any]:
    """Return what :func:`report_table` shows as plain values, for JSON."""
    scores = zip(labels, class_scores(confusion), strict=True)
    return {
        "accuracy": accuracy(confusion),
        "macro_f1": macro_f1(confusion),
        "classes": [{"label": label, **score} for label, score in scores],
        "labels": list(labels),
        "confusion": [list(row) for row in confusion],
    }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
