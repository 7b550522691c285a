"""The validation loss, in the training precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from halfstep.data.token_file import TokenFile
from halfstep.errors import DataError
from halfstep.training.step import Batch, LossSum, to_device


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A validation result.

    Attributes:
        loss: Mean negative log-likelihood, in nats per token.
        tokens: Target tokens it was measured on.
        bits_per_byte: The loss in bits per UTF-8 byte of text: comparable between tokenizers. None
            where the bytes behind the tokens are not known.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None


def tokens_per_byte(tokens: TokenFile) -> float | None:
    """How many tokens a byte of the file's text takes; None where the text is not known."""
    return tokens.count / tokens.text_bytes if tokens.text_bytes else None


@torch.no_grad()
def evaluate(
    loss_sum: LossSum,
    batches: Iterable[Batch],
    around: Callable[[], AbstractContextManager[None]],
    device: torch.device,
    density: float | None = None,
    over_ranks: Callable[[Sequence[float]], list[float]] = list,
) -> Evaluation:
    """Measure the mean loss over batches; every counted target once.

    The model must be in evaluation mode already. Sums are kept in fp64 on the host.

    Args:
        loss_sum: Gives the summed loss and the count of a batch.
        batches: Tokens and targets, int64 (B, T).
        around: Gives the context of a forward pass in the training precision.
        device: Where the model is.
        density: Tokens per byte of text, for bits per byte; None if unknown.
        over_ranks: Adds up sums over the ranks that share the batches.

    Raises:
        DataError: If there is no target at all.
    """
    total = count = 0.0
    for batch in batches:
        with around():
            loss, n = loss_sum(to_device(batch, device))
        total += float(loss)
        count += int(n)
    total, count = over_ranks([total, count])
    if not count:
        raise DataError("the validation data has no target token; give more data with --val-data")
    loss_mean = total / count
    bits = None if density is None else loss_mean / math.log(2) * density
    return Evaluation(loss_mean, int(count), bits)
