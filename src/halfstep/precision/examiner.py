"""The look at a step's finished gradients, over all ranks, that decides whether it is applied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.checks import no_gradients
from halfstep.precision.gradients import NonFinite, exact_global_norm, find_nonfinite
from halfstep.precision.master_weights import MasterWeights
from halfstep.precision.optimizer_masters import common_norm
from halfstep.precision.ranks import Ranks

# Below this norm, squares of fp32 gradients come near the smallest fp32 number, 2^-149.
_SQUARES_FIT = 1e-15
_STRANGER = "a tensor that is not the model's"


@dataclass(frozen=True, slots=True)
class Judged:
    """What a step's gradients and loss turned out to be, the same on every rank.

    Attributes:
        loss: Of the whole step.
        norm: The global 2-norm of its gradients, in fp64 where squares leave the range of fp32.
        found: What is not finite in them; None if the loss itself is not.
    """

    loss: float
    norm: float
    found: NonFinite | None

    @property
    def broken(self) -> bool:
        """Whether the step must not be applied."""
        return self.found is None or bool(self.found.names)


class Examiner:
    """Takes the gradients from where they are kept, measures them, and names what is broken."""

    def __init__(
        self,
        model: nn.Module,
        masters: MasterWeights,
        optimizers: Sequence[Optimizer],
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._masters = masters
        self._optimizers = optimizers
        self._ranks = ranks

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """What the optimizers are about to update, and the gradient of each.

        Raises:
            PrecisionError: If there is none, or a parameter was converted since it was taken in.
        """
        try:
            gradients = self._masters.gradients()
            if not gradients:
                raise no_gradients()
        except PrecisionError:
            self._ranks.cannot()
            raise
        return gradients

    def judge(self, loss: Tensor, gradients: Mapping[nn.Parameter, Tensor]) -> Judged:
        """Measure a step, with one host synchronisation.

        Args:
            loss: This rank's, fp32 scalar.
            gradients: From :meth:`gradients`.
        """
        by_parts: dict[int, list[Tensor]] = {}
        for target, gradient in gradients.items():
            parts = self._ranks.parts_of(self._masters.parameter_of(target))
            by_parts.setdefault(parts, []).append(gradient)
        norm_of = partial(common_norm, self._optimizers)
        value, norm = self._ranks.measure(loss, by_parts, norm_of)
        if not math.isfinite(value):
            return Judged(value, norm, None)
        found = NonFinite((), ())
        if not math.isfinite(norm):
            named = zip(self._names(gradients), gradients.values(), strict=True)
            every = [*self._masters.named_parameters(), _STRANGER]
            found = self._ranks.union(find_nonfinite(named), every)
        if not found.names and not _SQUARES_FIT < norm < math.inf:
            _, norm = self._ranks.measure(loss, by_parts, exact_global_norm)
        return Judged(value, norm, found)

    def _names(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        named = [*self._model.named_parameters(), *self._masters.named_parameters().items()]
        names = {parameter: name for name, parameter in named}
        return tuple(names.get(p, _STRANGER) for p in parameters)
