"""Follows infinities until they do harm, or until an operation has made finite numbers of them.

An infinity need not be a fault: T5 takes ``log(0)`` of distances that it does not use, a softmax
makes 0 of ``-inf``, a clamp makes a number of ``inf``. So the operation that makes one is a suspect
at first, and so is everything that the infinity passes through::

    NaN is made of it                  the suspect is the cause
    it becomes finite                  the suspect is cleared, unless NaN is made of it elsewhere
    nothing has made it finite         the suspect is the cause of what is still infinite

Where several are the cause, the first is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.diagnostics.nonfinite.cause import Cause
from halfstep.diagnostics.nonfinite.operations import storage_key, stored


class _Suspect:
    """A cause of infinities, and the storages that hold them."""

    def __init__(self, cause: Cause) -> None:
        self.cause = cause
        self.storages: dict[int, StorageWeakRef] = {}  # weak references keep keys from reuse
        self.cleared = False


class Suspects:
    """The operations that have made infinities, in order."""

    def __init__(self) -> None:
        self._suspects: list[_Suspect] = []

    def __bool__(self) -> bool:
        """Whether there are any, cleared ones included."""
        return bool(self._suspects)

    def add(self, cause: Cause, made: Iterable[Tensor]) -> None:
        """Remember an operation that made infinities of finite numbers."""
        suspect = _Suspect(cause)
        self._suspects.append(suspect)
        _hold(suspect, made)

    def of(self, given: Iterable[Tensor]) -> list[int]:
        """The numbers of the suspects whose infinities may be in these tensors."""
        keys = {storage_key(tensor) for tensor in given}
        return [n for n, s in enumerate(self._suspects) if keys & s.storages.keys()]

    def pass_on(self, numbers: Iterable[int], made: Iterable[Tensor]) -> None:
        """Infinities of these suspects have passed into what an operation made."""
        tensors = [*made]
        for number in numbers:
            _hold(self._suspects[number], tensors)

    def clear(self, numbers: Iterable[int]) -> None:
        """An operation has made finite numbers of the infinities of these suspects."""
        for number in numbers:
            self._suspects[number].cleared = True

    def first(self, numbers: Iterable[int]) -> Cause:
        """The first of these and of all that are not cleared."""
        known = {*numbers}
        return next(s.cause for n, s in enumerate(self._suspects) if n in known or not s.cleared)

    def forward_of(self, node: str, module: str) -> Cause | None:
        """The suspect whose backward this autograd node is, such as ``log`` of ``LogBackward0``."""
        for suspect in self._suspects:
            base = suspect.cause.op.split(".")[1].strip("_").replace("_", "")
            forward = suspect.cause.direction == "forward" and suspect.cause.module == module
            if forward and node.partition("Backward")[0].lower() == base:
                return suspect.cause
        return None

    @property
    def open(self) -> Cause | None:
        """The first suspect whose infinities nothing has made finite."""
        return next((s.cause for s in self._suspects if not s.cleared), None)


def _hold(suspect: _Suspect, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        reference = StorageWeakRef(stored(tensor).untyped_storage())  # type: ignore[no-untyped-call]
        suspect.storages[reference.cdata] = reference
