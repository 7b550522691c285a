"""How good a classifier is: its loss and which classes it takes for which, every example once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from halfstep.data.examples import Examples, padded
from halfstep.data.length_batches import evaluation_shares
from halfstep.models.classification_loss import IGNORED_LABEL
from halfstep.training.classification_report import accuracy, macro_f1
from halfstep.training.evaluate import Evaluation, Judge
from halfstep.training.step import Batch, to_device


def example_batches(
    examples: Examples, batch_size: int, pad_id: int, most: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """A rank's batches without dropout, as :func:`evaluation_shares` deals them."""
    for indices, counts in evaluation_shares(examples.lengths, batch_size, most, rank, ranks):
        ids_BT, mask_BT, labels_B = padded(examples, indices, pad_id)
        if not counts:
            labels_B = torch.full_like(labels_B, IGNORED_LABEL)
        yield ids_BT, mask_BT, labels_B, torch.full_like(labels_B, -1)


@torch.no_grad()
def classifier_scores(
    model: Any, batches: Iterable[Batch], labels: Sequence[str], judge: Judge, best_by: str = ""
) -> Evaluation:
    """Loss without smoothing or weights, and confusion, over the batches of all ranks.

    Args:
        model: A classifier of ours, in evaluation mode.
        batches: This rank's, as of :func:`example_batches`.
        labels: Names of the classes.
        judge: How a rank evaluates.
        best_by: ``accuracy``, which empty means, ``macro_f1`` or ``loss``: what the score is.
    """
    size = len(labels)
    confusion = torch.zeros(size * size, dtype=torch.float64)
    total = 0.0
    for batch in batches:
        *_, labels_B, _ = here = to_device(batch, judge.device)
        with judge.around():
            logits_BC = model.logits(here)
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
    return Evaluation(
        loss=loss,
        targets=examples,
        score={"accuracy": right, "macro_f1": f1, "loss": -loss}[best_by or "accuracy"],
        text=f"validation loss {loss:.4f}, accuracy {right:.4f}, macro F1 {f1:.4f} on "
        f"{examples:,} examples",
        accuracy=right,
        macro_f1=f1,
        confusion=rows,
    )
