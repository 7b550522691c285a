"""A program of somebody else's package, and one run of it.

A program is written twice: as its package's documentation has it, and with the lines that halfstep
needs. Both take a :class:`Run`, which says what this run is for.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

STEPS = 10


@dataclass(frozen=True)
class Run:
    """One run of a program.

    Attributes:
        policy: None for the program as it stands.
        unit: How far the initial weights are moved at random, relative to each.
        draw: Which random numbers move them.
        rate: A factor of the program's learning rate; other than 1 it is a wrong run.
        sgd: Whether by SGD instead of AdamW.
    """

    policy: str | None = None
    unit: float = 0.0
    draw: int = 0
    rate: float = 1.0
    sgd: bool = False

    def begin(self, model: nn.Module) -> nn.Module:
        """The model, with its trainable weights moved as this run says."""
        if self.unit:
            source = torch.Generator().manual_seed(1000 + self.draw)
            with torch.no_grad():
                for weight in model.parameters():
                    way = torch.rand(weight.shape, generator=source) * 2 - 1
                    weight.mul_(1 + self.unit * way)
        return model


@dataclass(frozen=True)
class Program:
    """Training code of a package.

    Attributes:
        name: What the table calls it.
        package: Whose code it is.
        train: One run; gives the loss of each step, in order.
        lines: Lines added and removed for a policy, in the user's code.
        refused: What the refusal says, by policy; a policy that is not named trains.
        rule: A policy's rule that the model needs under 16-bit weights, or none.
    """

    name: str
    package: str
    train: Callable[[Run], list[float]]
    lines: Callable[[str], tuple[int, int]]
    refused: Mapping[str, str] = field(default_factory=dict)
    rule: str = ""


def lines_changed(before: Callable[..., object], after: Callable[..., object]) -> tuple[int, int]:
    """How many lines one function adds to the other, and how many it takes away."""
    found = [line[0] for line in difflib.ndiff(_body(before), _body(after))]
    return found.count("+"), found.count("-")


def _body(function: Callable[..., object]) -> list[str]:
    """Its lines without name, arguments and docstring."""
    lines = inspect.getsource(function).splitlines()
    start = next(i for i, line in enumerate(lines) if line.rstrip().endswith(":"))
    return [line for line in lines[start + 1 :] if line.strip() and '"""' not in line]
