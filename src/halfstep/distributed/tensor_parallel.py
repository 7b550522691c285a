"""Tensor parallel, with or without copies: ranks share every matrix product."""

from __future__ import annotations

import torch
from torch import nn

from halfstep.distributed.data_parallel import DataParallel
from halfstep.distributed.layout import Layout
from halfstep.distributed.parallelize import parallelize_
from halfstep.distributed.plan import ParallelPlan
from halfstep.errors import ConfigError
from halfstep.precision.policy import PrecisionPolicy


class TensorParallel(DataParallel):
    """The ``tensor`` axis splits matrices, the ``data`` axis the batch."""

    def __init__(
        self,
        layout: str | Layout,
        policy: str | PrecisionPolicy,
        device: str | torch.device,
        sequence_parallel: bool = False,
    ) -> None:
        """As the parent; ``sequence_parallel`` splits residual streams between tensor ranks too."""
        super().__init__(layout, policy, device)
        self._sequence_parallel = sequence_parallel

    def shard_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Split the model as its plan says.

        Raises:
            ConfigError: If it has no plan, or its sizes cannot be split so.
        """
        if not plan.tensor:
            raise ConfigError(
                f"parallel={self.layout}: {type(model).__name__} has no tensor-parallel plan; use "
                f"data={self.layout.size} or shard={self.layout.size}, or give it "
                "ParallelPlan(tensor={'module name': 'colwise' | 'rowwise' | 'replicate' | "
                "'vocab'}) with a style for every module that owns parameters"
            )
        assert self.mesh is not None
        parallelize_(
            model, plan.tensor, self.mesh["tensor"], sequence_parallel=self._sequence_parallel
        )
