"""Delayed scaling: an operand is scaled by the largest magnitude of the steps before.

For each operand of a layer (inputs, weights, gradients)::

    amax of a step    the largest magnitude over its micro-batches and ranks
    scale             largest number of the format / the largest amax of the last N applied steps
    beyond it         magnitudes above that amax become the largest number of the format: counted

So a tensor is scaled before anybody has seen its largest number. As long as there is no amax above
0, the tensor's own is taken, as current scaling does: in the first step, and for good where no
backward reaches the layer, or only zeros.

What a backward pass uses is what counts: a forward alone changes nothing, and one that activation
checkpointing runs again counts once. A step that is skipped, and gradients that are cleared, leave
no trace; nor does a backward pass that fails, or an amax that is not finite.

**Source:** arXiv 2209.05433, section 3.2; TransformerEngine 2, ``recipe.DelayedScaling`` with
``margin=0``, ``amax_compute_algo="max"`` and ``reduce_amax``. It differs in two things: there each
forward is a step of the history, micro-batches and skipped ones too, and the first scale is 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.scaling.gradients import Ranks

_OPERANDS = ("inputs", "weights", "gradients")


class _Seen(NamedTuple):
    amax: Tensor  # fp32, 0-dim: the largest magnitude
    beyond: Tensor  # int64, 0-dim: how many magnitudes are larger than the history's


class AmaxHistory:
    """The largest magnitudes of every operand over the last applied steps.

    Only those that no later step exceeds are kept, since no other can be the largest again: a few
    numbers of each operand, whatever the length.

    Attributes:
        saturated: What the last applied step clipped: counts by ``"layer operand"``, without zeros;
            of several ranks that of the rank with the most.

    Args:
        length: How many applied steps count.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.saturated: dict[str, int] = {}
        self._steps = 0
        self._kept: dict[str, deque[tuple[int, float]]] = {}  # falling amaxes, and their steps
        self._limits: dict[tuple[str, torch.device], Tensor] = {}  # a copy may be elsewhere
        self._seen: list[tuple[str, _Seen]] = []  # in this step's backward passes

    def for_copy(self) -> AmaxHistory:
        """The same amaxes for a copy of the model, whose backward passes leave no trace in them."""
        return _CopiedHistory(self)

    def track(self, layer: str) -> None:
        """Expect a layer's operands; every rank does so for the same layers in the same order."""
        self._kept.update({f"{layer} {operand}": deque() for operand in _OPERANDS})

    def limit(self, operand: str, device: torch.device) -> Tensor | None:
        """The amax to scale an operand by, fp32 and 0-dim; None where there is none above 0."""
        kept = self._kept.get(operand)
        if not kept or not kept[0][1]:
            return None
        if (operand, device) not in self._limits:
            self._limits[operand, device] = torch.tensor(kept[0][1], device=device)
        return self._limits[operand, device]

    def saw(self, operand: str, seen: _Seen) -> None:
        """Note an operand of a backward pass, until the step is applied or dropped."""
        self._seen.append((operand, seen))

    @contextmanager
    def backward(self, counts: bool) -> Iterator[None]:
        """The context for a backward pass: what it notes stays if it counts and does not fail."""
        before, whole = len(self._seen), False
        try:
            yield
            whole = True
        finally:
            if not (whole and counts):
                del self._seen[before:]

    def drop(self) -> None:
        """Forget what was noted since the last step."""
        self._seen.clear()

    def took(self, ranks: Ranks) -> None:
        """Add an applied step; all ranks call it together."""
        largest, clipped = dict.fromkeys(self._kept, 0.0), dict.fromkeys(self._kept, 0)
        if self._seen:
            amaxes = torch.stack([seen.amax for _, seen in self._seen]).tolist()
            beyond = torch.stack([seen.beyond for _, seen in self._seen]).tolist()
            for (operand, _), amax, count in zip(self._seen, amaxes, beyond, strict=True):
                largest[operand] = max(largest[operand], amax if amax < torch.inf else 0.0)
                clipped[operand] += count
        table = torch.tensor([[*largest.values()], [*clipped.values()]], dtype=torch.float64)
        ranks.worst_(table)
        self.drop()
        self._steps += 1
        self._limits.clear()
        self.saturated = {}
        for (operand, kept), amax, count in zip(self._kept.items(), *table.tolist(), strict=True):
            while kept and kept[-1][1] <= amax:
                kept.pop()
            kept.append((self._steps, amax))
            if kept[0][0] <= self._steps - self.length:
                kept.popleft()
            if count:
                self.saturated[operand] = int(count)

    def state(self) -> dict[str, Any]:
        """Everything that later scales depend on: numbers in lists, which JSON keeps exactly."""
        kept = {operand: [list(pair) for pair in pairs] for operand, pairs in self._kept.items()}
        return {"steps": self._steps, "amaxes": kept}

    def restore_(self, state: object) -> None:
        """Continue from :meth:`state`, or begin anew from None; operands that are new begin anew.

        Raises:
            PrecisionError: If it is damaged; nothing is changed then.
        """
        self._steps, amaxes = as_history(state)
        self._kept = {operand: deque(amaxes.get(operand, ())) for operand in self._kept}
        self._limits.clear()
        self.drop()


