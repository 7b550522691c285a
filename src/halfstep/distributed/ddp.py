"""Data parallelism: every rank has the whole model, and a share of the batch.

Gradients are summed over ranks by torch's DistributedDataParallel (DDP), while the backward of the
last micro-batch runs. It is made around the bare parameters, so that names, ``state_dict`` and
methods such as ``loss_sum`` stay what they are. Its communication hook makes sums, not means: the
loss is divided by the count of the whole batch of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed.strategy import Strategy
from halfstep.errors import PrecisionError
from halfstep.precision.masters.reduction import Reduction
from halfstep.precision.step import Precision


class DataParallel(Strategy):
    """Sums gradients over the ``data`` axis, in ``reduce_dtype``, while backward runs.

    A gradient that is missing on this rank counts as zeros; one that is missing on every rank stays
    None, as on one device.
    """

    def attach_(self, precision: Precision) -> None:
        """Make the DDP of the parameters that the optimizers update."""
        self._reduction: Reduction = precision.masters.accumulation.reduction
        self._weights = precision.masters.weights
        self._summed = False  # whether this step's gradients were
        self._wrap()

    def _wrap(self) -> None:
        assert self.mesh is not None
        self._trained = self._now()
        self._wrapper = DistributedDataParallel(
            _Loss(self._trained),
            process_group=self.mesh.get_group("data"),
            init_sync=False,  # Precision has compared the weights
            find_unused_parameters=True,
            gradient_as_bucket_view=True,  # the gradients' own memory is freed
        )
        self._reduction.attach(self._wrapper, mean=False)

    def _now(self) -> list[nn.Parameter]:
        return [w.parameter for w in self._weights.values() if w.parameter.requires_grad]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Return the context; in the last micro-batch, sums start as gradients are finished."""
        if last and [*map(id, self._now())] != [*map(id, self._trained)]:
            self._wrap()  # as something was frozen or unfrozen
        self._reduction.prepare = self._begin if last else None
        try:
            yield
        except BaseException:
            self._summed = False
            raise
        finally:
            self._reduction.prepare = None

    def finish(self) -> None:
        """Check that the gradients were summed, as they are when the last backward has ended."""
        if not self._summed:
            raise PrecisionError(
                "finish() without a backward inside micro_batch(last=True): the gradients of the "
                "ranks were not summed. Put the last forward and backward of a step into it"
            )
        self._summed = False

    def _begin(self, loss: Tensor) -> None:
        if self._summed:
            raise PrecisionError(
                "a second backward inside micro_batch(last=True), when gradients are sums over "
                "ranks already; call backward once, on the sum of the losses, and finish() after it"
            )
        self._summed = True
        self._wrapper(loss)


class _Loss(nn.Module):
    """Hands a loss through, in whose graph DDP looks for the parameters that it does not reach."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(parameters)
        # never reached: where DDP finds no such parameter, it writes on stderr that it looked
        self.unused = nn.Parameter(parameters[0].detach().new_zeros(1))

    def forward(self, loss: Tensor) -> Tensor:
        return loss
