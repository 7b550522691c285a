"""A loss scaler whose ranks step together or not at all, and keep one scale.

Ranks of plain replicas, DDP, FSDP2 and tensor parallelism each see gradients of their own: parts of
one tensor, or what a hook or a fault has changed on one of them. torch's scaler lets each decide
by its own; one that skips and one that steps then have different weights and different scales for
good. Here the flag of every optimizer is the MAX over ranks, in one small collective beside the
check, and no host waits for it that would not wait anyway.

**Source:** Megatron-Core reduces ``found_inf`` with MAX over all model-parallel ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.integrations.local_gradients import (
    LocalGradients,
    flag_of,
    kinds,
    stepping,
)
from halfstep.integrations.recording_scaler import RecordingScaler
from halfstep.integrations.step_record import on_host
from halfstep.precision.ranks import OneRank, Ranks, ranks_of_this_process


class AgreeingScaler(RecordingScaler):
    """:class:`RecordingScaler` over ranks; alone, or with ``OneRank()``, it is nothing more."""

    def __init__(self, *args: Any, ranks: Ranks | None = None) -> None:
        super().__init__(*args)
        self._ranks = ranks

    def _agreeing(self, device: torch.device) -> Ranks:
        return ranks_of_this_process(device) if self._ranks is None else self._ranks

    def _gradients_of(self, optimizer: Optimizer) -> Any:
        found = kinds(optimizer)
        alone = isinstance(self._agreeing(torch.device(self._device)), OneRank)
        torchs = found <= {"plain"} or (alone and found == {"sharded"})
        return optimizer if torchs else LocalGradients(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        ranks = self._agreeing(found_inf.device)
        if isinstance(ranks, OneRank):
            return flags
        none = found_inf.new_ones(()) if not flags else found_inf.new_zeros(())
        found = flag_of(flags, found_inf.device) if flags else found_inf.new_zeros(())
        marks = torch.stack([found, none])
        ranks.worst_(marks)
        if flags and on_host(marks) and marks[1].item():
            raise PrecisionError(
                "another rank's optimizer has no gradient in this step, so none steps; every rank "
                "must use the model in each step, or pass ranks=halfstep.OneRank() where each "
                "process trains a model of its own"
            )
        for flag in flags.values():  # not even where a rank without gradients raises
            flag.copy_(marks.amax(), non_blocking=True)
        return flags

    def _around_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return stepping(optimizer)
