"""A vocabulary whose rows are spread over the ranks of the tensor axis: lookup, logits and loss.

Every rank holds the hidden states of all tokens and the table's rows of its own words. It meets the
others in numbers per token, never in logits: the largest logit, the sum of exponentials and the
target's log-probability.

Shapes: N tokens, R tokens of one chunk, D model width, V vocabulary (on this rank, its part).

**Source:** Shoeybi et al. 2019, "Megatron-LM", §3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from halfstep.distributed.regions import (
    copy_to,
    gather_replicated,
    max_over_ranks,
    sum_over_ranks,
)
from halfstep.errors import ConfigError


class ShardedVocabulary:
    """The rows ``[start, end)`` of a table of ``size`` rows are here, as ``torch.chunk`` cuts them.

    It stands in the place of the models' ``WholeVocabulary`` and has its methods.
    """

    def __init__(self, size: int, mesh: DeviceMesh) -> None:
        """Finds this rank's rows.

        Args:
            size: V of the whole table.
            mesh: The tensor axis.

        Raises:
            ConfigError: Some rank would have no row.
        """
        self.size = size
        self.mesh = mesh
        self.largest_part = -(-size // mesh.size())
        filled = -(-size // self.largest_part)
        if filled < mesh.size():
            raise ConfigError(
                f"a vocabulary of {size} rows makes {filled} parts of up to {self.largest_part}, "
                f"which leaves {mesh.size() - filled} of {mesh.size()} tensor-parallel ranks "
                f"without any: take tensor={filled}, or a larger vocabulary"
            )
        self.start = mesh.get_local_rank() * self.largest_part
        self.end = min(self.start + self.largest_part, size)

    def index(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens stand among this rank's rows.

        Args:
            tokens: Ids, int64, any shape.

        Returns:
            The row, 0 for a token of another rank; and whether it is of another rank. An id that is
            in nobody's part stays out of range on every rank, so that all of them fail on it as one
            device does.
        """
        elsewhere = ((tokens >= 0) & (tokens < self.start)) | (
            (tokens >= self.end) & (tokens < self.size)
        )
        return (tokens - self.start).masked_fill(elsewhere, 0), elsewhere

    def local(self, weight_VD: Tensor) -> Tensor:
        """This rank's rows of a table that is stored as DTensor."""
        assert isinstance(weight_VD, DTensor), "a sharded vocabulary has a sharded table"
        rows_VD: Tensor = weight_VD.to_local(grad_placements=weight_VD.placements)
        return rows_VD

    def share(self, x: Tensor) -> Tensor:
        """Hidden states as every rank's head takes them; their gradients are summed over ranks."""
        return copy_to(x, self.mesh)

    def gather(self, logits_V: Tensor) -> Tensor:
        """All logits ``(..., V)`` of every rank's own."""
        return gather_replicated(logits_V, self.mesh, -1, self.size)

    def columns(self, vocab: int) -> int:
        """The most columns that one rank's logits have."""
        return self.largest_part

    def largest(self, value: Tensor) -> Tensor:
        """The largest of the ranks' values."""
        return max_over_ranks(value, self.mesh)

    def log_softmax(
        self, logits_RV: Tensor, target_R1: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of this rank's words, and of the targets wherever they are.

        Args:
            logits_RV: ``(R, V)``, of this rank's words; used up.
            target_R1: ``(R, 1)`` int64, of the whole vocabulary.
            dtype: To compute in.

        Returns:
            ``(R, V)`` and ``(R, 1)`` in ``dtype``, in nats; the second is the same on all ranks.
            A NaN in any rank's logits makes the row NaN on all: its exponential is in the sum.
        """
        z_RV = logits_RV.to(dtype)
        z_RV -= max_over_ranks(z_RV.amax(dim=1, keepdim=True), self.mesh)
        row_R1, elsewhere_R1 = self.index(target_R1)
        z_target_R1 = z_RV.gather(1, row_R1).masked_fill(elsewhere_R1, 0)
        sums_R2 = torch.cat((z_RV.exp().sum(dim=1, keepdim=True), z_target_R1), dim=1)
        sum_R1, z_target_R1 = sum_over_ranks(sums_R2, self.mesh).tensor_split(2, dim=1)
        log_sum_R1 = sum_R1.log()
        return z_RV.sub_(log_sum_R1), z_target_R1 - log_sum_R1

    def put_(self, error_RV: Tensor, target_R1: Tensor, value_R1: Tensor) -> None:
        """Sets the targets' columns where they are here; other rows stay as they are."""
        row_R1, elsewhere_R1 = self.index(target_R1)
        kept_R1 = torch.where(elsewhere_R1, error_RV.gather(1, row_R1), value_R1)
        error_RV.scatter_(1, row_R1, kept_R1)
