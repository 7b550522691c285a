"""Measures the validation loss in the training precision, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from halfstep.errors import DataError
from halfstep.precision.casting.cast import keeping_casts
from halfstep.trainer.data.token_file import TokenFile
from halfstep.trainer.step import Batch, LossSum, to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of one evaluation.

    Attributes:
        loss: Mean negative log-likelihood in nats per target (a token, or a classifier's example).
        targets: Number of targets that the loss is the mean of.
        score: The value compared to find the best evaluation; higher is better.
        text: The result as a line of text for the user.
        bits_per_byte: The loss in bits per UTF-8 byte of text: comparable between tokenizers. None
            where the bytes behind the tokens are not known.
        accuracy: Share of examples whose class was predicted; None where there are no classes.
        macro_f1: Unweighted mean of the F1 score of each class.
        confusion: Number of examples by true class (row) and predicted class (column); may be ().
        measures: Further values that the user's own function measured, by name.
    """

    loss: float
    targets: int
    score: float
    text: str
    bits_per_byte: float | None = None
    accuracy: float | None = None
    macro_f1: float | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judge:
    """How a rank evaluates: its share of the rows, its precision, and how ranks are summed."""

    loss_sum: LossSum
    """The model's loss, compiled where asked."""
    around: Callable[[], AbstractContextManager[None]]
    """Returns the context manager of a forward pass in the training precision."""
    device: torch.device
    rank: int = 0
    """This rank's index among the ranks that have different rows."""
    ranks: int = 1
    sum: Callable[[Sequence[float]], list[float]] = list
    """Sums each value over the ranks in fp64; every rank gets the same result."""


def perplexity(loss: float) -> float:
    """Return the exponential of a loss in nats per token; infinity where fp64 overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def tokens_per_byte(tokens: TokenFile) -> float:
    """Return the tokens per UTF-8 byte of a file's text."""
    return tokens.count / tokens.text_bytes


@torch.no_grad()
def mean_loss(batches: Iterable[Batch], judge: Judge) -> tuple[float, int]:
    """Return the mean loss over all ranks' batches, and the number of targets in it.

    The model must be in evaluation mode already. Sums are kept in fp64 on the host.

    Raises:
        DataError: If there is no target at all.
    """
    total = count = 0.0
    with keeping_casts(judge.device):
        for batch in batches:
            with judge.around():
                loss, n = judge.loss_sum(to_device(batch, judge.device))
            total += float(loss)
            count += float(n)
    total, count = judge.sum([total, count])
    if not count:
        raise DataError("the validation data has no target token; give more data with --val-data")
    return total / count, round(count)


def evaluate(batches: Iterable[Batch], judge: Judge, density: float | None = None) -> Evaluation:
    """Measure the loss per token, and per byte where ``density``, tokens per byte, is known.

    Raises:
        DataError: If there is no target at all.
    """
    loss, targets = mean_loss(batches, judge)
    bits = None if density is None else loss / math.log(2) * density
    suffix = "" if bits is None else f", {bits:.4f} bits per byte"
    text = f"validation loss {loss:.4f} nats per token{suffix}"
    return Evaluation(loss=loss, targets=targets, score=-loss, text=text, bits_per_byte=bits)
