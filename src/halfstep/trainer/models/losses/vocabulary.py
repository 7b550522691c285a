"""What a head and its loss must know of where the vocabulary's rows are: here, or on many ranks.

Shapes: R tokens of one chunk, D model width, V vocabulary (of a rank that holds a part, its part).
"""

from __future__ import annotations

import torch


class Vocabulary:
    """How the rows of an embedding table lie: all of them here, and there is nobody to ask.

    Tensor parallelism puts an object with the same methods in its place, whose rows lie on many
    ranks (``halfstep.distributed.tensor.styles``); all ranks then call the same methods in the same
    order.
    """

    def local(self, weight_VD: torch.Tensor) -> torch.Tensor:
        """The rows that are here, of the table as it is stored; differentiable."""
        return weight_VD

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states for the product with these rows: gradients are summed over ranks."""
        return x

    def gather(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Logits of the whole vocabulary, ``(..., V)``, of those that are here; differentiable."""
        return logits_V

    def columns(self, vocab: int) -> int:
        """The most rows that any rank holds of a vocabulary of ``vocab``."""
        return vocab

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' values, element by element."""
        return value

    def log_softmax(
        self, logits_RV: torch.Tensor, target_R1: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities over the whole vocabulary, ``(R, V)`` here, and of the targets.

        Args:
            logits_RV: ``(R, V)`` of the rows that are here.
            target_R1: ``(R, 1)`` int64, ids in the whole vocabulary.
            dtype: To compute in.

        Returns:
            ``(R, V)`` and, of the targets, ``(R, 1)``, in nats.

        Raises:
            RuntimeError: A target is out of range, on CPU, on every rank.
        """
        log_p_RV = torch.log_softmax(logits_RV, dim=1, dtype=dtype)
        return log_p_RV, log_p_RV.gather(1, target_R1)

    def put_(self, error_RV: torch.Tensor, target_R1: torch.Tensor, value_R1: torch.Tensor) -> None:
        """Sets ``error_RV[r, target_R1[r]] = value_R1[r]`` where that column is here."""
        error_RV.scatter_(1, target_R1, value_R1)


WHOLE = Vocabulary()
"""It has no state, so one serves all."""
