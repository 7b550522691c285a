"""An exponential moving average of the weights, from exact values."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.precision.border import require_model
from halfstep.precision.casting.op_table import drop_casts
from halfstep.precision.masters.local_part import local_part, reshard_

_MOVED = 2**24  # elements that are moved at once: few launches on a GPU


class EMA:
    """average <- decay * average + (1 - decay) * weight, in fp32, after every applied step.

    At decay 0.9999 one update moves the average by 1e-4 of its distance to the weight: rounded to
    nearest in bf16 it never moves at all. Where the model's weights are 16-bit, Precision gives it
    the exact masters.

    **Source:** Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> ema = EMA(model, decay=0.9)
        >>> ema.update_(model.named_parameters())
        >>> with ema.applied_to(model):
        ...     _ = model(torch.ones(1, 2))
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        """Start the average at the model's trainable weights.

        Args:
            model: Best passed before its weights are cast to 16 bits.
            decay: Above 0 and below 1.
        """
        require_model(model, "EMA(model)")
        if not 0 < decay < 1:
            raise PrecisionError(f"decay={decay}; allowed: 0 < decay < 1")
        self.decay = decay
        self.updates = 0
        self.applied = False
        """Whether a model's weights are replaced by the averages: :meth:`applied_to`."""
        self.averages = {
            name: local_part(parameter).detach().to(torch.float32, copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.is_floating_point()
        }

    @torch.no_grad()
    def update_(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Move every average towards its weight; call after applied steps only.

        Args:
            weights: Name and value, of any floating dtype. One without an average, as it was
                frozen until now, starts one.
        """
        self.updates += 1
        size, some = 0, dict[str, Tensor]()
        for name, weight in weights:
            if name not in self.averages:
                self.averages[name] = weight.detach().to(torch.float32, copy=True)
                continue
            some[name] = weight.detach().float()
            size += weight.numel()
            if size > _MOVED:
                self._move_(some)
                size, some = 0, {}
        self._move_(some)

    def _move_(self, weights: Mapping[str, Tensor]) -> None:
        averages = [self.averages[name] for name in weights]
        if averages:
            torch._foreach_lerp_(averages, [*weights.values()], 1 - self.decay)

    def require(self, names: Collection[str]) -> None:
        """Refuse a model that lacks averaged parameters: their averages would never change.

        Raises:
            PrecisionError: Naming some of them.
        """
        missing = sorted(set(self.averages) - set(names))
        if missing:
            raise PrecisionError(
                f"the average is of {missing[0]} and {len(missing) - 1} more parameters that this "
                "model does not train under these names; make EMA and Precision from the same "
                "object (a wrapper, as torch.compile's, has other names)"
            )

    def require_own_weights(self) -> None:
        """Refuse to read or train weights while averages have replaced them."""
        if self.applied:
            raise PrecisionError(
                "inside ema.applied_to(model) the model's weights are averages, which a step or a "
                "checkpoint would take for the trained ones. Leave the block first"
            )

    @contextlib.contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model's weights are the averages, in the model's own dtypes.

        For evaluation only: a checkpoint made inside would mix averages with optimizer state.

        Raises:
            PrecisionError: If the model lacks parameters of the average.
        """
        reshard_(model)
        named = {n: local_part(p) for n, p in model.named_parameters() if n in self.averages}
        self.require(named)
        own = {name: parameter.detach().clone() for name, parameter in named.items()}
        self.applied = True
        try:
            _copy_(named, self.averages)
            yield
        finally:
            self.applied = False
            reshard_(model)  # drops averages that FSDP2 has gathered
            _copy_(named, own)

    def state_dict(self) -> dict[str, Any]:
        """The averages and the number of updates; decay belongs to the configuration."""
        return {"updates": self.updates, "averages": dict(self.averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            PrecisionError: If it is from another model; nothing is changed then.
        """
        saved = state["averages"]
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in self.averages.items()}:
            odd = sorted(set(saved) ^ set(self.averages)) or ["shapes differ"]
            raise PrecisionError(
                f"the saved average is of another model: {', '.join(odd[:5])}; make EMA of a model "
                "whose parameters are trainable and frozen as they were when it was saved"
            )
        _copy_(self.averages, saved)
        self.updates = state["updates"]


@torch.no_grad()
def _copy_(to: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in to.items():
        tensor.copy_(values[name])
    drop_casts()  # also those of what FSDP2 gathers from these
