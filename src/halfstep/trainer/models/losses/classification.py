"""The loss of a classifier, as a sum and what it is divided by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from halfstep.errors import ConfigError

IGNORED_LABEL = -1
"""Label of a row that does not count: it only fills a batch."""


def class_weights_tensor(weights: Sequence[float] | None, labels: Sequence[str]) -> Tensor | None:
    """Class weights as an fp32 tensor on the default device; None stays None.

    Raises:
        ConfigError: Not one positive finite number a class.
    """
    if weights is None:
        return None
    if len(weights) != len(labels) or not all(0.0 < w < math.inf for w in weights):
        raise ConfigError(
            f"class_weights must be {len(labels)} positive numbers, one for each of "
            f"{', '.join(labels)}; got {list(weights)!r}"
        )
    return torch.tensor(list(weights), dtype=torch.float32)


def classification_loss(
    logits_BC: Tensor,
    labels_B: Tensor,
    class_weights_C: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy, summed, and the weights it is to be divided by, summed; in fp32 at least.

    Of several batches, sums divided by sums are the loss of one batch with all their rows, however
    the rows were shared between ranks and micro-batches.

    Args:
        logits_BC: (B, C), any floating dtype.
        labels_B: (B,) int64, 0 to C - 1, or -1 for rows that do not count.
        class_weights_C: (C,) weight of each class; None: 1.
        label_smoothing: Share of the target spread evenly over all classes.

    Returns:
        Two scalars.

    **Source:** smoothing: Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016,
    section 7; weights as in ``torch.nn.CrossEntropyLoss``.
    """
    logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    if class_weights_C is not None:
        class_weights_C = class_weights_C.to(logits_BC.dtype)
    loss = functional.cross_entropy(
        logits_BC,
        labels_B,
        class_weights_C,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    counted = labels_B != IGNORED_LABEL
    if class_weights_C is None:
        return loss, counted.sum().to(loss.dtype)
    weights_B = class_weights_C[labels_B.clamp(min=0)]
    return loss, torch.where(counted, weights_B, 0.0).sum()
