"""Where tensors stand in an optimizer's groups, found without a walk over all of them.

An update that is made for one parameter after another, as where gradients are released during
backward, would otherwise cost a walk over all parameters each time: the square of their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

Groups = Sequence[Mapping[str, Any]]
T = TypeVar("T", bound=Tensor)


class Place(NamedTuple):
    """Where a tensor stands in an optimizer's groups."""

    stream: int  # its index over all groups, which is the number of its random stream
    group: int  # the index of its group
    at: int  # its index in the group


class Places:
    """The places of one optimizer's tensors, remembered from one look-up to the next.

    A remembered place counts only where the tensor stands there still and no group has grown or
    shrunk, so that nobody needs to tell of a change.
    """

    def __init__(self) -> None:
        self.in_parts = False  # whether a step ever was; a property would be called in whole steps
        self._places: dict[int, Place] = {}  # by the tensor's id; checked before use
        self._lengths: list[int] = []
        self._part: int | None = None  # the number of the step in parts for which it was made

    def of(
        self, groups: Groups, tensors: Iterable[T], part: int | None = None
    ) -> list[tuple[Place, T]]:
        """The places of those tensors that the groups hold, in the order of the groups.

        Args:
            groups: The optimizer's.
            tensors: Others may be among them.
            part: The number of a step in parts. All groups are walked over for the first of its
                parts, and for one without tensors; a tensor that was in none of them then is taken
                for another optimizer's.
        """
        wanted = [*tensors]
        anew = part is not None and (part != self._part or not wanted)
        found = None if anew else self._remembered(groups, wanted)
        if found is None or (part is None and len(found) < len(wanted)):
            self._walk(groups)
            found = self._remembered(groups, wanted) or []
        if part is not None:
            self._part = part
            self.in_parts = True
        return sorted(found, key=_stream)

    def _remembered(self, groups: Groups, wanted: Sequence[T]) -> list[tuple[Place, T]] | None:
        """The remembered places; None if one is wrong by now."""
        if [len(group["params"]) for group in groups] != self._lengths:
            return None
        found = []
        for tensor in wanted:
            place = self._places.get(id(tensor))
            if place is None:
                continue
            if groups[place.group]["params"][place.at] is not tensor:
                return None
            found.append((place, tensor))
        return found

    def _walk(self, groups: Groups) -> None:
        self._lengths = [len(group["params"]) for group in groups]
        self._places, stream = {}, 0
        for number, group in enumerate(groups):
            for at, tensor in enumerate(group["params"]):
                self._places[id(tensor)] = Place(stream, number, at)
                stream += 1


def _stream(found: tuple[Place, Tensor]) -> int:
    return found[0].stream


class Exchange:
    """Puts single targets into the places of their parameters, for a part of a step."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._places = [(optimizer, Places()) for optimizer in optimizers]

    @contextmanager
    def installed(self, targets: Mapping[Tensor, nn.Parameter], part: int) -> Iterator[None]:
        """Inside the context, groups and states hold the targets of these parameters."""
        moved = []
        for optimizer, places in self._places:
            groups = optimizer.param_groups
            for place, parameter in places.of(groups, targets, part):
                moved.append((optimizer, groups[place.group]["params"], place.at, parameter))
        for optimizer, held, at, parameter in moved:
            held[at] = targets[parameter]
            _rename(optimizer, parameter, targets[parameter])
        try:
            yield
        finally:
            for optimizer, held, at, parameter in moved:
                held[at] = parameter
                _rename(optimizer, targets[parameter], parameter)


def _rename(optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)
