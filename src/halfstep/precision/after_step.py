"""What is advanced after each step: learning-rate schedules, and the EMA of the weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.errors import PrecisionError
from halfstep.precision.border import as_dtype, as_number, require, require_model
from halfstep.precision.masters.local_part import local_part, reshard_
from halfstep.precision.masters.rounding import random_bits, round_stochastic

OnSkip = Literal["hold", "advance"]


class AfterStep:
    """Advances schedules and the EMA; on a skip the EMA holds, the schedules as chosen."""

    def __init__(
        self,
        schedulers: Sequence[Any],
        on_skip: OnSkip,
        ema: EMA | None,
        names: Collection[str],
    ) -> None:
        """Check the arguments; ``names`` are those of the model's trainable parameters."""
        if on_skip not in get_args(OnSkip):
            raise PrecisionError(f"on_skip={on_skip!r}; allowed: {', '.join(get_args(OnSkip))}")
        where, allowed = "Precision(schedulers)", "a list of torch's learning-rate schedulers"
        for scheduler in require(schedulers, (list, tuple), where, allowed):
            if not callable(getattr(scheduler, "step", None)):
                require(scheduler, LRScheduler, where, allowed)
            if isinstance(scheduler, ReduceLROnPlateau):
                raise PrecisionError(
                    "ReduceLROnPlateau wants a metric with each step; leave it out of schedulers= "
                    "and step it yourself where result.applied"
                )
        if ema is not None:
            require(ema, EMA, "Precision(ema)", "a halfstep.EMA of the model").require(names)
        self._schedulers = schedulers
        self._on_skip = on_skip
        self.ema = ema
        self.waits = bool(schedulers) or ema is not None
        """Whether there is anything to advance, which the next step needs."""

    def require_own_weights(self) -> None:
        """Refuse to read or train weights while averages have replaced them."""
        if self.ema is not None and self.ema.applied:
            raise PrecisionError(
                "inside ema.applied_to(model) the model's weights are averages, which a step or a "
                "checkpoint would take for the trained ones. Leave the block first"
            )

    def __call__(self, applied: bool, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Advance; the exact ``weights`` are read only if there is an EMA to update."""
        if applied and self.ema is not None:
            self.ema.update_(weights, grow=True)
        if applied:
            for scheduler in self._schedulers:
                scheduler.step()
        elif self._schedulers and self._on_skip == "advance":
            with warnings.catch_warnings():
                # torch mistakes a schedule that advances on a skipped step for a wrong call order.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                for scheduler in self._schedulers:
                    scheduler.step()


# An exponential moving average of the weights that also moves in low precision.


_STREAMS = 2**31  # the number of an EMA's first random stream, above all those of optimizers


class EMA:
    """average <- decay * average + (1 - decay) * weight, after every applied step.

    At decay 0.9999 one update moves the average by 1e-4 of its distance to the weight: rounded to
    nearest in bf16 it never moves at all. The average is therefore fp32, or bf16 with stochastic
    rounding, and where the model's weights are 16-bit it averages the exact masters.

    **Source:** Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> ema = EMA(model, decay=0.9)
        >>> ema.update_(model.named_parameters())
        >>> with ema.applied_to(model):
        ...     _ = model(torch.ones(1, 2))
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        dtype: str | torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """Start the average at the model's trainable weights.

        Args:
            model: Best passed before its weights are cast to 16 bits.
            decay: Above 0 and below 1.
            dtype: fp32, or bf16 at half the memory; by name or as a torch.dtype.
            seed: Seed of the stochastic rounding.

        Raises:
            PrecisionError: If decay or dtype is not allowed, or ``model`` is not a module.
        """
        require_model(model, "EMA(model)")
        decay = as_number(decay, "EMA(decay)", "0 < decay < 1")
        if not 0 < decay < 1:
            raise PrecisionError(f"decay={decay}; allowed: 0 < decay < 1")
        dtype = as_dtype(dtype)
        if dtype not in (torch.float32, torch.bfloat16):
            raise PrecisionError(f"an average in {dtype}; allowed: fp32 or bf16")
        self.decay = decay
        self.dtype = dtype
        self.seed = seed
        self.updates = 0
        self.applied = False
        """Whether a model's weights are replaced by the averages: :meth:`applied_to`."""
        self.averages = {
            name: local_part(parameter).detach().to(dtype, copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.is_floating_point()
        }

    @torch.no_grad()
    def update_(self, weights: Iterable[tuple[str, Tensor]], *, grow: bool = False) -> None:
        """Move every average towards its weight; call after applied steps only.

        Args:
            weights: Name and value, of any floating dtype.
            grow: Whether weights without an average, because they were frozen until now, start
                one; otherwise they are ignored.
        """
        self.updates += 1
        seen = 0
        for name, weight in weights:
            average = self.averages.get(name)
            if average is None:
                if grow:
                    self.averages[name] = weight.detach().to(self.dtype, copy=True)
                continue
            value = average.float().lerp_(weight.detach().float(), 1 - self.decay)
            if average.dtype == torch.bfloat16:
                # separate streams, since optimizers with the same seed number theirs from 0
                stream = _STREAMS + seen
                bits = random_bits(
                    self.seed, self.updates, value.shape, stream=stream, device=value.device
                )
                value = round_stochastic(value.contiguous(), bits)
            average.copy_(value)
            seen += 1

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
        with torch.no_grad():
            own = {name: parameter.detach().clone() for name, parameter in named.items()}
        self.applied = True
        try:
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.copy_(self.averages[name])
            yield
        finally:
            self.applied = False
            reshard_(model)  # drops averages that FSDP2 has gathered
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.copy_(own[name])

    def state_dict(self) -> dict[str, Any]:
        """The averages and the number of updates; decay and seed belong to the configuration."""
        return {"updates": self.updates, "averages": dict(self.averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            PrecisionError: If it is from another model; nothing is changed then.
        """
        if set(state) != {"updates", "averages"} or not isinstance(state["updates"], int):
            raise PrecisionError(
                f"the saved average has keys {sorted(state)}, expected averages and updates"
            )
        saved = state["averages"]
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in self.averages.items()}:
            odd = sorted(set(saved) ^ set(self.averages)) or ["shapes differ"]
            raise PrecisionError(
                f"the saved average is of another model: {', '.join(odd[:5])}; make EMA of a model "
                "whose parameters are trainable and frozen as they were when it was saved"
            )
        for name, average in self.averages.items():
            average.copy_(saved[name])
        self.updates = state["updates"]
