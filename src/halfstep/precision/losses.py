"""Losses in fp32 where a model computes its own, as Hugging Face's do when they get ``labels``.

Logits leave a model with 16-bit weights as fp32, so a loss computed from them is in fp32. One that
the model computes inside is not: in bf16 it has 8 bits, the softmax behind its gradients as few,
and in fp16 the first thing that its backward does is to round the loss scale itself to fp16, where
65536 is infinite. Under ``torch.autocast`` these functions run in fp32 on every device; here they
do so too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Source: torch.nn.functional's documentation, section "Loss functions", all of them but
# linear_cross_entropy, which holds a product as well.
LOSSES: frozenset[Callable[..., Any]] = frozenset(
    {
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.cosine_embedding_loss,
        F.cross_entropy,
        F.ctc_loss,
        F.gaussian_nll_loss,
        F.hinge_embedding_loss,
        F.huber_loss,
        F.kl_div,
        F.l1_loss,
        F.margin_ranking_loss,
        F.mse_loss,
        F.multi_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.nll_loss,
        F.poisson_nll_loss,
        F.smooth_l1_loss,
        F.soft_margin_loss,
        F.triplet_margin_loss,
        F.triplet_margin_with_distance_loss,
    }
)


class LossesInFp32(TorchFunctionMode):
    """A context in which torch's loss functions get 16-bit arguments as fp32, and return fp32.

    All else runs as written. Thread-local, and re-entrant; enter a new one each time. Every call of
    a torch function costs some microseconds more of the host inside it. ``torch.compile`` traces it
    away, with one gap: ``torch.nn.CrossEntropyLoss(...)`` made inside of the traced forward is
    replaced by dynamo before any context sees it, and stays in 16 bits.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            args = tuple(_wide(value) for value in args)
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
