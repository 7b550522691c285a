"""A program of somebody else's package, and one run of it.

A program is written twice: as its package's documentation has it, and with the lines that halfstep
needs. Both take a :class:`Run`, which says what this run is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from strangers.losses import Prepare

STEPS = 10
Model = TypeVar("Model", bound=nn.Module)


def _leave(model: object) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Run:
    """One run of a program.

    Attributes:
        policy: None for the program as it stands.
        prepare: What is done to the model before its first forward.
        rate: A factor of the program's learning rate; other than 1 it is a wrong run.
    """

    policy: str | None = None
    prepare: Prepare = _leave
    rate: float = 1.0

    def begin(self, model: Model) -> Model:
        """The model, prepared as this run says."""
        self.prepare(model)
        return model


@dataclass(frozen=True)
class Program:
    """Training code of a package.

    Attributes:
        name: What a failure calls it.
        package: Whose code it is.
        train: One run; gives the loss of each step, in order.
        refused: What the refusal says, by policy; a policy that is not named trains.
        rule: A policy's rule that the model needs under 16-bit weights, or none.
        bare: One run without that rule.
        amplifies: By how much its code makes roundings larger that no rounding of weights shows.
        own_loss: Whether the loss comes in the format of the weights, outside of any context.
    """

    name: str
    package: str
    train: Callable[[Run], list[float]]
    refused: Mapping[str, str] = field(default_factory=dict)
    rule: str = ""
    bare: Callable[[Run], list[float]] | None = None
    own_loss: bool = False
    amplifies: float = 1.0

    def __str__(self) -> str:
        """Its name, for the name of a test."""
        return self.name
