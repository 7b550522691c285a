"""The look at a step's finished gradients, over all ranks, that decides whether it is applied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.precision.checks import no_gradients
from halfstep.precision.gradients import NonFinite, exact_global_norm, find_nonfinite
from halfstep.precision.local import parts_of
from halfstep.precision.master_weights import MasterWeights
from halfstep.precision.optimizer_masters import common_norm
from halfstep.precision.ranks import Ranks

# Below this norm, squares of fp32 gradients come near the smallest fp32 number, 2^-149.
_SQUARES_FIT = 1e-15
_STRANGER = "a tensor that is not the model's"


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
        sharded = {name: parts_of(weight) for name, weight in model.named_parameters()}
        self._parts = {p: sharded[name] for name, p in masters.named_parameters().items()}

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Parameter to gradient, for all that the optimizer is about to update.

        Raises:
            PrecisionError: If there is none, or a parameter came too late to have a master.
        """
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        owned = [p for group in groups for p in group["params"]]
        late = [p for p in owned if p.requires_grad and not self._masters.covers(p)]
        gradients = self._masters.gradients(owned)
        if late or not gradients:
            self._ranks.cannot()
            raise no_gradients(self._names(late))
        return gradients

    def judge(
        self, loss: Tensor, gradients: Mapping[nn.Parameter, Tensor]
    ) -> tuple[float, float, NonFinite | None]:
        """Measure a step, the same on every rank, with one host synchronisation.

        Args:
            loss: This rank's, fp32 scalar.
            gradients: From :meth:`gradients`.

        Returns:
            The step's loss, the global norm of its gradients (in fp64 where squares leave the range
            of fp32), and what is not finite in them: None if the loss itself is not.
        """
        by_parts: dict[int, list[Tensor]] = {}
        for parameter, gradient in gradients.items():
            by_parts.setdefault(self._parts.get(parameter, 1), []).append(gradient)
        norm_of = partial(common_norm, self._optimizers)
        value, norm = self._ranks.measure(loss, by_parts, norm_of)
        if not math.isfinite(value):
            return value, norm, None
        found = NonFinite((), ())
        if not math.isfinite(norm):
            named = zip(self._names(gradients), gradients.values(), strict=True)
            every = [*self._masters.named_parameters(), _STRANGER]
            found = self._ranks.union(find_nonfinite(named), every)
        if not found.names and not _SQUARES_FIT < norm < math.inf:
            _, norm = self._ranks.measure(loss, by_parts, exact_global_norm)
        return value, norm, found

    def _names(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        named = [*self._model.named_parameters(), *self._masters.named_parameters().items()]
        names = {parameter: name for name, parameter in named}
        return tuple(names.get(p, _STRANGER) for p in parameters)
