"""What a head and its loss must know of where the vocabulary's rows are: here, or on many ranks.

Shapes: R tokens of one chunk, D model width, V vocabulary (of a rank that holds a part, its part).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Vocabulary(Protocol):
    """How the rows of an embedding table lie. All ranks call the same methods in the same order."""

    def local(self, weight_VD: torch.Tensor) -> torch.Tensor:
        """The rows that are here, of the table as it is stored; differentiable."""

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states for the product with these rows: gradients are summed over ranks."""

    def gather(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Logits of the whole vocabulary, ``(..., V)``, of those that are here; differentiable."""

    def columns(self, vocab: int) -> int:
        """The most rows that any rank holds of a vocabulary of ``vocab``."""

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' values, element by element."""

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

    def put_(self, error_RV: torch.Tensor, target_R1: torch.Tensor, value_R1: torch.Tensor) -> None:
        """Sets ``error_RV[r, target_R1[r]] = value_R1[r]`` where that column is here."""


class WholeVocabulary:
    """The null object: all rows are here, and there is nobody to ask."""

    def local(self, weight_VD: torch.Tensor) -> torch.Tensor:
        """All rows of the table, as they are."""
        return weight_VD

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as it is: no other rank's gradient is to be added."""
        return x

    def gather(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The logits as they are: every column is here."""
        return logits_V

    def columns(self, vocab: int) -> int:
        """How many columns are here: all of the vocabulary."""
        return vocab

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The value as it is: no other rank has a larger one."""
        return value

    def log_softmax(
        self, logits_RV: torch.Tensor, target_R1: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the protocol says, by ``torch.log_softmax``."""
        log_p_RV = torch.log_softmax(logits_RV, dim=1, dtype=dtype)
        return log_p_RV, log_p_RV.gather(1, target_R1)

    def put_(self, error_RV: torch.Tensor, target_R1: torch.Tensor, value_R1: torch.Tensor) -> None:
        """As the protocol says."""
        error_RV.scatter_(1, target_R1, value_R1)


WHOLE = WholeVocabulary()
"""It has no state, so one serves all."""