class _CopiedHistory(AmaxHistory):
    def __init__(self, run: AmaxHistory) -> None:
        super().__init__(run.length)
        self._run = run

    def limit(self, operand: str, device: torch.device) -> Tensor | None:
        return self._run.limit(operand, device)

    def saw(self, operand: str, seen: _Seen) -> None:
        pass


class Call:
    """The operands of one call of a layer, each looked at once: gradients in each backward pass."""

    def __init__(self, history: AmaxHistory, layer: str) -> None:
        self._history, self._layer = history, layer
        self._found: dict[str, _Seen] = {}

    def amax(self, operand: str, x: Tensor) -> Tensor | None:
        """The largest magnitude to scale an operand by; None: its own."""
        name = f"{self._layer} {operand}"
        limit = self._history.limit(name, x.device)
        if operand not in self._found:
            self._found[operand] = _look(x, limit)
        return limit

    def keep(self) -> None:
        """Note what was looked at: its backward pass has run. The next one has other gradients."""
        for operand, seen in self._found.items():
            self._history.saw(f"{self._layer} {operand}", seen)
        self._found.pop("gradients", None)


def _look(x: Tensor, limit: Tensor | None) -> _Seen:
    if not x.numel():
        return _Seen(torch.zeros((), device=x.device), _none(x.device))
    least, most = torch.aminmax(x)
    amax = torch.maximum(-least, most).float()
    # a GPU counts always, rather than have the host wait for it
    if limit is None or (x.device.type == "cpu" and not amax > limit):
        return _Seen(amax, _none(x.device))
    return _Seen(amax, (x.abs() > limit).sum())


def _none(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def as_history(state: object) -> tuple[int, dict[str, list[tuple[int, float]]]]:
    """Check a history's saved state, which may come from a damaged file; None is an empty one."""
    if state is None:
        return 0, {}
    if isinstance(state, Mapping) and set(state) == {"steps", "amaxes"}:
        steps, amaxes = state["steps"], state["amaxes"]
        if type(steps) is int and isinstance(amaxes, Mapping):
            found = {str(name): _as_falling(pairs, steps) for name, pairs in amaxes.items()}
            whole = {name: pairs for name, pairs in found.items() if pairs is not None}
            if len(whole) == len(found):
                return steps, whole
    raise PrecisionError(
        f"the saved precision state has amax_history={state!r:.80}: not the number of steps, and "
        "for each operand its falling largest magnitudes with their steps"
    )


def _as_falling(pairs: object, steps: int) -> list[tuple[int, float]] | None:
    """Pairs of a step and an amax, steps rising and amaxes falling; None if they are no such."""
    if not isinstance(pairs, list | tuple):
        return None
    found: list[tuple[int, float]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or [type(value) for value in pair] != [int, float]:
            return None
        step, amax = pair
        after = not found or (found[-1][0] < step and found[-1][1] > amax)
        if not (after and 0 < step <= steps and 0.0 <= amax < torch.inf):
            return None
        found.append((step, amax))
    return found
