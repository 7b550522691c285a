"""Data parallel: every rank has the whole model and a share of the batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from halfstep.distributed.data.reducer import GradientReducer
from halfstep.distributed.strategy import Strategy
from halfstep.distributed.traffic import Traffic
from halfstep.precision.step import Precision


class DataParallel(Strategy):
    """Gradients are summed over the ``data`` axis, in ``reduce_dtype``, while backward runs."""

    _reducer: GradientReducer | None = None

    def attach_(self, precision: Precision) -> None:
        """As the parent; and sum the gradients where there are several shares of the batch."""
        super().attach_(precision)
        if self.layout.data > 1:
            assert self.mesh is not None
            group = self.mesh.get_group("data")
            self._reducer = GradientReducer(precision, group, self.policy.reduce_dtype)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """In the last one, sums start as soon as gradients are finished."""
        if last and self._reducer is not None:
            return self._reducer.last()
        return nullcontext()

    def finish(self) -> None:
        """Wait for the sums."""
        if self._reducer is not None:
            self._reducer.finish()

    def traffic(self, micro_batches: int) -> tuple[Traffic, Traffic]:
        """As the reducer counts; micro-batches add up before anything is sent."""
        if self._reducer is None:
            return Traffic(), Traffic()
        sent, fp32 = self._reducer.bytes_per_step, self._reducer.fp32_bytes_per_step
        return Traffic(gradients=sent), Traffic(gradients=fp32)
